"""Memory: the arena, its allocator, the host's limits, views of engines' memory, and copies."""
