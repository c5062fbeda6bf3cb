"""`state.py` decides; `local.py` runs it in one process."""

from kvhold.cache.local import LocalCache, open_cache

__all__ = ["LocalCache", "open_cache"]
