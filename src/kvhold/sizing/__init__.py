"""Size a cache before buying one: KV sizes, capacities and hit rates."""
