"""Prompts whose spans are reused wherever they stand. Their KV is not exact."""
