"""LMCache's connector, loaded by vLLM from LMCache's environment.

Repairs a name of llvmlite that vLLM breaks.
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
