"""kvhold holds the KV caches of LLM engines, so that no text is prefilled twice.

    import kvhold
    with kvhold.open_cache(ram_bytes="2GiB") as cache:  # in this process
        ...                                             # kvhold.connect() joins this host's node

Importing this package loads no torch and probes no device. The names below are resolved on first
use.
"""

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than the rest of this module
if TYPE_CHECKING:
    from kvhold.cache import LocalCache, open_cache
    from kvhold.core.config import Config, load_config
    from kvhold.core.errors import KVHoldError
    from kvhold.core.keys import Namespace
    from kvhold.core.layout import Group, Layout
    from kvhold.node import NodeClient, connect

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Group",
    "KVHoldError",
    "Layout",
    "LocalCache",
    "Namespace",
    "NodeClient",
    "connect",
    "load_config",
    "open_cache",
]

_HOME = {
    "Config": "kvhold.core.config",
    "Group": "kvhold.core.layout",
    "KVHoldError": "kvhold.core.errors",
    "Layout": "kvhold.core.layout",
    "LocalCache": "kvhold.cache",
    "Namespace": "kvhold.core.keys",
    "NodeClient": "kvhold.node",
    "connect": "kvhold.node",
    "load_config": "kvhold.core.config",
    "open_cache": "kvhold.cache",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvhold' has no attribute {name!r}")
