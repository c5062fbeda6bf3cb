"""The worker's side of the connector: whatever the node or the pass does, the engine's step goes
on, and nothing wrong is kept.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvhold.core.config import ClientConfig, Config, NodeConfig
from kvhold.core.errors import DeviceError, LayoutError
from kvhold.core.holdings import Lease, Reservation
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.storing import Reserving, settle
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.coding import ERROR_BOUND, coded_group
from kvhold.memory.copy import PlannedCopy
from kvhold.testing.damage import OpenArena
from tests.vllm.hands import RealHands
from tests.vllm.scheduling import (
    LAYERS,
    Engine,
    NodeProcess,
    Options,
    eventually,
    make_folder,
    make_prompt,
)

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS = 16, 40
NOTHING = {"tickets": 0, "leases": 0, "reservations": 0}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node") / "node.sock")
    yield process
    process.kill()


@pytest.fixture
def namespace() -> Namespace:
    group = Group(
        layers=len(LAYERS),
        planes=2,
        heads=1,
        head_dim=32,
        dtype="float32",
        packing="test",
        block_tokens=BLOCK,
        block_bytes=BLOCK * 64 * 4,
    )
    return Namespace("model", Layout((group,), tokens_per_chunk=4 * BLOCK, tail_tokens=BLOCK))


def geometry(namespace: Namespace) -> Geometry:
    part = Part(0, tuple(LAYERS), namespace.layout.groups[0], namespace.layout.groups[0])
    return Geometry((part,), namespace.layout, shards=1, per_worker=1, copies=1, width=1)


@pytest.fixture
def side(node: NodeProcess, namespace: Namespace) -> Iterator[WorkerSide]:
    config = Config(
        node=NodeConfig(socket=str(node.socket), autostart=False),
        client=ClientConfig(call_timeout_s=0.3),
    )
    side = WorkerSide(config, namespace, geometry(namespace), num_blocks=BLOCKS)
    side.register(tensors())
    cache = side._cache
    yield side
    side._cache = cache
    eventually(lambda: node.held() == NOTHING)
    side.close()


def tensors(blocks: int = BLOCKS, head: int = 64) -> dict[str, torch.Tensor]:
    return {name: torch.randn(blocks, 1, BLOCK, head) for name in LAYERS}


def stores(namespace: Namespace, count: int) -> list[Store]:
    """One chunk of each of so many prompts."""
    prompts = [
        namespace.prompt(make_prompt(f"worker {number}", 4 * BLOCK)) for number in range(count)
    ]
    return [
        Store(str(number), prompt.chunks(), [list(range(4))])
        for number, prompt in enumerate(prompts)
    ]


class SlowCache:
    """A node that answers `reserve` only when it is told to."""

    def __init__(self, layout: Layout) -> None:
        self.go = threading.Event()
        self.given_back = 0
        self._layout = layout

    def reserve(
        self,
        layout: Layout,
        names: Any,
        shard: int = 0,
        *,
        store_options: Any = None,
        groups: Any = None,
    ) -> Reservation:
        self.go.wait(20)
        offsets, buffer = np.zeros((1, 1), dtype=np.int64), np.zeros(1 << 20, dtype=np.uint8)
        return Reservation(
            offsets, np.array([4 * BLOCK]), buffer, lambda *_: 0, self._back, layout=layout
        )

    def _back(self) -> None:
        self.given_back += 1


class BrokenCache:
    """What nobody thought of."""

    def reserve(self, *_: Any, **__: Any) -> Reservation:
        raise RuntimeError("reserve")

    def claim(self, *_: Any, **__: Any) -> Lease:
        raise RuntimeError("claim")


def test_what_is_stored_comes_back_bit_for_bit(side: WorkerSide, namespace: Namespace) -> None:
    caches = tensors()
    side.register(caches)
    prompt = namespace.prompt(make_prompt("bits", 7 * BLOCK + 3))
    side.begin(Steps(stores=[Store("a", prompt.chunks(), [[9, 2, 30, 4, 11, 12, 39]])]))
    side.store()
    hit = eventually(
        lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close()
    )
    before = {name: tensor.clone() for name, tensor in caches.items()}
    side.start_loads(Steps(loads=[Load("b", hit.ticket, 0, [[20, -1, 22, 23, 24, 25, 26]])]))
    assert eventually(side.take_loaded) == {"b"}
    assert side.take_failed_blocks() == set()
    hit.close()
    for name, tensor in caches.items():
        expected = before[name].clone()
        for source, target in zip([9, 30, 4, 11, 12, 39], [20, 22, 23, 24, 25, 26], strict=True):
            expected[target] = before[name][source]
        assert torch.equal(tensor, expected), "only the named blocks were written"


class TestCoded:
    """`memory_codec`: chunks hold 8 bits an element."""

    @pytest.fixture
    def coded(
        self, node: NodeProcess, namespace: Namespace
    ) -> Iterator[tuple[WorkerSide, Namespace, dict[str, torch.Tensor]]]:
        plain = namespace.layout.groups[0]
        space = replace(
            namespace, layout=replace(namespace.layout, groups=(coded_group(plain, "int8"),))
        )
        part = Part(0, tuple(LAYERS), space.layout.groups[0], plain)
        config = Config(
            node=NodeConfig(socket=str(node.socket), autostart=False), memory_codec="int8"
        )
        side = WorkerSide(
            config,
            space,
            Geometry((part,), space.layout, shards=1, per_worker=1, copies=1, width=1),
            num_blocks=BLOCKS,
        )
        caches = tensors()
        side.register(caches)
        for tensor in caches.values():
            tensor.copy_(torch.randn(tensor.shape))
        yield side, space, caches
        side.close()

    def test_what_comes_back_is_near_and_takes_less_than_half(
        self, coded: tuple[WorkerSide, Namespace, dict[str, torch.Tensor]]
    ) -> None:
        side, space, caches = coded
        prompt = space.prompt(make_prompt("coded", 4 * BLOCK))
        side.begin(Steps(stores=[Store("a", prompt.chunks(), [[9, 2, 30, 4]])]))
        side.store()
        hit = eventually(
            lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close()
        )
        before = {name: tensor.clone() for name, tensor in caches.items()}
        side.start_loads(Steps(loads=[Load("b", hit.ticket, 0, [[20, 21, 22, -1]])]))
        assert eventually(side.take_loaded) == {"b"}
        assert side.take_failed_blocks() == set()
        hit.close()
        for name, tensor in caches.items():
            for source, target in zip([9, 2, 30], [20, 21, 22], strict=True):
                was, now = (each.reshape(-1, 32) for each in (before[name][source], tensor[target]))
                assert ((was - now).abs() <= ERROR_BOUND * was.abs().amax(1, keepdim=True)).all()
                assert not torch.equal(was, now)
            rest = [block for block in range(BLOCKS) if block not in (20, 21, 22)]
            assert torch.equal(tensor[rest], before[name][rest]), (
                "only the named blocks were written"
            )
        stats = side.tally.take()
        assert stats is not None
        assert stats.data["stored_bytes"] == len(LAYERS) * 4 * BLOCK * 64 * (1 + 4 / 32)

    def test_what_cannot_be_decoded_is_not_stored(
        self, node: NodeProcess, coded: tuple[WorkerSide, Namespace, dict[str, torch.Tensor]]
    ) -> None:
        side, space, caches = coded
        caches[LAYERS[-1]][7, 0, 5, 17] = torch.inf
        wild, well = (space.prompt(make_prompt(name, 12 * BLOCK)) for name in ("wild", "well"))
        blocks, others = list(range(12)), list(range(20, 32))
        side.begin(
            Steps(stores=[Store("a", wild.chunks(), [blocks]), Store("b", well.chunks(), [others])])
        )
        side.store()
        eventually(
            lambda: hit if (hit := side._cache.lookup(well.query())).num_tokens else hit.close()
        ).close()
        with side._cache.lookup(wild.query()) as hit:
            assert hit.num_tokens == 4 * BLOCK, "the chunk before it is there"
        eventually(lambda: node.held() == NOTHING)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("inside", [False, True], ids=["beside the passes", "inside a pass"])
def test_of_a_load_the_blocks_of_damaged_chunks_alone_fail_and_the_next_lookup_misses_them(
    node: NodeProcess, namespace: Namespace, inside: bool, layer: int
) -> None:
    config = Config(node=NodeConfig(socket=str(node.socket), autostart=False))
    side = WorkerSide(config, namespace, geometry(namespace), num_blocks=BLOCKS, layerwise=inside)
    caches = tensors()
    side.register(caches)
    prompt = namespace.prompt(make_prompt(f"damaged {inside} {layer}", 11 * BLOCK))
    side.begin(Steps(stores=[Store("a", prompt.chunks(), [list(range(11))])]))
    side.store()
    hit = eventually(
        lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close()
    )
    lease = side._cache.claim(hit.ticket)
    assert lease is not None
    with lease, OpenArena(side._cache.status()["pid"]) as arena:
        second = int(lease.chunks().offsets[1])
        arena.flip(second + namespace.layout.layer_range(0, layer, 4 * BLOCK)[0] + 77, 3)
    side.start_loads(
        Steps(
            loads=[
                Load(
                    "b",
                    hit.ticket,
                    0,
                    [[20, 21, 22, 23, -1, -1, 26, 27, 28, 29, 30]],
                    inside=inside,
                )
            ]
        )
    )
    if inside:
        for name in LAYERS:
            side.wait_for_layer(name)
        side.store()
    else:
        assert eventually(side.take_loaded) == {"b"}
    assert side.take_failed_blocks() == {26, 27}, "those of the second chunk that were to be loaded"
    for tensor in caches.values():
        for target, source in zip(
            [20, 21, 22, 23, 28, 29, 30], [0, 1, 2, 3, 8, 9, 10], strict=True
        ):
            assert torch.equal(tensor[target], tensor[source]), (
                "the other chunks are there, with all layers"
            )
    hit.close()
    with side._cache.lookup(prompt.query()) as hit:
        assert hit.num_tokens == 4 * BLOCK, "what is not damaged stays"
    side.close()


def test_a_load_of_a_hit_that_is_gone_reports_all_its_blocks_and_only_once(
    side: WorkerSide,
) -> None:
    side.start_loads(Steps(loads=[Load("a", 12345, 0, [[-1, 5, 6, 7]])]))
    assert eventually(side.take_loaded) == {"a"}
    assert side.take_failed_blocks() == {5, 6, 7}
    assert (side.take_loaded(), side.take_failed_blocks()) == (set(), set())


def test_a_load_that_breaks_in_an_unforeseen_way_is_reported_too(side: WorkerSide) -> None:
    side._cache = BrokenCache()  # type: ignore[assignment]
    side.start_loads(Steps(loads=[Load("a", 1, 0, [[5]])]))
    assert eventually(side.take_loaded) == {"a"}
    assert side.take_failed_blocks() == {5}


def test_a_store_that_breaks_in_an_unforeseen_way_does_not_break_the_step(
    side: WorkerSide, namespace: Namespace
) -> None:
    cache = side._cache
    side._cache = BrokenCache()  # type: ignore[assignment]
    side.begin(Steps(stores=stores(namespace, 2)))
    side.store()
    side.end_reading()
    side._cache = cache
    out_of_range = Store("far", stores(namespace, 1)[0].names, [[0, 1, 2, BLOCKS + 7]])
    side.begin(Steps(stores=[out_of_range]))
    side.store()
    prompt = namespace.prompt(make_prompt("worker 0", 4 * BLOCK))
    with cache.lookup(prompt.query()) as hit:
        assert hit.num_tokens == 0


def test_the_stores_of_one_pass_wait_for_the_node_together_and_late_room_is_given_back(
    side: WorkerSide, namespace: Namespace
) -> None:
    """20 deadlines would be six seconds."""
    slow = SlowCache(namespace.layout)
    side._cache = slow  # type: ignore[assignment]
    side.begin(Steps(stores=stores(namespace, 20)))
    began_s = time.monotonic()
    side.store()
    side.begin(Steps())
    assert time.monotonic() - began_s < 3
    slow.go.set()
    eventually(lambda: slow.given_back)
    assert slow.given_back == 1, "what had not been asked for yet is not asked for any more"


def test_the_next_pass_waits_until_the_last_one_s_blocks_are_read(
    side: WorkerSide, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, gather, go = tensors(), PlannedCopy.gather, threading.Event()
    side.register(caches)

    def slow(*arguments: Any, **options: Any) -> None:
        go.wait(20)
        gather(*arguments, **options)

    monkeypatch.setattr(PlannedCopy, "gather", slow)
    prompt = namespace.prompt(make_prompt("slow reading", 4 * BLOCK))
    side.begin(Steps(stores=[Store("a", prompt.chunks(), [[1, 2, 3, 4]])]))
    side.store()
    computed = {name: tensor.clone() for name, tensor in caches.items()}
    side._read_until = time.monotonic()  # it has begun by then, so it is waited for all the same
    eventually(lambda: side._reading[0][1].running())
    threading.Timer(0.2, go.set).start()
    side.begin(Steps())
    assert go.is_set()
    for tensor in caches.values():
        tensor[1:5] = 0  # the next pass
    hit = eventually(
        lambda: hit if (hit := side._cache.lookup(prompt.query())).num_tokens else hit.close()
    )
    side.start_loads(Steps(loads=[Load("b", hit.ticket, 0, [[21, 22, 23, 24]])]))
    assert eventually(side.take_loaded) == {"b"}
    hit.close()
    for name, tensor in caches.items():
        assert torch.equal(tensor[21:25], computed[name][1:5])


def test_a_pass_that_fails_leaves_nothing_in_the_cache(node: NodeProcess, tmp_path: Path) -> None:
    """vLLM's own runner calls the connector after a pass that raised, too; its blocks hold anything
    but KV.
    """

    class Failing(RealHands):
        def run(self, output: SchedulerOutput, compute: Callable[[], None]) -> KVConnectorOutput:
            def fail() -> None:
                raise RuntimeError("out of memory, say")

            # while the lookup is under way a pass has nothing to fail with
            computes = output.total_num_scheduled_tokens > 0
            return super().run(output, fail if computes else compute)

    engine = Engine(Options(make_folder(tmp_path / "model")), node.socket)
    with_worker = Engine(Options(engine.options.folder), node.socket, real_worker=True)
    assert isinstance(with_worker.worker, RealHands)
    with_worker.worker.__class__ = Failing
    prompt = make_prompt("failing pass", 300)
    before = engine.hands.client.status()["chunks"]
    with_worker.add("a", prompt)
    with pytest.raises(RuntimeError, match="out of memory"):
        with_worker.next_pass()
    assert [len(store.names) for store in with_worker.stores] == [5], "they were planned"
    with_worker.close()
    eventually(lambda: node.held() == NOTHING)
    assert engine.hands.client.status()["chunks"] == before
    engine.add("b", prompt)
    engine.run()
    assert engine.loads == []
    engine.close()


@pytest.mark.parametrize(
    ("caches", "field"),
    [
        (tensors(head=32), "block_bytes"),
        ({name: tensor.to(torch.float64) for name, tensor in tensors().items()}, "dtype"),
        ({name: tensor.transpose(2, 3) for name, tensor in tensors().items()}, None),
        ({name: tensor[:, :, ::2] for name, tensor in tensors().items()}, "block_bytes"),
    ],
    ids=["another head size", "another dtype", "transposed whole", "with gaps"],
)
def test_tensors_that_are_not_as_the_scheduler_was_told_are_refused(
    side: WorkerSide, caches: dict[str, torch.Tensor], field: str | None
) -> None:
    if field is None:  # a block is its bytes, whatever order its axes have
        side.register(caches)
        return
    with pytest.raises(LayoutError, match=field):
        side.register(caches)


class SettledReservation:
    """A reservation that records how it ends."""

    granted = (0,)

    def __init__(self) -> None:
        self.ends: list[str] = []

    def __enter__(self) -> "SettledReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.append("closed")

    def keep(self) -> None:
        self.ends.append("kept")


def reserving(reservation: SettledReservation, *layers: "Future[Any]") -> Reserving:
    granted: Future[Any] = Future()
    granted.set_result(reservation)
    store: Any = SimpleNamespace(request_id="r")
    return Reserving(store, 0, granted, [], list(layers))


def test_memory_is_kept_when_the_device_failed_in_a_layer_s_copy() -> None:
    reservation, layer = SettledReservation(), Future[Any]()
    layer.set_exception(DeviceError("a part of it was submitted"))
    settle(reserving(reservation, layer), None)
    assert reservation.ends == ["kept"]


def test_memory_goes_back_when_a_copy_is_cancelled_while_its_end_is_waited_for() -> None:
    reservation, read = SettledReservation(), Future[Any]()
    with ThreadPoolExecutor(1) as settler:
        settling = settler.submit(settle, reserving(reservation), read)
        eventually(lambda: read._condition._waiters)  # type: ignore[attr-defined]
        assert read.cancel()
        settling.result(timeout=20)
    assert reservation.ends == ["closed"]
