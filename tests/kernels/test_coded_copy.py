"""Chunks with 8 bits an element: codes and scales are those of the codec int8, row by row; nothing
else is touched.
"""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvhold import kernels
from kvhold.core.errors import LayoutError
from kvhold.core.layout import CANONICAL, Group
from kvhold.kernels import Chunks, Plan, View, Worker, gather, plan_blocks, scatter
from kvhold.memory.coding import ERROR_BOUND, coded_group, coded_view
from kvhold.memory.views import opaque_blocks

quantise = pytest.importorskip(
    "kvhold.kernels.numba_quantise", reason="no numba in this environment"
)
from kvhold.kernels import numba_coded_copy, numba_copy  # noqa: E402  # after the skip
from tests.kernels.compiled import GPUS, memory_of_threads, wide_accesses  # noqa: E402
from tests.kernels.elements import CONTENTS, DTYPES, content  # noqa: E402

WORKERS: tuple[Worker, ...] = ("numba", "triton")
LAYERS, BLOCKS, TOKENS, HEADS = 3, 7, 2, 3
IDS = np.array([4, -1, 0, 1, 5], np.int64)
NUM_TOKENS = np.array([4, 2, 4], np.int64)  # chunks of two blocks, one and two
OFFSETS = np.array([16, 9000, 20000], np.int64)


@pytest.fixture(scope="class")
def coded_twin() -> Iterator[None]:
    """`worker="triton"` codes in host memory while this holds.

    Only our kernels are interpreted: Triton itself was imported before.
    """
    pytest.importorskip("triton", reason="no Triton in this environment")
    names = [f"kvhold.kernels.triton_{name}" for name in ("floats", "copy", "coded_copy")]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        module = import_module(names[-1])
        for name in names:
            sys.modules.pop(name, None)
        patch.setattr(
            kernels,
            "_load_coded",
            lambda worker: module.copy if worker == "triton" else numba_coded_copy.copy,
        )
        yield


class Engine:
    """Blocks of an engine, and the chunks that are made of them."""

    def __init__(self, dtype: str, head_dim: int = 64, *, kind: str = "normal") -> None:
        self.elements = 2 * TOKENS * HEADS * head_dim
        element_bytes = 4 if dtype == "float32" else 2
        self.group = Group(
            layers=LAYERS,
            planes=2,
            heads=HEADS,
            head_dim=head_dim,
            dtype=dtype,
            packing="an-engine",
            block_tokens=TOKENS,
            block_bytes=self.elements * element_bytes,
        )
        self.memory = [
            content(kind, dtype, BLOCKS * self.elements).reshape(BLOCKS, self.elements)
            for _ in range(LAYERS)
        ]
        for layer, tensor in enumerate(self.memory):
            tensor[:] = np.roll(tensor, layer)
        self.view = coded_view(opaque_blocks(self.group, self.memory, block_axis=0), "int8")
        self.base = np.full(40_000, 0xAA, np.uint8)

    def plan(self, view: View | None = None) -> Plan:
        return plan_blocks(view or self.view, IDS, Chunks(self.base, OFFSETS, NUM_TOKENS))

    def encoded(self, layer: int, block: int) -> bytes:
        """What a row is, made by the codec's own function."""
        coding = self.view.coding
        assert coding is not None
        codes, scales = np.empty(self.elements, np.int8), np.empty(coding.scales, np.float32)
        quantise.int8_encode(
            self.memory[layer][block], self.group.dtype, coding.run, coding.run, codes, scales
        )
        return codes.tobytes() + scales.tobytes()

    def expected(self, layers: range = range(LAYERS)) -> np.ndarray[Any, Any]:
        """The arena after a gather."""
        base, nbytes, at = np.full_like(self.base, 0xAA), self.view.group.block_bytes, 0
        for offset, tokens in zip(OFFSETS, NUM_TOKENS, strict=True):
            rows = int(tokens) // TOKENS
            for layer in layers:
                for row in range(rows):
                    if IDS[at + row] >= 0:
                        start = int(offset) + (layer * rows + row) * nbytes
                        base[start : start + nbytes] = np.frombuffer(
                            self.encoded(layer, int(IDS[at + row])), np.uint8
                        )
            at += rows
        return base


def floats_of(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32 if dtype == "float32" else np.float16).astype(np.float32)


@pytest.mark.usefixtures("coded_twin")
@pytest.mark.parametrize("worker", WORKERS)
class TestEveryWorker:
    """Both make the same bytes of the same blocks."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", CONTENTS)
    def test_a_row_is_what_the_codec_makes_of_the_block(
        self, worker: Worker, dtype: str, kind: str
    ) -> None:
        engine = Engine(dtype, kind=kind)
        gather(engine.plan(), worker=worker)
        np.testing.assert_array_equal(engine.base, engine.expected())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_comes_back_is_within_the_bound_and_coded_again_the_same(
        self, worker: Worker, dtype: str
    ) -> None:
        engine = Engine(dtype)
        gather(engine.plan(), worker=worker)
        before, chunks = [tensor.copy() for tensor in engine.memory], engine.base.copy()
        for tensor in engine.memory:
            tensor[:] = 0
        scatter(engine.plan(), worker=worker)
        for layer, tensor in enumerate(engine.memory):
            for block in range(BLOCKS):
                if block not in IDS:
                    assert not tensor[block].any()
                    continue
                was, now = (
                    floats_of(each[block], dtype).reshape(-1, 64)
                    for each in (before[layer], tensor)
                )
                largest = np.abs(was).max(axis=1, keepdims=True)
                assert (np.abs(was - now) <= ERROR_BOUND * largest).all()
                assert (np.abs(now).max(axis=1, keepdims=True) == largest).all()
        np.testing.assert_array_equal(engine.base, chunks)
        gather(engine.plan(), worker=worker)
        np.testing.assert_array_equal(engine.base, chunks)

    @pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256, 576])
    def test_heads_of_every_width_are_divided_into_runs(
        self, worker: Worker, head_dim: int
    ) -> None:
        engine = Engine("bfloat16", head_dim)
        engine.base = np.full(400_000, 0xAA, np.uint8)
        plan = plan_blocks(
            engine.view,
            np.array([2, 6], np.int64),
            Chunks(engine.base, np.zeros(1, np.int64), np.array([4])),
        )
        gather(plan, worker=worker)
        rows = engine.base[: LAYERS * 2 * engine.view.group.block_bytes].reshape(LAYERS, 2, -1)
        assert [rows[layer, row].tobytes() for layer in range(LAYERS) for row in range(2)] == [
            engine.encoded(layer, block) for layer in range(LAYERS) for block in (2, 6)
        ]

    def test_some_layers_leave_the_others_alone(self, worker: Worker) -> None:
        engine = Engine("bfloat16")
        gather(engine.plan(), layers=range(1, 2), worker=worker)
        np.testing.assert_array_equal(engine.base, engine.expected(range(1, 2)))
        other = Engine("bfloat16")
        other.base[:] = engine.expected()
        kept = [tensor.copy() for tensor in other.memory]
        scatter(other.plan(), layers=range(1, 3), worker=worker)
        np.testing.assert_array_equal(other.memory[0], kept[0])
        assert not np.array_equal(other.memory[1], kept[1])
        assert not np.array_equal(other.memory[2], kept[2])

    @pytest.mark.parametrize("wild", [np.inf, -np.inf, np.nan])
    def test_what_is_not_finite_is_told_by_its_scale(self, worker: Worker, wild: float) -> None:
        engine = Engine("float32")
        engine.memory[2][5, 70] = np.array([wild], np.float32).view(np.uint32)[0]
        gather(engine.plan(), worker=worker)
        start = int(OFFSETS[2]) + (2 * 2 + 1) * engine.view.group.block_bytes + engine.elements
        scales = engine.base[start : start + 4 * 12].view(np.float32)
        assert [bool(np.isfinite(scale)) for scale in scales] == [
            number != 1 for number in range(12)
        ]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(numba_copy, "SLICE_BYTES", 256)
    engine = Engine("float16")
    gather(engine.plan(), threads=threads)
    np.testing.assert_array_equal(engine.base, engine.expected())


def test_checksums_are_of_the_codes() -> None:
    engine = Engine("bfloat16")
    for copy in (gather, scatter):
        sums = np.zeros((3, LAYERS), np.uint64)
        copy(engine.plan(), sums=sums)
        for chunk, rows in ((0, 2), (2, 2)):
            nbytes = rows * engine.view.group.block_bytes
            layers = engine.base[OFFSETS[chunk] : OFFSETS[chunk] + LAYERS * nbytes].reshape(
                LAYERS, nbytes
            )
            assert sums[chunk].tolist() == [xxh3_64_intdigest(layer.data) for layer in layers]


def test_scales_that_would_not_be_aligned_are_refused() -> None:
    engine = Engine("bfloat16")
    plan = plan_blocks(engine.view, IDS, Chunks(engine.base, OFFSETS + 2, NUM_TOKENS))
    with pytest.raises(ValueError, match="multiples of 4"):
        gather(plan)
    with pytest.raises(ValueError, match="cannot be encoded"):
        gather(engine.plan(), worker="reference")


def test_a_group_says_how_it_is_coded_and_takes_about_half() -> None:
    engine = Engine("bfloat16", 128)
    coded = coded_group(engine.group, "int8")
    assert (coded.packing, coded.dtype, coded.block_bytes) == (
        "an-engine+int8",
        "int8",
        engine.elements + 4 * engine.elements // 128,
    )
    assert coded.block_bytes / engine.group.block_bytes < 0.52
    assert coded_group(engine.group, "none") == engine.group
    assert (
        coded_view(opaque_blocks(engine.group, engine.memory, block_axis=0), "none").coding is None
    )


def test_groups_that_gain_nothing_are_left_and_those_that_cannot_be_coded_are_refused() -> None:
    opaque: dict[str, Any] = {"packing": "x", "block_tokens": 2, "block_bytes": 768}
    state = Group(
        layers=1, planes=1, heads=1, head_dim=64, dtype="int8", attention="state", **opaque
    )
    of_8_bits = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="float8_e4m3fn", **opaque)
    assert [coded_group(group, "int8") for group in (state, of_8_bits)] == [state, of_8_bits]
    for group, why in (
        (
            Group(layers=1, planes=2, heads=1, head_dim=64, dtype="bfloat16", packing=CANONICAL),
            "whole blocks",
        ),
        (Group(layers=1, planes=1, heads=1, head_dim=72, dtype="bfloat16", **opaque), "runs of 16"),
        (
            Group(
                layers=1,
                planes=1,
                heads=1,
                head_dim=64,
                dtype="bfloat16",
                **opaque | {"block_bytes": 770},
            ),
            "runs of 16",
        ),
        (Group(layers=1, planes=1, heads=1, head_dim=64, dtype="float64", **opaque), "float64"),
    ):
        with pytest.raises(LayoutError, match=why):
            coded_group(group, "int8")


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("to_arena", [True, False])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_kernel_compiled_for_a_gpu_reads_and_writes_many_elements_at_once(
    gpu: str, to_arena: bool, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="no Triton in this environment")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvhold.kernels.triton_coded_copy import TILE_ELEMENTS, _copy_tiles

    constants = {
        "to_arena": to_arena,
        "kind": kind,
        "runs": 256,
        "run": 128,
        "together": TILE_ELEMENTS // 128,
    }
    constants |= {"view_alignment": 16, "arena_alignment": 16}
    signature = {
        name: "constexpr" if name in constants else "i32" for name in _copy_tiles.arg_names
    } | {"tables": "*i64"}
    source = ASTSource(fn=_copy_tiles, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget(*GPUS[gpu]), options={"enable_fp_fusion": False}
    )
    text = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
    loads, stores = wide_accesses(text)
    assert (loads if to_arena else stores) >= TILE_ELEMENTS * (4 if kind == 2 else 2) // (
        compiled.metadata.num_warps * GPUS[gpu][2] * 16
    )
    assert "ld.local" not in text and "st.local" not in text and "scratch_" not in text, (
        "registers do not go to memory"
    )
    if gpu == "gfx942":
        assert set(re.findall(r"[sv]gpr_spill_count: *(\d+)", text)) == {"0"}
    else:
        assert not [each for each in ("fma.rn.f", ".ftz", "div.full", ".approx") if each in text], (
            "nothing is fused or approximated"
        )
        assert memory_of_threads(compiled.asm["cubin"], tmp_path) == {"STACK:0", "LOCAL:0"}
