"""Who owns bytes: the arena, the allocator that divides it, the host's limits, and the views of engines' memory."""
