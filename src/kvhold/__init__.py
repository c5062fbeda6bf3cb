"""KV caches of LLM engines.

    import kvhold
    with kvhold.open_cache(ram_bytes="2GiB") as cache:  # in this process
        ...                                             # kvhold.connect() joins this host's node

The import loads no torch.
"""

TYPE_CHECKING = False  # as in `typing`, whose import is slow
if TYPE_CHECKING:
    from kvhold.cache import LocalCache, open_cache
    from kvhold.core.api import Cache, Hit
    from kvhold.core.arrays import LoadedKV
    from kvhold.core.config import Config, load_config
    from kvhold.core.errors import KVHoldError
    from kvhold.core.holdings import Lease, Reservation
    from kvhold.core.keys import Namespace, Prompt
    from kvhold.core.layout import Group, Layout
    from kvhold.core.store_options import StoreOptions
    from kvhold.node import NodeClient, connect

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Config",
    "Group",
    "Hit",
    "KVHoldError",
    "Layout",
    "Lease",
    "LoadedKV",
    "LocalCache",
    "Namespace",
    "NodeClient",
    "Prompt",
    "Reservation",
    "StoreOptions",
    "connect",
    "load_config",
    "open_cache",
]

_HOME = {
    "Cache": "kvhold.core.api",
    "Config": "kvhold.core.config",
    "Group": "kvhold.core.layout",
    "Hit": "kvhold.core.api",
    "KVHoldError": "kvhold.core.errors",
    "Layout": "kvhold.core.layout",
    "Lease": "kvhold.core.holdings",
    "LoadedKV": "kvhold.core.arrays",
    "LocalCache": "kvhold.cache",
    "Namespace": "kvhold.core.keys",
    "NodeClient": "kvhold.node",
    "Prompt": "kvhold.core.keys",
    "Reservation": "kvhold.core.holdings",
    "StoreOptions": "kvhold.core.store_options",
    "connect": "kvhold.node",
    "load_config": "kvhold.core.config",
    "open_cache": "kvhold.cache",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvhold' has no attribute {name!r}")
