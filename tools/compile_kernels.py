"""Compiles the kernels of codecs and simulations before the tests do, on all cores.

    python tools/compile_kernels.py      # in kvhold's environment; what `make unit` runs first

Numba keeps compiled kernels beside the sources. Otherwise each test process would spend a minute on
a fresh checkout.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

_KERNELS = Path(__file__).parents[1] / "src" / "kvhold" / "kernels"
_OF_THE_LAB = "kvhold_lab.simulate.numba_eviction"


def main() -> None:
    """Modules that others import come first."""
    began = time.monotonic()
    kernels = sorted(
        (path.stem for path in _KERNELS.glob("numba_*.py")), key=_imported_by, reverse=True
    )
    names = [*(f"kvhold.kernels.{kernel}" for kernel in kernels), _OF_THE_LAB]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as processes:
        list(processes.map(_compile, names))
    print(
        f"{len(names)} modules of kernels are compiled: {time.monotonic() - began:.1f} s",
        file=sys.stderr,
    )


def _compile(name: str) -> None:
    import_module(name)


def _imported_by(name: str) -> int:
    return sum(f"kernels.{name} import" in path.read_text() for path in _KERNELS.glob("numba_*.py"))


if __name__ == "__main__":
    main()
