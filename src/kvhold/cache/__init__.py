"""The Cache: lookup, claim, reserve, commit.

`state.py` decides, `local.py` is it in one process.
"""

from kvhold.cache.local import LocalCache, open_cache

__all__ = ["LocalCache", "open_cache"]
