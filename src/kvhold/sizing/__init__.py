"""How large KV is, what fits where, and what a cache of some size would have found: arithmetic and replays, before anything is bought."""
