"""KV sizes and capacities."""
