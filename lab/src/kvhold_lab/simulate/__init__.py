"""`kvhold simulate`: the hit rates of caches on a trace of requests."""
