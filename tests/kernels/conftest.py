"""The Triton worker under its interpreter, for tests on machines without a GPU."""

import sys
from collections.abc import Iterator

import pytest

from kvhold import kernels


@pytest.fixture(scope="class")
def triton_interpreted() -> Iterator[None]:
    """`worker="triton"` copies host memory while this holds.

    Only our kernel is interpreted: Triton itself was imported before.
    """
    pytest.importorskip("triton", reason="no Triton in this environment")
    name = "kvhold.kernels.triton_copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, name, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        kernels._load.cache_clear()
        kernels._load("triton")
    yield
    sys.modules.pop(name, None)
    kernels._load.cache_clear()
