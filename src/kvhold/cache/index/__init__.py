"""Finds the hit of a query in memory, and the reason why a chunk is missing."""
