"""Readers and writers of other tools' result files."""
