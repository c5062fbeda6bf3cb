"""Triton's kernel: the width of its accesses, as compiled for GPUs, and its programs."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvhold import kernels
from kvhold.kernels import Chunks, plan_blocks
from tests.kernels.checking import check
from tests.kernels.compiled import GPUS, memory_of_threads, wide_accesses
from tests.kernels.engines import TOKENS, arena_for, make


@pytest.mark.parametrize(
    ("kind", "head_dim", "pad", "cut", "first", "widest"),
    [
        ("HND", 8, 0, 0, 128, 16),
        ("NHD", 8, 0, 0, 128, 16),
        ("HND", 4, 0, 0, 128, 8),
        ("HND", 2, 0, 0, 128, 4),  # narrow heads
        ("NHD", 4, 2, 0, 128, 4),  # heads 12 bytes apart, rows 24
        ("HND", 4, 1, 0, 128, 2),  # rows 10 bytes apart
        ("NHD", 8, 0, 0, 136, 8),  # a chunk at an offset of 8
        ("NHD", 4, 0, 0, 132, 4),  # ... and of 4
        ("NHD", 4, 0, 1, 127, 8),  # and where the odd offset and an odd base are an even address
        ("NHD", 4, 0, 1, 128, 1),
    ],
)
def test_triton_accesses_are_no_wider_than_every_address_allows(
    kind: str, head_dim: int, pad: int, cut: int, first: int, widest: int
) -> None:
    """A GPU faults on a word at an odd address; the interpreter does not."""
    pytest.importorskip("triton", reason="no Triton in this environment")
    from kvhold.kernels.triton_copy import Words, words_of

    view = make(kind, head_dim=head_dim, pad=pad).view
    chunks = arena_for(view, [8], first=first)
    chunks = Chunks(chunks.base[cut:], chunks.offsets, chunks.num_tokens)
    expected = Words(8, 2) if widest == 16 else Words(widest, 1)
    assert words_of(plan_blocks(view, np.array([1, 3]), chunks)) == expected


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("to_arena", [True, False])
@pytest.mark.parametrize(
    ("runs_are_whole", "widest"), [(True, 16), (False, 16), (True, 8), (False, 1)]
)
def test_the_triton_kernel_compiled_for_a_gpu_moves_words_as_wide_as_it_was_told(
    gpu: str, to_arena: bool, runs_are_whole: bool, widest: int, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton", reason="no Triton in this environment")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvhold.kernels.triton_copy import TILE_WORDS, _copy_tiles

    word_bytes = min(8, widest)
    constants = {
        "to_arena": to_arena,
        "runs_are_whole": runs_are_whole,
        "row_words": 2048 // word_bytes,
        "head_words": 256 // word_bytes,
        "word_bytes": word_bytes,
        "vector_words": widest // word_bytes,
        "tile_words": TILE_WORDS,
    }
    kinds = {"tables": "*i64", "row_stride": "i64", "head_stride": "i64"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "i32")
        for name in _copy_tiles.arg_names
    }
    compiled = triton.compile(
        ASTSource(fn=_copy_tiles, signature=signature, constexprs=constants),
        target=GPUTarget(*GPUS[gpu]),
    )
    text = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]

    # Eight accesses of 16 bytes a thread (four where a wave has 64 threads) to either side, beside
    # the tables' words of eight.
    of_tiles = TILE_WORDS // (compiled.metadata.num_warps * GPUS[gpu][2] * 2)
    loads, stores = wide_accesses(text)
    if widest == 16:
        assert (loads, stores) == (of_tiles, of_tiles)
    else:
        assert (loads, stores) == (0, 0)
    assert "ld.local" not in text and "st.local" not in text and "scratch_" not in text, (
        "registers do not go to memory"
    )
    if gpu == "gfx942":
        assert set(re.findall(r"[sv]gpr_spill_count: *(\d+)", text)) == {"0"}
    else:
        assert memory_of_threads(compiled.asm["cubin"], tmp_path) == {"STACK:0", "LOCAL:0"}


@pytest.mark.usefixtures("triton_interpreted")
class TestTritonPrograms:
    """Few programs take many tiles in turn."""

    @pytest.mark.parametrize("programs", [1, 3, 1000])
    def test_all_tiles_are_copied_however_many_programs_there_are(
        self, monkeypatch: pytest.MonkeyPatch, programs: int
    ) -> None:
        worker = kernels._load("triton").__globals__
        monkeypatch.setitem(worker, "TILE_WORDS", 8)
        monkeypatch.setitem(worker, "PROGRAMS", programs)
        ids = [2, 5, 0, 3, 4]
        slots = [n for i in ids for n in range(i * TOKENS, (i + 1) * TOKENS)]
        check(
            lambda: make("NHD"),
            lambda v, c: plan_blocks(v, np.array(ids), c),
            [2 * TOKENS, 3 * TOKENS],
            slots,
            worker="triton",
        )

    def test_preparing_moves_nothing(self) -> None:
        engine = make("HND")
        before = [memory.copy() for memory in engine.memory]
        kernels._load("triton").__globals__["prepare"](engine.view)
        for memory, expected in zip(engine.memory, before, strict=True):
            np.testing.assert_array_equal(memory, expected)
