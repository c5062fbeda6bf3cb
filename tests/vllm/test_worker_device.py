"""The worker's side over a device whose streams run late: bytes are right in every order, and in some order wrong without any one event."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

import torch

from kvhold.core.config import Config, NodeConfig
from kvhold.core.errors import DamagedChunks, LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.copier import Mark, Piece, Transfer
from kvhold.testing.device import FakeCopier, FakeDevice
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


class MiniEngine:
    """An engine on the device: it computes a prompt's blocks, stores, forgets, loads, and reads what it got."""

    def __init__(self, socket: Path, seed: int, make_copier: Callable[[FakeDevice], FakeCopier]) -> None:
        group = Group(
            layers=len(LAYERS), planes=2, heads=1, head_dim=32, dtype="float32", packing="d", block_tokens=BLOCK, block_bytes=BLOCK * 64 * 4
        )
        self.namespace = Namespace(f"device {seed} {make_copier}", Layout((group,), tokens_per_chunk=CHUNK * BLOCK, tail_tokens=BLOCK))
        part = Part(table=0, layer_names=tuple(LAYERS), group=group)
        geometry = Geometry((part,), self.namespace.layout, shards=1, per_worker=1, copies=1, width=1)
        self.device = FakeDevice(seed)
        self.side = WorkerSide(
            Config(node=NodeConfig(socket=str(socket), autostart=False)),
            self.namespace,
            geometry,
            num_blocks=BLOCKS,
            copier=FakeCopier(self.device),
        )
        self.blocks: Blocks = {name: torch.zeros(BLOCKS, 1, BLOCK, 64) for name in LAYERS}
        self.side.register(self.blocks)
        self.side._copier = make_copier(self.device)  # what it leaves out, it leaves out after the proof

    def close(self) -> None:
        self.device.synchronize()
        self.side.close()

    def fill(self, ids: Sequence[int], value: float) -> None:
        """A kernel that writes blocks, some time."""

        def kernel() -> None:
            for tensor in self.blocks.values():
                tensor[list(ids)] = value

        self.device.compute(kernel)

    def read(self, ids: Sequence[int]) -> set[float]:
        """A kernel that reads blocks, and its result, for which the engine waits."""
        seen: set[float] = set()

        def kernel() -> None:
            for tensor in self.blocks.values():
                seen.update(tensor[list(ids)].unique().tolist())

        self.device.wait(self.device.put(self.device.engine, kernel))
        return seen

    def store(self, number: int, ids: Sequence[int], value: float) -> None:
        """A pass that computes blocks and stores them."""
        prompt = self.namespace.prompt(make_prompt(f"device {number}", len(ids) * BLOCK))
        self.side.begin(Steps(stores=[Store(f"s{number}", prompt.chunks(), [list(ids)])]))
        self.fill(ids, value)
        self.side.store()

    def load(self, number: int, ids: Sequence[int]) -> list[int]:
        """Load what was stored under that number into blocks, which are zeroed before, as new blocks are. Returns blocks that failed."""
        prompt = self.namespace.prompt(make_prompt(f"device {number}", len(ids) * BLOCK))
        whole = len(ids) * BLOCK
        hit = eventually(lambda: hit if (hit := self.side._cache.lookup(prompt.query())).num_tokens == whole else hit.close())
        self.side.begin(Steps())
        self.fill(ids, 0.0)
        self.side.start_loads(Steps(loads=[Load(f"l{number}", hit.ticket, 0, [list(ids)])]))
        self.side.store()
        assert eventually(self.side.take_loaded) == {f"l{number}"}
        hit.close()
        return sorted(self.side.take_failed_blocks())


def serve(engine: MiniEngine) -> str:
    """What requests do one after another. Returns what was wrong; empty: nothing."""
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    engine.store(1, first, 1.0)
    engine.store(2, first, 2.0)  # the next pass has the blocks for another request
    for number in (1, 2):
        failed = engine.load(number, second)
        if failed:
            return f"prompt {number}: blocks {failed} failed"
        if (seen := engine.read(second)) != {float(number)}:
            return f"prompt {number} has {seen}"
    return ""


class NoMark(FakeCopier):
    """Copies come after nothing."""

    def mark(self) -> Any:
        super().mark()


class NoMarkForStores(FakeCopier):
    """Blocks are read before they are computed."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None) -> Any:
        return super().gather(pieces, None)


class NoMarkForLoads(FakeCopier):
    """Blocks are written before they are zeroed."""

    def scatter(self, pieces: Sequence[Piece], after: Mark | None) -> Any:
        return super().scatter(pieces, None)


class NoFence(FakeCopier):
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
        return self.transfer.damage  # type: ignore[no-any-return]


class NoWaitForStores(FakeCopier):
    """Chunks are committed before their bytes are there."""

    def gather(self, pieces: Sequence[Piece], after: Mark | None) -> Any:
        return NotAwaited(super().gather(pieces, after))

    def fence(self, transfers: Sequence[Any]) -> None:
        super().fence([each.transfer for each in transfers])


class NoWaitForLoads(FakeCopier):
    """A load is reported, and its loan closed, before the bytes are there."""

    def scatter(self, pieces: Sequence[Piece], after: Mark | None) -> Any:
        return NotAwaited(super().scatter(pieces, after))


@pytest.mark.parametrize("broken", [NoWaitForStores, NoWaitForLoads])
def test_the_proof_finds_copies_that_are_not_waited_for(node: NodeProcess, broken: type[FakeCopier]) -> None:
    said = ""
    for seed in SEEDS:
        engine = MiniEngine(node.socket, seed, broken)
        try:
            engine.side.register(engine.blocks)
        except LayoutError as error:
            said = str(error)
        engine.close()
        if said:
            break
    assert "gathered bytes are not those" in said or "did not come back as it was" in said


@pytest.mark.parametrize("seed", SEEDS)
def test_in_every_order_of_streams_the_bytes_are_right(node: NodeProcess, seed: int) -> None:
    engine = MiniEngine(node.socket, seed, FakeCopier)
    assert serve(engine) == ""
    engine.close()


@pytest.mark.parametrize("broken", [NoMark, NoMarkForStores, NoMarkForLoads, NoFence, NoWaitForStores, NoWaitForLoads])
def test_without_any_one_event_some_order_gives_wrong_bytes(node: NodeProcess, broken: type[FakeCopier]) -> None:
    """A control: the test above would find each of them left out."""
    found = []
    for seed in SEEDS:
        engine = MiniEngine(node.socket, seed, broken)
        found.append(serve(engine))
        engine.close()
        if found[-1]:
            break
    assert found[-1]


def test_a_copy_that_was_submitted_is_waited_for_whatever_goes_wrong_after_it(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its memory would go back while the device writes to it."""

    def broken(*_: Any) -> None:
        raise RuntimeError("counting")

    engine = MiniEngine(node.socket, 100, FakeCopier)
    monkeypatch.setattr(engine.side, "_count_stored", broken)
    assert serve(engine) == ""
    engine.close()
