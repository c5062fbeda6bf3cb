"""The chunks in memory: the hit of a query, and why a chunk is not there."""
