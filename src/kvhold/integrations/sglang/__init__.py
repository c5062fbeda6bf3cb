from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhold.integrations.sglang.linker import KVHoldLinker
    from kvhold.integrations.sglang.storage import KVHoldStorage

__all__ = ["KVHoldLinker", "KVHoldStorage"]

_HOME = {
    "KVHoldLinker": "kvhold.integrations.sglang.linker",
    "KVHoldStorage": "kvhold.integrations.sglang.storage",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kvhold.integrations.sglang' has no attribute {name!r}")
