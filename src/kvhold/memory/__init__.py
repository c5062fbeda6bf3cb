"""The arena, its allocator, views of engines' memory, and copies."""
