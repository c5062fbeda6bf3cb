"""The real copier over a fake device.

Streams go on after their process was killed.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvhold.codecs.frame import checksum
from kvhold.core.checksums import Checksums, pack
from kvhold.core.holdings import ChunkBytes
from kvhold.core.layout import Group
from kvhold.memory.copier import Piece, Transfer
from kvhold.memory.device import DeviceCopier, DeviceEvent, Lane, PinnedArenas, Settings
from kvhold.memory.device.pinning import Reach
from kvhold.memory.views import View, opaque_blocks
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from kvhold_lab.simulation.checker import MemoryPlace
from kvhold_lab.simulation.world import World

_RING_BYTES = 64 << 10
_MOST_AFTER_DEATH_S = 0.3
_FAST_S = 0.005


class SimDevice(FakeDevice):
    def __init__(self, world: World, checker: Any, owner: str) -> None:
        random = world.random
        super().__init__(random.getrandbits(30))
        self._world = world
        self._slow_s = random.choice((0.0005, 0.005, 0.05, 0.5))
        self._driver = _Driver(self, checker, owner)
        settings = Settings(
            store_ring_bytes=random.choice((256, 1 << 10, _RING_BYTES)),
            load_ring_bytes=_RING_BYTES,
            batch_bytes=random.choice((1, 1 << 20)),
            direct_bytes=random.choice((1, 1 << 30)),
        )
        self._copier = DeviceCopier(self._driver, cast(PinnedArenas, _AllPinned()), settings)
        self._is_running = False
        self._is_killed = False

    async def store(
        self, arena: bytearray, offset: int, place: MemoryPlace | None, value: bytes, layers: int
    ) -> bytes:
        view, blocks = _blocks(layers, len(value) // layers)
        memory = np.frombuffer(arena, np.uint8)
        self.compute(lambda: _fill(blocks, value))
        transfer = self._submit(self._copier.gather, view, memory, offset, place, None)
        self.compute(lambda: _fill(blocks, b"\xee" * len(value)))
        await self._end_of(transfer)
        stored = memory[offset : offset + len(value)].reshape(layers, -1)
        return pack([checksum(row.data) for row in stored])

    async def load(
        self,
        arena: bytearray,
        offset: int,
        place: MemoryPlace | None,
        nbytes: int,
        sums: Sequence[int],
    ) -> bytes | None:
        """Return the next kernel's bytes; None: damaged."""
        view, blocks = _blocks(len(sums), nbytes // len(sums))
        memory = np.frombuffer(arena, np.uint8)
        seen: list[bytes] = []
        expected = Checksums.expected(pack(list(sums)), np.ones(1, np.bool_), lambda chunks: None)
        self.compute(lambda: _fill(blocks, bytes(nbytes)))
        transfer = self._submit(self._copier.scatter, view, memory, offset, place, expected)
        self.compute(lambda: seen.append(b"".join(block.tobytes() for block in blocks)))
        read = self.put(self.engine)
        damage = await self._end_of(transfer)
        read.wait()
        return None if damage else seen[0]

    def end(self, then: Callable[[], None]) -> None:
        """then: called when the streams have stopped"""
        self._is_killed = True

        def ended() -> None:
            self.stop()
            then()

        self._world.later(self._world.random.random() * _MOST_AFTER_DEATH_S, ended)

    def hurry(self) -> None:
        self._slow_s = min(self._slow_s, _FAST_S)

    def hesitate(self) -> None:
        """No real time passes."""

    def _submit(
        self,
        copy: Any,
        view: View,
        memory: npt.NDArray[np.uint8],
        offset: int,
        place: MemoryPlace | None,
        sums: Checksums | None,
    ) -> Transfer:
        places = ChunkBytes(np.array([offset]), np.array([1]), sums)
        self._driver.place = place
        transfer: Transfer = copy(
            [Piece(view, np.zeros(1, np.int64), memory, places)], after=self._copier.mark()
        )
        self._copier.fence([transfer])
        self._keep_running()
        return transfer

    async def _end_of(self, transfer: Transfer) -> bool:
        try:
            while not transfer.done():  # noqa: ASYNC110 - a transfer has no event to wait for
                await asyncio.sleep(self._world.delay(self._slow_s))
        finally:
            damage = transfer.wait() if not self._is_killed else []
        return damage != [None]

    def _keep_running(self) -> None:
        if not self._is_running and not self.is_idle:
            self._is_running = True
            self._world.later(self._world.delay(self._slow_s), self._run)

    def _run(self) -> None:
        self._is_running = False
        self.run_some()
        self._keep_running()


class _Driver(FakeDriver):
    def __init__(self, device: SimDevice, checker: Any, owner: str) -> None:
        super().__init__(device)
        self.place: MemoryPlace | None = None
        self._checker = checker
        self._owner = owner

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        place, verb = self.place, {Lane.STORE: "writes", Lane.LOAD: "reads"}.get(lane)

        def checked() -> None:
            if verb is not None:
                self._checker.touches(place, f"{self._owner}'s device {verb}")
            work()

        return super().launch(lane, after, checked)

    def _may_copy(self, address: int, nbytes: int, *, pinned: bool) -> bool:
        return pinned


class _AllPinned:
    refusal = ""

    def knows(self, buffer: npt.NDArray[np.uint8]) -> bool:
        return True

    def hold(self, buffer: npt.NDArray[np.uint8]) -> None: ...

    def reaching(self, arena: None, buffer: npt.NDArray[np.uint8], begin: int, end: int) -> Any:
        return _Reaching(Reach(int(buffer.__array_interface__["data"][0]), True, 1 << 40))


class _Reaching:
    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def __enter__(self) -> Reach:
        return self._reach

    def __exit__(self, *_: object) -> None: ...


def _blocks(layers: int, nbytes: int) -> tuple[View, list[npt.NDArray[np.uint8]]]:
    blocks = [np.full((1, nbytes), 0x55, np.uint8) for _ in range(layers)]
    group = Group(
        layers=layers,
        planes=1,
        heads=1,
        head_dim=1,
        dtype="uint8",
        packing="blocks",
        block_tokens=1,
        block_bytes=nbytes,
    )
    return opaque_blocks(group, blocks, block_axis=0), blocks


def _fill(blocks: list[npt.NDArray[np.uint8]], value: bytes) -> None:
    size = len(value) // len(blocks)
    for layer, block in enumerate(blocks):
        block[0] = np.frombuffer(value, np.uint8, size, layer * size)
