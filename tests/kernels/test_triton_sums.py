"""Triton's kernel of checksums: XXH3-64 of the library, whatever the pieces, and as compiled for
GPUs.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvhold.kernels import Ranges, begin_sums
from kvhold.kernels.reference_sums import sum_ranges
from tests.kernels.compiled import GPUS, memory_of_threads

MEMORY = np.random.default_rng(0).integers(0, 256, 1 << 19, dtype=np.uint8)


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The kernel under its interpreter. Other tests get another module."""
    pytest.importorskip("triton", reason="no Triton in this environment")
    name = "kvhold.kernels.triton_sums"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, name, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        module = import_module(name)
        sys.modules.pop(name)
    return module


def ranges_of(*sizes: list[int]) -> Ranges:
    """One for each list, with pieces of these sizes that lie anywhere in MEMORY, with gaps."""
    nbytes = np.array([size for pieces in sizes for size in pieces], np.int64)
    starts = np.zeros_like(nbytes)
    order = np.random.default_rng(nbytes.size).permutation(nbytes.size)
    starts[order] = np.cumsum(nbytes[order] + 8) - nbytes[order] - 8
    assert int((starts + nbytes).max()) <= MEMORY.size
    first = np.cumsum([0, *map(len, sizes)])
    return Ranges(first, MEMORY.ctypes.data + starts, nbytes)


def library(ranges: Ranges) -> list[int]:
    """By bytes that are put together first."""
    found = []
    for first, stop in zip(ranges.first[:-1], ranges.first[1:], strict=True):
        places = range(int(first), int(stop))
        starts = ranges.addresses - MEMORY.ctypes.data
        data = b"".join(MEMORY[starts[i] :][: ranges.nbytes[i]].tobytes() for i in places)
        found.append(xxh3_64_intdigest(data))
    return found


# each number of stripes and of words in the last one, whole blocks, and more than four
ONE_PIECE = [[size] for size in (*range(248, 1344, 40), 1024, 2048, 2056, 5128, 6136)]
PIECES = [
    [1024, 1024],
    [2048, 1024, 248],
    [1024, 1032],
    [3072, 1024, 2048, 1016],
    [1024, 1024, 1024, 1024],
    [1024, 4096, 1992],
]


@pytest.mark.parametrize(
    ("sizes", "programs"), [(ONE_PIECE, 1000), (PIECES, 1000), (PIECES, 4), ([[512]], 1000)]
)
def test_sums_are_those_of_the_library(
    interpreted: ModuleType,
    sizes: list[list[int]],
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreted, "PROGRAMS", programs)
    ranges = ranges_of(*sizes)
    assert ranges.suits("cuda:0")
    assert interpreted.begin_sums(ranges, "cpu").read().tolist() == library(ranges)
    assert sum_ranges(ranges).tolist() == library(ranges)


def test_equal_bytes_that_lie_elsewhere_have_equal_sums_and_one_bit_changes_them(
    interpreted: ModuleType,
) -> None:
    data = np.zeros(3 * 2048, np.uint8)
    data[:2048] = data[2048:4096] = data[4096:] = MEMORY[:2048]
    address = data.ctypes.data
    split = Ranges(
        np.array([0, 1, 3, 4]),
        np.array([address, address + 2048, address + 3072, address + 4096]),
        np.array([2048, 1024, 1024, 2048]),
    )
    for at in range(4096, 6144, 680):
        data[at] ^= 1
        one, other, changed = interpreted.begin_sums(split, "cpu").read().tolist()
        assert one == other != changed
        data[at] ^= 1


@pytest.mark.parametrize(
    "sizes",
    [[[240]], [[1000, 1024]], [[1020]], [[1024], []], [[1024, 64]]],
    ids=["short", "a block over two pieces", "no whole word", "no piece", "a short end"],
)
def test_other_ranges_are_left_to_the_host(sizes: list[list[int]]) -> None:
    ranges = ranges_of(*sizes)
    assert not ranges.suits("cuda:0")
    with pytest.raises(ValueError, match="cuda:0 cannot take the checksums of these ranges"):
        begin_sums(ranges, "cuda:0")
    at_odd_place = Ranges(np.array([0, 1]), np.array([MEMORY.ctypes.data + 4]), np.array([1024]))
    assert not at_odd_place.suits("cuda:0")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("gpu", GPUS)
def test_the_kernel_compiled_for_a_gpu_keeps_all_in_registers(gpu: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton", reason="no Triton in this environment")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvhold.kernels.triton_sums import _WARPS, _sum_ranges

    signature = {
        "table": "*i64",
        "num_ranges": "i32",
        "num_pieces": "i32",
        "found": "i64",
        "constants": "*i64",
    }
    compiled = triton.compile(
        ASTSource(fn=_sum_ranges, signature=signature),
        target=GPUTarget(*GPUS[gpu]),
        options={"num_warps": _WARPS},
    )
    text = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
    assert "ld.local" not in text and "st.local" not in text and "scratch_" not in text
    if gpu == "gfx942":
        assert set(re.findall(r"[sv]gpr_spill_count: *(\d+)", text)) == {"0"}
    else:
        assert memory_of_threads(compiled.asm["cubin"], tmp_path) == {"STACK:0", "LOCAL:0"}
