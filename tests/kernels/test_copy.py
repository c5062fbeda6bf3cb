"""Gather and scatter move exactly the bytes they are asked to: every worker, every arrangement,
every width.
"""

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold import kernels
from kvhold.core.layout import Group
from kvhold.kernels import Chunks, Plan, View, Worker, gather, plan_blocks, plan_slots, scatter
from tests.kernels.checking import PAGED, SLOTS, TOKENS_OF, WORKERS, check
from tests.kernels.engines import (
    ARRANGEMENTS,
    BLOCKS,
    MARGIN,
    TOKENS,
    Engine,
    arena_for,
    lines,
    make,
    of_permuted_axes,
)

numba_copy = pytest.importorskip("kvhold.kernels.numba_copy", reason="no numba in this environment")


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little there is to copy, numba streams it where it can, and splits it
    among threads.
    """
    monkeypatch.setattr(numba_copy, "STREAM_BYTES", 0)
    monkeypatch.setattr(numba_copy, "SLICE_BYTES", 256)


@pytest.mark.usefixtures("triton_interpreted")
@pytest.mark.parametrize("worker", WORKERS)
class TestEveryWorker:
    """What every worker promises, whatever the engine's arrangement."""

    @pytest.mark.parametrize("kind", PAGED)
    def test_tokens_by_slot_with_gaps_tails_and_empty_chunks(
        self, worker: Worker, kind: str
    ) -> None:
        check(
            lambda: make(kind),
            lambda v, c: plan_slots(v, np.array(SLOTS), c),
            TOKENS_OF,
            SLOTS,
            worker=worker,
        )

    @pytest.mark.parametrize("kind", ARRANGEMENTS)
    def test_whole_blocks_with_a_tail(self, worker: Worker, kind: str) -> None:
        ids = [2, 5, -1, 3, 4]
        tokens = [8, 7, 1] if kind != "opaque" else [8, 8, 4]
        slots = (
            ids
            if kind == "opaque"
            else [
                n
                for i in ids[:4]
                for n in (range(i * TOKENS, (i + 1) * TOKENS) if i >= 0 else [-1] * TOKENS)
            ]
        )
        slots = slots if kind == "opaque" else [*slots[:15], ids[4] * TOKENS]
        check(
            lambda: make(kind),
            lambda v, c: plan_blocks(v, np.array(ids), c),
            tokens,
            slots,
            worker=worker,
        )

    @pytest.mark.parametrize("kind", PAGED)
    def test_tensors_in_which_only_dim_is_contiguous(self, worker: Worker, kind: str) -> None:
        check(
            lambda: make(kind, pad=3),
            lambda v, c: plan_slots(v, np.array(SLOTS), c),
            TOKENS_OF,
            SLOTS,
            worker=worker,
        )

    @pytest.mark.parametrize(
        ("dtype", "head_dim"),
        [
            ("float32", 1),
            ("float16", 8),
            ("bfloat16", 7),
            ("float8_e4m3fn", 3),
            ("float8_e5m2", 9),
            ("int8", 1),
        ],
    )
    @pytest.mark.parametrize("kind", ["NHD", "HND"])
    def test_any_dtype_and_odd_widths_at_odd_addresses(
        self, worker: Worker, kind: str, dtype: str, head_dim: int
    ) -> None:
        check(
            lambda: make(kind, dtype=dtype, head_dim=head_dim, heads=3),
            lambda v, c: plan_slots(v, np.array(SLOTS), c),
            TOKENS_OF,
            SLOTS,
            worker=worker,
            gap=5,
            first=131,
        )

    def test_nan_payloads_and_signalling_bits_survive(self, worker: Worker) -> None:
        engine = make("NHD", dtype="float32", head_dim=4)
        for raw in engine.memory:
            # signalling NaNs with a payload
            raw[:] = np.resize(np.array([1, 0, 0xA0, 0x7F], np.uint8), raw.size)
        chunks = arena_for(engine.view, [4])
        gather(plan_blocks(engine.view, np.array([1]), chunks), worker=worker)
        size = engine.view.layers * engine.view.planes * 4 * engine.view.row_bytes
        np.testing.assert_array_equal(
            chunks.base[128 : 128 + size], np.resize(np.array([1, 0, 0xA0, 0x7F], np.uint8), size)
        )

    @pytest.mark.parametrize("kind", ["HND", "opaque"])
    def test_some_layers_fall_in_their_places(self, worker: Worker, kind: str) -> None:
        slots = [1, 4] if kind == "opaque" else [*range(4, 8), *range(16, 20)]
        check(
            lambda: make(kind, layers=4),
            lambda v, c: plan_blocks(v, np.array([1, 4]), c),
            [8],
            slots,
            worker=worker,
            layers=range(1, 3),
        )

    def test_layer_by_layer_with_one_plan_is_all_at_once(self, worker: Worker) -> None:
        engine = make("HND", layers=3)
        chunks = arena_for(engine.view, [8, 8])
        plan = plan_blocks(engine.view, np.array([6, 0, 3, 2]), chunks)
        gather(plan, worker=worker)
        whole = chunks.base.copy()
        chunks.base[128:-64] ^= 0xFF
        for layer in (2, 0, 1):
            gather(plan, layers=range(layer, layer + 1), worker=worker)
        for offset, size in zip(
            chunks.offsets, [3 * 2 * 8 * engine.view.row_bytes] * 2, strict=True
        ):
            np.testing.assert_array_equal(
                chunks.base[offset : offset + size], whole[offset : offset + size]
            )

    @pytest.mark.parametrize("kind", ["unpaged", "K and V pools"])
    def test_runs_of_many_kilobytes(self, worker: Worker, kind: str) -> None:
        """Longer than a tile of the GPU's and than numba's lead, and not a multiple of either."""
        slots = [*range(3, 27), 0, 1]
        check(
            lambda: make(
                kind,
                layers=1,
                head_dim=256,
                blocks=BLOCKS if kind == "K and V pools" else 1,
                tokens=28,
            ),
            lambda v, c: plan_slots(v, np.array(slots), c),
            [24, 2],
            slots,
            worker=worker,
        )

    def test_nothing_asked_is_nothing_done(self, worker: Worker) -> None:
        none = np.zeros(0, np.int64)
        check(lambda: make("NHD"), lambda v, c: plan_slots(v, none, c), [], [], worker=worker)
        check(
            lambda: make("NHD"),
            lambda v, c: plan_slots(v, np.full(3, -1), c),
            [3],
            [-1] * 3,
            worker=worker,
        )
        check(lambda: make("NHD"), lambda v, c: plan_blocks(v, none, c), [0, 0], [], worker=worker)

    def test_from_one_engine_into_another_arrangement_and_back(self, worker: Worker) -> None:
        """The chunk is the common form: what left as NHD arrives as HND, token by token."""
        there, here = make("NHD", seed=1), make("K and V pools", seed=2)
        chunks = arena_for(there.view, [9])
        came, went = (
            np.array([5, 6, 7, 8, 25, 24, 23, 0, 1]),
            np.array([20, 3, 4, 5, 6, 7, 8, 9, 10]),
        )
        gather(plan_slots(there.view, came, chunks), worker=worker)
        scatter(plan_slots(here.view, went, chunks), worker=worker)
        for a, b in zip(came.tolist(), went.tolist(), strict=True):
            for layer in range(2):
                for plane in range(2):
                    np.testing.assert_array_equal(
                        there.row(layer, plane, a), here.row(layer, plane, b)
                    )

    def test_offsets_and_strides_beyond_32_bits(self, worker: Worker, tmp_path: Path) -> None:
        """Two blocks 5 GiB apart and a chunk 9 GiB into the arena, in sparse files of which hardly
        a page is ever touched.
        """
        far, span = 5 << 30, (10 << 30) + 4096
        engine, arena = (
            np.memmap(tmp_path / name, np.uint8, "w+", shape=(span,))
            for name in ("engine", "arena")
        )
        group = Group(layers=1, planes=1, heads=2, head_dim=8, dtype="uint8")
        view = View(
            group=group,
            device="cpu",
            table=np.array([[engine.ctypes.data]], np.int64),
            owners=((engine,),),
            num_rows=6,
            rows_per_block=2,
            block_stride=far,
            row_stride=64,
            head_stride=32,
        )
        rng = np.random.default_rng(0)
        slots = np.array([4, 3, 2, 5])
        for slot in slots:
            for head in range(2):
                at = int(slot) // 2 * far + int(slot) % 2 * 64 + head * 32
                engine[at : at + 8] = rng.integers(0, 256, 8)
        plan = plan_slots(
            view, slots, Chunks(arena, np.array([9 << 30], np.int64), np.array([4], np.int64))
        )
        gather(plan, worker=worker)
        got = arena[9 << 30 : (9 << 30) + 64].reshape(4, 2, 8)
        for number, slot in enumerate(slots):
            for head in range(2):
                at = int(slot) // 2 * far + int(slot) % 2 * 64 + head * 32
                np.testing.assert_array_equal(got[number, head], engine[at : at + 8])
                engine[at : at + 8] = 0
        kept = got.copy()
        scatter(plan, worker=worker)
        got[:] = 0
        gather(plan, worker=worker)
        np.testing.assert_array_equal(got, kept)


@st.composite
def _anything(draw: st.DrawFn) -> tuple[Callable[[], Engine], list[int], list[int]]:
    physical = [*draw(st.permutations(["plane", "block", "token", "head"])), "dim"]
    logical = draw(st.permutations(physical))
    blocks, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    group = Group(
        layers=draw(st.integers(1, 3)),
        planes=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([1, 2, 3, 8, 16, 33, 64])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"])),
    )
    num_tokens = draw(st.lists(st.integers(0, 9), max_size=4))
    free = draw(st.permutations([*range(blocks * tokens), *[-1] * sum(num_tokens)]))
    if draw(st.booleans()):  # runs, as engines hand them out
        free = sorted(free, reverse=draw(st.booleans()))
    seed = draw(st.integers(0, 100))
    return (
        lambda: of_permuted_axes(
            physical, logical, group=group, blocks=blocks, tokens=tokens, seed=seed
        ),
        num_tokens,
        free[len(free) // 3 :][: sum(num_tokens)]
        if len(free) - len(free) // 3 >= sum(num_tokens)
        else free[: sum(num_tokens)],
    )


class TestAnyArrangement:
    """Laws over random permutations of axes, sizes, slots and chunks."""

    @given(_anything(), st.integers(1, 3))
    @settings(max_examples=120)
    def test_numba(
        self, case: tuple[Callable[[], Engine], list[int], list[int]], threads: int
    ) -> None:
        build, tokens, slots = case
        check(
            build,
            lambda v, c: plan_slots(v, np.array(slots, np.int64), c),
            tokens,
            slots,
            worker="numba",
            threads=threads,
        )

    @given(_anything())
    @settings(max_examples=60)
    def test_reference(self, case: tuple[Callable[[], Engine], list[int], list[int]]) -> None:
        build, tokens, slots = case
        check(
            build,
            lambda v, c: plan_slots(v, np.array(slots, np.int64), c),
            tokens,
            slots,
            worker="reference",
        )


@pytest.mark.usefixtures("streaming")
class TestStreaming:
    """The paths that numba takes for large copies, on small ones."""

    def test_a_call_returns_when_its_helpers_are_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make("HND", head_dim=32)
        plan = plan_blocks(engine.view, np.arange(7), arena_for(engine.view, [28]))
        caller, helping, done, finished = (
            threading.current_thread(),
            threading.Event(),
            threading.Event(),
            [],
        )

        def share(*arguments: object) -> None:
            if threading.current_thread() is caller:
                assert helping.wait(60)
                done.set()
                return
            helping.set()
            assert done.wait(60)
            finished.append(sum(range(1_000_000)))  # long enough to be overtaken

        monkeypatch.setattr(numba_copy, "_copy_tiles", share)
        gather(plan, threads=2, worker="numba")
        assert finished

    @pytest.mark.parametrize("threads", [1, 2, 3])
    @pytest.mark.parametrize("pad", [0, 32])
    @pytest.mark.parametrize("kind", PAGED)
    def test_every_arrangement(self, kind: str, pad: int, threads: int) -> None:
        check(
            lambda: make(kind, head_dim=32, pad=pad, heads=3),
            lambda v, c: plan_slots(v, np.array(SLOTS), c),
            TOKENS_OF,
            SLOTS,
            threads=threads,
            worker="numba",
        )

    @pytest.mark.parametrize("kind", ["unpaged", "K and V pools"])
    def test_runs_longer_than_the_lead(self, kind: str) -> None:
        slots = [*range(3, 27), 0, 1]
        check(
            lambda: make(kind, head_dim=256, tokens=28),
            lambda v, c: plan_slots(v, np.array(slots), c),
            [24, 2],
            slots,
            threads=2,
        )

    def test_places_that_are_not_whole_lines_are_copied_all_the_same(self) -> None:
        check(
            lambda: make("HND", head_dim=32),
            lambda v, c: plan_slots(v, np.array(SLOTS), c),
            TOKENS_OF,
            SLOTS,
            gap=7,
            first=65,
        )


def test_large_copies_by_several_threads_equal_the_reference() -> None:
    engine = make("HND", layers=4, heads=8, head_dim=128, blocks=192)
    chunks = arena_for(engine.view, [256, 256, 200])
    ids = np.random.default_rng(0).permutation(192)[:178]
    plan = plan_blocks(engine.view, ids, chunks)
    assert plan.nbytes(4) > numba_copy.STREAM_BYTES
    gather(plan, worker="reference")
    expected = chunks.base.copy()
    before = [raw.copy() for raw in engine.memory]
    for threads in (1, 2, 5):
        chunks.base[:] = 0
        gather(plan, threads=threads, worker="numba")
        for offset, rows in zip(chunks.offsets, plan.chunk_rows, strict=True):
            size = 4 * 2 * int(rows) * engine.view.row_bytes
            np.testing.assert_array_equal(
                chunks.base[offset : offset + size], expected[offset : offset + size]
            )
        for layer in range(4):
            for block in ids:
                engine.tensors[layer][0][:, block] = 0
        scatter(plan, threads=threads, worker="numba")
        for raw, was in zip(engine.memory, before, strict=True):
            np.testing.assert_array_equal(raw, was)


@pytest.mark.parametrize("kind", ARRANGEMENTS)
def test_the_reference_through_torch_is_the_reference_through_numpy(kind: str) -> None:
    """The lines that run on a device, on tensors in host memory."""

    def on_a_device(engine: Engine) -> Engine:
        return dataclasses.replace(engine, view=dataclasses.replace(engine.view, device="cpu:0"))

    slots = [2, 5] if kind == "opaque" else [*range(8, 12), *range(20, 24)]
    check(
        lambda: on_a_device(make(kind, pad=2)),
        lambda v, c: plan_blocks(v, np.array([2, 5]), c),
        [8],
        slots,
    )


class TestTheDoor:
    """Bad arguments are refused before a byte moves."""

    def test_sums_must_fit_the_chunks_and_layers(self, plan: Plan) -> None:
        for sums in (
            np.zeros((1, 3), np.uint64),
            np.zeros((2, 2), np.uint64),
            np.zeros((1, 2), np.int64),
        ):
            with pytest.raises(ValueError, match="sums must be contiguous uint64"):
                gather(plan, sums=sums)  # type: ignore[arg-type]
        away = dataclasses.replace(plan, view=dataclasses.replace(plan.view, device="cpu:0"))
        with pytest.raises(ValueError, match="host memory only"):
            scatter(away, sums=np.zeros((1, 2), np.uint64))

    @pytest.fixture
    def plan(self) -> Plan:
        engine = make("NHD")
        return plan_blocks(engine.view, np.array([0, 1]), arena_for(engine.view, [8]))

    @pytest.mark.parametrize("layers", [range(-1, 1), range(3), range(0, 2, 2), range(1, -1, -1)])
    def test_layers_must_be_consecutive_ones_of_the_view(self, plan: Plan, layers: range) -> None:
        with pytest.raises(ValueError, match="layers"):
            gather(plan, layers=layers)

    def test_threads_and_worker_are_checked(self, plan: Plan) -> None:
        with pytest.raises(ValueError, match="threads is 0"):
            gather(plan, threads=0)
        with pytest.raises(
            ValueError, match="worker 'abacus' is not one of numba, triton, reference"
        ):
            scatter(plan, worker="abacus")  # type: ignore[arg-type]

    def test_read_only_memory_is_read_and_not_written(self) -> None:
        engine = make("NHD")
        chunks = arena_for(engine.view, [4])
        chunks.base.setflags(write=False)
        plan = plan_blocks(engine.view, np.array([0]), chunks)
        scatter(plan)
        with pytest.raises(ValueError, match="read-only"):
            gather(plan)
        frozen = dataclasses.replace(engine.view, writable=False)
        plan = plan_blocks(frozen, np.array([0]), arena_for(frozen, [4]))
        for worker in ("numba", "reference"):
            gather(plan, worker=worker)
        with pytest.raises(ValueError, match="read-only"):
            scatter(plan)

    def test_a_device_that_cannot_address_the_arena_gets_the_reference(self, plan: Plan) -> None:
        away = dataclasses.replace(plan, view=dataclasses.replace(plan.view, device="cpu:0"))
        gather(away)
        with pytest.raises(ValueError, match="pin and map"):
            gather(away, worker="numba")


class TestTheChoice:
    """One worker for each kind of device, named in the log once."""

    @pytest.fixture(autouse=True)
    def afresh(self) -> None:
        kernels._chosen.cache_clear()

    def test_is_logged_once_with_its_reason(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        kernels.warm_up()
        kernels.warm_up()
        assert [record.message for record in caplog.records] == [
            "copies between cpu and the arena: numba (host memory)"
        ]

    def test_falls_back_to_the_reference_without_numba(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        monkeypatch.setitem(sys.modules, "numba", None)
        assert kernels._chosen("cpu", True) == "reference"
        assert "numba is not installed" in caplog.text
        kernels._chosen.cache_clear()

    def test_a_gpu_takes_triton_only_where_it_can_address_the_arena(self) -> None:
        pytest.importorskip("triton", reason="no Triton in this environment")
        assert kernels._chosen("cuda", True) == "triton"
        assert kernels._chosen("cuda", False) == "reference"
        assert kernels._chosen("npu", True) == "reference"


IN_ANOTHER_PROCESS = """
import os, sys
import numpy as np
from kvhold import kernels
from kvhold.core.layout import Group
from kvhold.memory.views import per_layer
import kvhold.memory.views
assert not {"numba", "torch", "triton"} & set(sys.modules), "importing loads nothing heavy"
import numba
compiler = numba.njit
def njit(*args, cache=False, **kwargs):
    if cache:
        # neither the package nor the home directory can be written
        raise RuntimeError("cannot cache function: no locator available")
    return compiler(*args, **kwargs)
numba.njit = njit
shape = (2, 64, 16, 8, 64)
tensors = [np.arange(np.prod(shape), dtype=np.uint16).reshape(shape) for _ in range(2)]
group = Group(layers=2, planes=2, heads=8, head_dim=64, dtype="bfloat16")
view = per_layer(group, tensors, axes="plane block token head dim")
arena, one = np.zeros(4 << 20, np.uint8), np.array([1024], np.int64)
chunks = kernels.Chunks(arena, np.zeros(1, np.int64), one)
plan = kernels.plan_blocks(view, np.arange(64), chunks)
def whole():
    chunks.base[:] = 0
    kernels.gather(plan, threads=2)
    copied = chunks.base.view(np.uint16).reshape(2, 2, 1024, 8, 64)
    return all((copied[l] == tensors[l].reshape(2, 1024, 8, 64)).all() for l in range(2))
assert whole() and kernels.numba_copy._pool
child = os.fork()
if child == 0:
    os._exit(0 if kernels.numba_copy._pool is None and whole() else 1)
assert os.waitpid(child, 0)[1] == 0
import atexit
atexit.register(lambda: print("at exit", whole()))
"""


def test_light_import_no_cache_directory_forks_and_shutdown() -> None:
    """The life of a process that cannot keep compiled code, forks after its first threaded copy,
    and copies once more as it ends.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, "at exit True\n"), run.stderr


def test_margins_are_wide_enough_to_see_a_stray_line() -> None:
    assert MARGIN >= 2 * numba_copy.LINE and lines(1).ctypes.data % numba_copy.LINE == 0
