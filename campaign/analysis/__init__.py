"""Rows to pairs to verdicts: pure functions."""
