"""Reuse of text that is not a prefix."""
