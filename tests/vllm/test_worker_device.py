"""The worker's side over a device whose streams run late: bytes are right in every order, and in
some order wrong without any one event.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch

from kvhold.core import holdings
from kvhold.core.config import Config, NodeConfig
from kvhold.core.errors import DamagedChunks, DeviceError, LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.coding import coded_group
from kvhold.memory.copier import Mark, Piece, Transfer
from kvhold.memory.device import DeviceCopier, Lane, PinnedArenas, Settings
from kvhold.testing.device import FakeDevice, FakeDriver
from tests.vllm.scheduling import LAYERS, NodeProcess, eventually, make_prompt

pytestmark = pytest.mark.vllm

BLOCK, BLOCKS, CHUNK = 16, 24, 4  # CHUNK: blocks of a chunk
SEEDS = range(12)
Blocks = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("node") / "node.sock")
    yield process
    process.kill()


class OverFake(DeviceCopier):
    """Nothing is left out.

    The ring for stores has room for one chunk, so some of them go directly.
    """

    make_driver = FakeDriver

    def __init__(self, engine: "MiniEngine") -> None:
        self.driver = driver = self.make_driver(engine.device)
        sizes = Settings(store_ring_bytes=1 << 17, batch_bytes=1)
        super().__init__(
            driver,
            PinnedArenas(driver),
            sizes,
            mappings=lambda: engine.side._cache.map_for_device(),
        )

    def wait_until_pinned(self) -> None:
        """Copies of memory that is not pinned end in their call."""
        assert self._mappings is not None
        self._arenas.add(*self._mappings())
        eventually(lambda: self._arenas.pinned_bytes)


class MiniEngine:
    """An engine on the device: it computes a prompt's blocks, stores, forgets, loads, and reads
    what it got.
    """

    def __init__(
        self,
        socket: Path,
        seed: int,
        make_copier: type[OverFake],
        *,
        inside: bool = False,
        codec: str = "none",
    ) -> None:
        """inside: it loads and stores a layer at a time, inside its passes. codec: `memory_codec`;
        what it computes here loses nothing.
        """
        self.inside = inside
        size: dict[str, Any] = {"block_tokens": BLOCK, "block_bytes": BLOCK * 64 * 4}
        plain = Group(
            layers=len(LAYERS), planes=2, heads=1, head_dim=32, dtype="float32", packing="d", **size
        )
        group = coded_group(plain, codec)
        layout = Layout((group,), tokens_per_chunk=CHUNK * BLOCK, tail_tokens=BLOCK)
        self.namespace = Namespace(f"device {seed} {make_copier} {inside}", layout)
        part = Part(table=0, layer_names=tuple(LAYERS), group=group, engine_group=plain)
        geometry = Geometry(
            (part,), self.namespace.layout, shards=1, per_worker=1, copies=1, width=1
        )
        self.device = FakeDevice(seed)
        self.side = WorkerSide(
            Config(node=NodeConfig(socket=str(socket), autostart=False), memory_codec=codec),
            self.namespace,
            geometry,
            num_blocks=BLOCKS,
            layerwise=inside,
            copier=OverFake(self),
        )
        self.blocks: Blocks = {name: torch.zeros(BLOCKS, 1, BLOCK, 64) for name in LAYERS}
        self.side.register(self.blocks)
        # what it leaves out, it leaves out after the proof
        self.side._copier = copier = make_copier(self)
        if self.side._layerwise is not None:
            self.side._layerwise.use(copier)
        copier.wait_until_pinned()

    def close(self) -> None:
        self.device.synchronize()
        self.side.close()

    def fill(self, ids: Sequence[int], value: float, layer: str = "") -> None:
        """A kernel that writes blocks of all layers or of one, some time."""

        def kernel() -> None:
            for name, tensor in self.blocks.items():
                if name == (layer or name):
                    tensor[list(ids)] = value

        self.device.compute(kernel)

    def read(self, ids: Sequence[int], seen: set[float], layer: str = "") -> None:
        """A kernel that reads blocks of all layers or of one, some time."""

        def kernel() -> None:
            for name, tensor in self.blocks.items():
                if name == (layer or name):
                    seen.update(tensor[list(ids)].unique().tolist())

        self.device.compute(kernel)

    def store(self, number: int, ids: Sequence[int], value: float) -> None:
        """A pass that computes blocks and stores them."""
        prompt = self.namespace.prompt(make_prompt(f"device {number}", len(ids) * BLOCK))
        self.side.begin(Steps(stores=[Store(f"s{number}", prompt.chunks(), [list(ids)])]))
        if self.inside:
            # else it is copied after the pass
            wait([one.reservation for one in self.side._reserved], timeout=20)
        for name in self.blocks:
            self.fill(ids, value, name)
            self.side.save_layer(name)
        self.side.store()

    def load(self, number: int, ids: Sequence[int]) -> tuple[set[float], list[int]]:
        """Load what was stored under that number into blocks, which are zeroed before, as new
        blocks are.

        Returns what a pass reads there, and the blocks that failed.
        """
        prompt = self.namespace.prompt(make_prompt(f"device {number}", len(ids) * BLOCK))
        whole, seen = len(ids) * BLOCK, set[float]()
        hit = eventually(
            lambda: (
                hit
                if (hit := self.side._cache.lookup(prompt.query())).num_tokens == whole
                else hit.close()
            )
        )
        self.side.begin(Steps())
        self.fill(ids, 0.0)
        self.side.start_loads(
            Steps(loads=[Load(f"l{number}", hit.ticket, 0, [list(ids)], inside=self.inside)])
        )
        if self.inside:
            for name in self.blocks:
                self.side.wait_for_layer(name)
                self.read(ids, seen, name)
        self.side.store()
        if not self.inside:
            assert eventually(self.side.take_loaded) == {f"l{number}"}
            self.read(ids, seen)
        hit.close()
        self.device.wait(self.device.put(self.device.engine))
        return seen, sorted(self.side.take_failed_blocks())


def serve(engine: MiniEngine) -> str:
    """What requests do one after another. Returns what was wrong; empty: nothing."""
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    engine.store(1, first, 1.0)
    engine.store(2, first, 2.0)  # the next pass has the blocks for another request
    for number in (1, 2):
        seen, failed = engine.load(number, second)
        if failed:
            return f"prompt {number}: blocks {failed} failed"
        if seen != {float(number)}:
            return f"prompt {number} has {seen}"
    return ""


class NoMark(OverFake):
    """Copies come after nothing."""

    def mark(self) -> Any:
        super().mark()


class NoMarkForStores(OverFake):
    """Blocks are read before they are computed."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None, **layers: Any) -> Any:
        return super().gather(pieces, None, **layers)


class NoMarkForLoads(OverFake):
    """Blocks are written before they are zeroed."""

    def scatter(self, pieces: Sequence[Piece], after: Mark | None, **layers: Any) -> Any:
        return super().scatter(pieces, None, **layers)


class NoFence(OverFake):
    """The next pass writes to blocks that are still to be read."""

    def fence(self, transfers: Sequence[Transfer]) -> None:
        pass


class NotAwaited:
    """A transfer that claims to have ended."""

    def __init__(self, transfer: Any) -> None:
        self.transfer = transfer

    def done(self) -> bool:
        return True

    def wait(self) -> list[DamagedChunks | None]:
        return [None] * len(self.transfer._damage)


class NoWaitForStores(OverFake):
    """Chunks are committed before their bytes are there."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None, **layers: Any) -> Any:
        return NotAwaited(super().gather(pieces, after, **layers))

    def fence(self, transfers: Sequence[Any]) -> None:
        super().fence([getattr(each, "transfer", each) for each in transfers])


class NoWaitForLoads(OverFake):
    """A load is reported, and its lease closed, before the bytes are there."""

    def scatter(self, pieces: Sequence[Piece], after: Mark | None, **layers: Any) -> Any:
        return NotAwaited(super().scatter(pieces, after, **layers))


def drain(device: FakeDevice) -> None:
    """Run all that is left, also what has nowhere to go any more."""
    while True:
        try:
            return device.synchronize()
        except AssertionError:
            continue


@pytest.mark.parametrize(
    "broken", [NoMark, NoMarkForStores, NoMarkForLoads, NoFence, NoWaitForStores, NoWaitForLoads]
)
def test_the_proof_finds_what_is_left_out_before_anything_is_served(
    node: NodeProcess, broken: type[OverFake]
) -> None:
    said = ""
    for seed in SEEDS:
        engine = MiniEngine(node.socket, seed, broken)
        try:
            engine.side.register(engine.blocks)
        except (
            LayoutError,
            AssertionError,
        ) as error:  # what was not waited for finds that its memory has gone
            said = str(error)
        drain(engine.device)
        engine.close()
        if said:
            break
    assert any(
        text in said
        for text in (
            "gathered bytes are not those",
            "did not come back as it was",
            "are out of order",
            "a device would refuse",
        )
    )


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("seed", "codec"),
    [*((seed, "none") for seed in SEEDS), *((seed, "int8") for seed in SEEDS[:3])],
)
def test_in_every_order_of_streams_the_bytes_are_right(
    node: NodeProcess, seed: int, inside: bool, codec: str
) -> None:
    engine = MiniEngine(node.socket, seed, OverFake, inside=inside, codec=codec)
    assert serve(engine) == ""
    engine.close()


@pytest.mark.parametrize(
    ("broken", "inside", "codec"),
    [
        *(
            (broken, inside, "none")
            for broken in (NoMark, NoMarkForStores, NoMarkForLoads, NoFence, NoWaitForStores)
            for inside in (False, True)
        ),
        *((broken, False, "int8") for broken in (NoMarkForStores, NoFence, NoWaitForStores)),
        (NoWaitForLoads, False, "none"),  # inside a pass: `tests/vllm/test_layerwise.py`
    ],
)
def test_without_any_one_event_some_order_gives_wrong_bytes(
    node: NodeProcess, broken: type[OverFake], inside: bool, codec: str
) -> None:
    """A control: the test above would find each of them left out."""
    found = []
    for seed in range(10 * len(SEEDS)):
        engine = MiniEngine(node.socket, seed, broken, inside=inside, codec=codec)
        found.append(serve(engine))
        engine.close()
        if found[-1]:
            break
    assert found[-1]


def test_a_copy_that_was_submitted_is_waited_for_whatever_goes_wrong_after_it(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its memory would go back while the device writes to it."""

    def broken(*_: Any) -> None:
        raise RuntimeError("counting")

    engine = MiniEngine(node.socket, 100, OverFake)
    monkeypatch.setattr(engine.side, "_count_stored", broken)
    assert serve(engine) == ""
    engine.close()


class Failing(FakeDriver):
    """Works until it is told to fail, and then for good."""

    has_failed = False

    def launch(self, lane: Lane, after: Sequence[Any], work: Callable[[], None]) -> Any:
        if self.has_failed:
            raise DeviceError("an illegal memory access was encountered")
        return super().launch(lane, after, work)


class OverFailing(OverFake):
    """A copier of a device that fails."""

    make_driver = Failing


@pytest.mark.parametrize("inside", [False, True])
def test_after_a_fault_of_the_device_loads_are_computed_and_memory_is_kept(
    node: NodeProcess, inside: bool
) -> None:
    """Nobody knows for how long the device goes on to read and write."""
    engine = MiniEngine(node.socket, 200, OverFailing, inside=inside)
    copier = engine.side._copier
    assert isinstance(copier, OverFailing)
    # the node notices after a while that engines of other tests have gone
    before = eventually(
        lambda: held if not ((held := node.held())["leases"] or held["reservations"]) else None
    )
    engine.store(1, [1, 2, 3, 4], 1.0)
    seen, failed = engine.load(1, [5, 6, 7, 8])
    assert (seen, failed) == ({1.0}, [])
    assert isinstance(copier.driver, Failing)
    copier.driver.has_failed = True
    _, failed = engine.load(1, [9, 10, 11, 12])
    assert failed == [9, 10, 11, 12]
    engine.store(2, [1, 2, 3, 4], 2.0)
    engine.side.begin(Steps())
    eventually(
        lambda: (
            node.held()["leases"] == before["leases"] + 1
            and node.held()["reservations"] == before["reservations"] + 1
        )
    )
    assert "illegal memory access" in copier.fault
    engine.close()
    gc.collect()
    assert node.held()["reservations"] == before["reservations"] + 1, "the process has not ended"
    for held in holdings.kept:
        held.close()
    holdings.kept.clear()
