"""LMCache's connectors for vLLM, loaded by vLLM in an engine's process, out of an environment that
is LMCache's own.

    {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path":
    "kvhold.lab.bench.compare.lmcache_in_vllm", "kv_role": "kv_both"}

with the folder of that environment's packages in the variable `PACKAGES`. They come after the
engine's own packages, so that only what is missing is taken from there. Importing this also mends
what keeps the two from starting together: LMCache loads llvmlite before vLLM goes through all names
of all modules in search of its kernels, and llvmlite's library takes `__dict__` for a function of
LLVM's.
"""

import os
import sys
from typing import Any

PACKAGES = "BENCH_LMCACHE_PACKAGES"


def _mend_llvmlite() -> None:
    from llvmlite.binding import ffi

    library = ffi._lib_wrapper
    function_of = library.__getattr__

    def getattr_of(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return function_of(self, name)

    library.__getattr__ = getattr_of


if PACKAGES in os.environ:
    sys.path.append(os.environ[PACKAGES])
    _mend_llvmlite()
    from lmcache.integration.vllm.lmcache_mp_connector import (
        LMCacheMPConnector as LMCacheMPConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (
        LMCacheConnectorV1 as LMCacheConnectorV1,
    )
