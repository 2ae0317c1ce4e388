"""Prompt packs and their pins."""
