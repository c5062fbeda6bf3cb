"""kvhold inside SGLang, below its host memory and beside its radix tree.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
        --hicache-storage-backend-extra-config '{"backend_name": "kvhold", "module_path":
        "kvhold.integrations.sglang", "class_name": "KVHoldStorage", "interface_v1": 1}'

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config '{"linker_module_path": "kvhold.integrations.sglang",
        "linker": "KVHoldLinker"}'

`storage.py` and `linker.py` hold the two classes that SGLang dictates: pages between its host pools
and the cache, and pages between its device pools and the cache, a layer at a time. Both stand on
`shelf.py` (pages by SGLang's hashes in the cache; never raises a fault of ours), `pools.py` (where
a page lies in a pool of SGLang's) and `names.py` (hashes to names, facts about the engine to a
namespace); `settings.py` reads the JSON. Supported: SGLang 0.5.23. What was run, and where, is in
docs/sglang.md.
"""

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
