"""Copies go through a ring of device memory, or directly.

    store:  blocks --kernel--> ring --copy engine--> arena     # large pieces, ring full: directly
    load:   arena --copy engine--> ring --kernel--> blocks     # directly for large pieces

A device's fault is permanent; `wait` still waits for earlier copies.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, cast

from kvhold.core.errors import CapacityError, DamagedChunks, DeviceError, KVHoldError
from kvhold.core.sizes import format_size
from kvhold.kernels import Ranges, RunningSums, Sums, begin_sums, gather, scatter
from kvhold.memory.copier import Mark, Piece, Stage, Transfer
from kvhold.memory.device.batches import Batch, batches
from kvhold.memory.device.crossover import direct_bytes
from kvhold.memory.device.driver import DeviceDriver, DeviceEvent, Lane
from kvhold.memory.device.pinning import Buffer, PinnedArenas, Reach
from kvhold.memory.device.ring import Ring, Slice

log = logging.getLogger(__name__)

Mappings: TypeAlias = Callable[[], tuple[Buffer, Buffer]]
Way: TypeAlias = Literal["ring", "direct"]
Checkers: TypeAlias = Mapping[Lane, Executor]
"""One thread each for stores and loads: a load's check waits for no store."""


@dataclass(frozen=True)
class Settings:
    """batch_bytes: chunks that are copied together; half as much in the first batch
    direct_bytes: larger pieces are loaded directly
    """

    store_ring_bytes: int = 256 << 20
    load_ring_bytes: int = 128 << 20
    batch_bytes: int = 64 << 20
    direct_bytes: int = 32 << 10


class DeviceCopier:
    def __init__(
        self,
        driver: DeviceDriver,
        arenas: PinnedArenas,
        settings: Settings | None = None,
        *,
        mappings: Mappings | None = None,
        threads: int = 1,
        checkers: Checkers | None = None,
        sums_on: str | None = None,
    ) -> None:
        """checkers: take checksums while later batches are copied; None: `Transfer.wait` does.
        sums_on:  the device, if its kernel takes checksums; None: the host takes all
        """
        self._driver = driver
        self._arenas = arenas
        self._settings = settings or Settings()
        self._mappings = mappings
        self._threads = threads
        self._checkers = checkers or {}
        self._sums_on = sums_on
        # two locks: a load may wait long for its ring
        self._locks = {Lane.STORE: threading.Lock(), Lane.LOAD: threading.Lock()}
        self._rings: dict[Lane, Ring] = {}
        self._fault: DeviceError | None = None
        self._goes_by: Way | None = None

    def stages(self) -> Iterator[Stage]:
        ways: tuple[Way, ...] = ("ring",)
        if self._driver.has_direct_copies and not self.stores_block:
            ways = ("ring", "direct")
        try:
            for way in ways:
                self._goes_by = way
                yield self._driver
        finally:
            self._goes_by = None

    @property
    def stores_block(self) -> bool:
        return self._arenas.refusal is not None

    def measure(self, device: str) -> None:
        self._settings = replace(self._settings, direct_bytes=direct_bytes(self, device))

    @property
    def fault(self) -> str:
        return str(self._fault or "")

    def mark(self) -> DeviceEvent | None:
        try:
            with self._noting_faults():
                return self._driver.record()
        except DeviceError:
            return None

    def fence(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            assert isinstance(transfer, DeviceTransfer), "a transfer of another copier"
            for event in transfer.touched:
                with suppress(DeviceError), self._noting_faults(before=False):
                    self._driver.hold(event)

    def gather(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> "DeviceTransfer":
        return self._submit(self._gather_batch, Lane.STORE, pieces, after, layers)

    def scatter(
        self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
    ) -> "DeviceTransfer":
        return self._submit(self._scatter_batch, Lane.LOAD, pieces, after, layers)

    def scratch(self, nbytes: int) -> AbstractContextManager[Buffer]:
        return self._arenas.scratch(nbytes)

    def prepare(self) -> None:
        self._pin_arenas_of([])

    def close(self) -> None:
        self._arenas.close()
        for checker in self._checkers.values():
            checker.shutdown(wait=False)

    def _submit(
        self,
        submit: "_Submit",
        lane: Lane,
        pieces: Sequence[Piece],
        after: Mark | None,
        layers: range | None,
    ) -> "DeviceTransfer":
        self._pin_arenas_of(pieces)
        marks = [] if after is None else [cast(DeviceEvent, after)]
        most_bytes = min(self._settings.batch_bytes, self._ring_bytes(lane) // 2)
        transfer = DeviceTransfer(
            pieces,
            self._arenas,
            lambda: self._noting_faults(before=False),
            self._threads,
            self._checkers.get(lane),
        )
        try:
            for number, piece in enumerate(pieces):
                of_piece = range(piece.view.layers) if layers is None else layers
                for batch in batches(piece, number, of_piece, most_bytes):
                    with self._locks[lane], self._noting_faults():
                        submit(batch, marks, transfer)
        # an interrupt, too: the copies must end before the caller frees the memory
        except BaseException as error:
            transfer.is_lost = isinstance(error, DeviceError)
            transfer.wait()
            raise
        return transfer

    def _pin_arenas_of(self, pieces: Sequence[Piece]) -> None:
        if self._mappings is None or (
            pieces and all(self._arenas.knows(piece.buffer) for piece in pieces)
        ):
            return
        try:
            self._arenas.add(*self._mappings())
        except KVHoldError as error:
            log.debug("kvhold: the arena is not pinned: %s", error)

    def _gather_batch(
        self, batch: Batch, marks: list[DeviceEvent], transfer: "DeviceTransfer"
    ) -> None:
        part = self._part_for_store(batch)
        if part is None:
            self._check_direct(batch)
            with self._reaching(batch, transfer) as reach:
                read = self._driver.copy(Lane.STORE, marks, batch.copies_of_runs(reach))
            whole = (read, batch, None) if batch.is_whole else None
            transfer.add(touched=read, ended=read, summed=whole)
            return
        with part:
            staged = batch.staged(self._ring(Lane.STORE).memory, part.start)
            read = self._driver.launch(
                Lane.GATHER, marks, lambda: gather(staged, layers=batch.layers)
            )
            part.until(read)
            transfer.add(touched=read, ended=read)
            with self._reaching(batch, transfer) as reach:
                written = self._driver.copy(
                    Lane.STORE, [read], batch.copies_of_chunks(reach, staged)
                )
            transfer.add(ended=written)
            event, sums = self._sum(batch.ranges_of_chunks(staged), batch, written)
            part.until(event)
            transfer.add(ended=event, summed=(event, batch, sums))

    def _sum(
        self, ranges: Ranges | None, batch: Batch, after: DeviceEvent
    ) -> "tuple[DeviceEvent, _LateSums | None]":
        """After the event, checksums are there, or the host may take them (None)."""
        device = self._sums_on
        if (
            device is None
            or batch.piece.places.sums is None
            or ranges is None
            or not ranges.suits(device)
        ):
            return after, None
        sums = _LateSums((batch.chunks.size, len(batch.layers)))
        event = self._driver.launch(
            Lane.SUM, [after], lambda: sums.begin(begin_sums(ranges, device))
        )
        return event, sums

    def _part_for_store(self, batch: Batch) -> Slice | None:
        """None: a direct store. Large pieces do not wait for the ring."""
        ring = self._ring(Lane.STORE)
        if not batch.is_whole or self._goes_by == "direct" or not ring.fits(batch.nbytes):
            return None
        if self._is_direct(batch) and self._driver.has_direct_copies:
            return ring.take(batch.nbytes)
        return ring.take_when_free(batch.nbytes)

    def _scatter_batch(
        self, batch: Batch, marks: list[DeviceEvent], transfer: "DeviceTransfer"
    ) -> None:
        with self._reaching(batch, transfer) as reach:
            if self._loads_directly(batch, reach):
                written = self._driver.copy(Lane.LOAD, marks, batch.copies_of_runs(reach))
                ranges = batch.ranges_of_runs()
                self._check(transfer, batch, written, written, ranges, of_blocks=True)
                return
        ring = self._ring(Lane.LOAD)
        if not ring.fits(batch.nbytes):
            raise CapacityError(
                f"a chunk of {format_size(batch.nbytes)} does not fit into the device's "
                f"ring of {format_size(ring.nbytes)}"
            )
        with ring.take_when_free(batch.nbytes) as part:
            staged = batch.staged(ring.memory, part.start)
            with self._reaching(batch, transfer) as reach:
                read = self._driver.copy(Lane.LOAD, [], batch.copies_of_chunks(reach, staged))
            part.until(read)
            transfer.add(ended=read)
            written = self._driver.launch(
                Lane.SCATTER, [*marks, read], lambda: scatter(staged, layers=batch.layers)
            )
            part.until(self._check(transfer, batch, read, written, batch.ranges_of_chunks(staged)))

    def _check(
        self,
        transfer: "DeviceTransfer",
        batch: Batch,
        read: DeviceEvent,
        written: DeviceEvent,
        ranges: Ranges | None,
        *,
        of_blocks: bool = False,
    ) -> DeviceEvent:
        """read, written: after a load's reads of the arena, and after its writes of blocks
        of_blocks: the ranges are in the blocks

        Return the last event.
        """
        transfer.add(touched=written, ended=written)
        event, sums = self._sum(ranges, batch, written)
        transfer.add(
            touched=event if of_blocks else None,
            ended=event,
            checked=(read if sums is None else event, batch, sums),
        )
        return event

    def _reaching(self, batch: Batch, transfer: "DeviceTransfer") -> AbstractContextManager[Reach]:
        return self._arenas.reaching(
            transfer.arenas[batch.number], batch.piece.buffer, batch.begin, batch.end
        )

    def _loads_directly(self, batch: Batch, reach: Reach) -> bool:
        if batch.is_coded:
            return False
        if self._goes_by is not None:
            return self._goes_by == "direct"
        return reach.pinned and self._driver.has_direct_copies and self._is_direct(batch)

    def _is_direct(self, batch: Batch) -> bool:
        return not batch.is_coded and batch.smallest_piece >= self._settings.direct_bytes

    def _check_direct(self, batch: Batch) -> None:
        if not self._driver.has_direct_copies or batch.is_coded:
            raise CapacityError(
                f"chunks of {format_size(batch.nbytes)} cannot use the device's ring now"
            )

    def _ring(self, lane: Lane) -> Ring:
        if lane not in self._rings:
            self._rings[lane] = Ring(self._driver.new_ring(self._ring_bytes(lane)))
            self._driver.drain()
        return self._rings[lane]

    def _ring_bytes(self, lane: Lane) -> int:
        return (
            self._settings.store_ring_bytes
            if lane is Lane.STORE
            else self._settings.load_ring_bytes
        )

    @contextmanager
    def _noting_faults(self, *, before: bool = True) -> Iterator[None]:
        if before and self._fault is not None:
            raise self._fault
        try:
            yield
        except DeviceError as error:
            if self._fault is None:
                log.error("kvhold: this process stops caching: %s", error)
            self._fault = error
            raise


class _LateSums:
    """Checksums that the device takes; valid after their event."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._running: RunningSums | None = None

    def begin(self, running: RunningSums) -> None:
        self._running = running

    def read(self) -> Sums:
        assert self._running is not None, "read after the event"
        return self._running.read().reshape(self._shape)


_Summed: TypeAlias = tuple[DeviceEvent, Batch, "_LateSums | None"]


class DeviceTransfer:
    def __init__(
        self,
        pieces: Sequence[Piece],
        arenas: PinnedArenas,
        noting_faults: Callable[[], AbstractContextManager[None]],
        threads: int,
        checker: Executor | None,
    ) -> None:
        self.touched: list[DeviceEvent] = []
        self.arenas = [arenas.hold(piece.buffer) for piece in pieces]
        self.is_lost = False
        self._damage: list[set[int]] = [set() for _ in pieces]
        self._pinned = arenas
        self._noting_faults = noting_faults
        self._ends: list[DeviceEvent] = []
        self._checks: list[Callable[[], None]] = []
        self._threads = threads
        self._checker = checker

    def add(
        self,
        *,
        touched: DeviceEvent | None = None,
        ended: DeviceEvent,
        checked: "_Summed | None" = None,
        summed: "_Summed | None" = None,
    ) -> None:
        """touched: after it, the blocks have been read, or written
        checked, summed: an event, a batch whose checksums are compared, or taken, after it, and
            the device's, if it takes them
        """
        self._ends.append(ended)
        if touched is not None:
            self.touched.append(touched)
        if checked is not None:
            self._checks.append(self._later(self._verify, *checked))
        if summed is not None:
            self._checks.append(self._later(self._take_sums, *summed))

    def done(self) -> bool:
        with self._noting_faults():
            return all(event.fired() for event in self._ends)

    def wait(self) -> list[DamagedChunks | None]:
        """Raises DeviceError. Then the arena stays pinned: the device may still use it."""
        faults: list[Exception] = []
        for check in self._checks:
            try:
                check()
            except Exception as error:  # noqa: BLE001
                faults.append(error)
        for event in self._ends:
            self._ends_well(event, faults)
        fault = next((each for each in faults if isinstance(each, DeviceError)), None)
        if fault is not None:
            raise fault
        arenas, self.arenas, self._checks = self.arenas, [], []
        for arena in arenas:
            if arena is not None and not self.is_lost:
                self._pinned.release(arena)
        if faults:
            raise faults[0]
        return [DamagedChunks(sorted(chunks)) if chunks else None for chunks in self._damage]

    def _later(
        self,
        check: "Callable[[DeviceEvent, Batch, _LateSums | None], None]",
        event: DeviceEvent,
        batch: Batch,
        sums: "_LateSums | None",
    ) -> Callable[[], None]:
        if self._checker is not None:
            # executors refuse work after the main thread, and after `close`
            with suppress(RuntimeError):
                return self._checker.submit(check, event, batch, sums).result
        return partial(check, event, batch, sums)

    def _verify(self, event: DeviceEvent, batch: Batch, sums: "_LateSums | None") -> None:
        with self._noting_faults():
            event.wait()
        planned, layers, chunks = batch.piece.planned, batch.layers, batch.chunks
        if sums is not None:
            damage = planned.compare_sums(layers, chunks, sums.read())
        else:
            damage = planned.verify(layers, chunks, threads=self._threads)
        self._damage[batch.number].update(damage.chunks if damage else ())

    def _take_sums(self, event: DeviceEvent, batch: Batch, sums: "_LateSums | None") -> None:
        with self._noting_faults():
            event.wait()
        planned, layers, chunks = batch.piece.planned, batch.layers, batch.chunks
        if sums is not None:
            planned.keep_sums(layers, chunks, sums.read())
        else:
            planned.take_sums(layers, chunks, threads=self._threads)

    def _ends_well(self, event: DeviceEvent, faults: list[Exception]) -> bool:
        try:
            with self._noting_faults():
                event.wait()
        except DeviceError as error:
            faults.append(error)
            return False
        return True


_Submit: TypeAlias = Callable[[Batch, list[DeviceEvent], DeviceTransfer], None]
