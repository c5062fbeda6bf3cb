"""`kvhold simulate`: the hits of a cache on a trace."""
