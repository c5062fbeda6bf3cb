"""Finds a query's hit in memory, and the reason of a miss."""
