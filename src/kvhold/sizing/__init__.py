"""Size a cache before buying one: KV sizes, what fits where, and hit rates from replayed traces."""
