"""Pin the arena for a device, in the background, and unpin it before it is unmapped.

A thread pins slices (0.1 s per GiB).
"""

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import CapacityError, DeviceError, DeviceRefused, KVHoldError
from kvhold.core.sizes import format_size
from kvhold.memory.device.driver import DeviceDriver

SLICE_BYTES = 256 << 20  # 25 ms per call
_MOST_WAIT_S = 1.0  # for a slice; the store holds its lock, and the engine waits

Buffer = npt.NDArray[np.uint8]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reach:
    """slice_bytes: a copy may not cross a multiple, counted from `address`"""

    address: int
    pinned: bool
    slice_bytes: int


@dataclass(eq=False)
class PinnedArena:
    """The lock of `changed` protects the fields.

    report:     called with `pinned_bytes`, from the arena's beginning, after each slice
    is_settled: no more slices will be pinned
    is_leaving: it is being unpinned, or was unpinned
    """

    read_only: Buffer
    writable: Buffer
    report: Callable[[int], None] = lambda _: None
    pinned_bytes: int = 0
    is_pinning: bool = False
    unpinned_copies: int = 0
    is_settled: bool = False
    fault: str | None = None
    users: int = 0
    is_ending: bool = False
    is_leaving: bool = False
    is_left: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread | None = None

    @property
    def base(self) -> int:
        return _address(self.writable)

    def has(self, buffer: Buffer) -> bool:
        return _address(buffer) in (_address(self.read_only), self.base)

    def is_steady(self, begin: int, end: int) -> bool:
        """These bytes are pinned, or cannot become pinned during a copy."""
        if self.fault is not None or end <= self.pinned_bytes or self.is_settled:
            return True
        return not self.is_pinning and begin >= self.pinned_bytes

    def end(self) -> None:
        with self.changed:
            self.is_ending = True
            self.changed.notify_all()


class PinnedArenas:
    """The current arena, and earlier ones while their copies run. Any thread."""

    def __init__(
        self,
        driver: DeviceDriver,
        *,
        slice_bytes: int = SLICE_BYTES,
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._driver = driver
        self._slice_bytes = slice_bytes
        self._report = report
        self._lock = threading.Lock()
        self._arenas: list[PinnedArena] = []  # changed in place, for the finalizer
        self._refusal: str | None = None
        weakref.finalize(self, _end_all, self._arenas)

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return self._arenas[-1].pinned_bytes if self._arenas else 0

    @property
    def refusal(self) -> str | None:
        return self._refusal

    def note_refusal(self, reason: str) -> None:
        self._refusal = reason

    def add(self, read_only: Buffer, writable: Buffer) -> None:
        assert read_only.size == writable.size, "two mappings of one arena"
        with self._lock:
            if any(arena.writable is writable for arena in self._arenas):
                return
            for old in self._arenas:
                old.end()
            arena = PinnedArena(read_only, writable, self._report)
            self._arenas[:] = [*(old for old in self._arenas if not old.is_left), arena]
            arena.thread = threading.Thread(
                target=_live,
                args=(self._driver, arena, self._slice_bytes, weakref.ref(self)),
                name="kvhold-pin",
                daemon=True,
            )
        arena.thread.start()

    def knows(self, buffer: Buffer) -> bool:
        with self._lock:
            return any(arena.has(buffer) for arena in self._arenas)

    def hold(self, buffer: Buffer) -> PinnedArena | None:
        """Until `release`. None: no known arena."""
        with self._lock:
            for arena in reversed(self._arenas):
                if arena.has(buffer) and not arena.is_left:
                    with arena.changed:
                        arena.users += 1
                    return arena
        return None

    def release(self, arena: PinnedArena) -> None:
        with arena.changed:
            arena.users -= 1
            if arena.is_ending:
                arena.changed.notify_all()
        with self._lock:
            self._arenas[:] = [each for each in self._arenas if not each.is_left]

    @contextmanager
    def reaching(
        self, arena: PinnedArena | None, buffer: Buffer, begin: int, end: int
    ) -> Iterator[Reach]:
        """How the device reaches bytes `begin` to `end`, to submit a copy.

        Waits for a running pin; unpinned bytes stay so in the block. Raises DeviceError, and
        CapacityError if only a part is pinned, or if the arena is being unpinned.
        """
        if arena is None:
            yield Reach(_address(buffer), False, self._slice_bytes)
            return
        with arena.changed:
            is_steady = arena.changed.wait_for(
                lambda: arena.is_leaving or arena.is_steady(begin, end), _MOST_WAIT_S
            )
            if arena.fault is not None:
                raise DeviceError(arena.fault)
            if arena.is_leaving or not is_steady:
                raise CapacityError(
                    "chunks of an arena that is being unpinned"
                    if arena.is_leaving
                    else "chunks of which only a part is pinned so far"
                )
            is_pinned = end <= arena.pinned_bytes
            if not is_pinned and begin < arena.pinned_bytes:
                raise CapacityError(
                    "chunks that lie across the end of the "
                    f"{format_size(arena.pinned_bytes)} that the device pins"
                )
            arena.unpinned_copies += not is_pinned
        try:
            yield (
                Reach(arena.base, True, self._slice_bytes)
                if is_pinned
                else Reach(_address(buffer), False, self._slice_bytes)
            )
        finally:
            if not is_pinned:
                with arena.changed:
                    arena.unpinned_copies -= 1
                    arena.changed.notify_all()

    def wait(self) -> None:
        with self._lock:
            arena = self._arenas[-1] if self._arenas else None
        if arena is not None:
            with arena.changed:
                arena.changed.wait_for(lambda: arena.is_settled)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Buffer]:
        """Pinned zeros, uint8 [nbytes]. Transfers must end in the block."""
        buffer = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
        arena = PinnedArena(buffer, buffer)
        with self._lock:
            self._arenas.insert(0, arena)
        _pin(self._driver, arena, self._slice_bytes, weakref.ref(self))
        try:
            yield buffer[:nbytes]
        finally:
            with self._lock:
                self._arenas[:] = [each for each in self._arenas if each is not arena]
            _unpin(self._driver, arena, self._slice_bytes)

    def close(self) -> None:
        """An arena with transfers stays pinned and mapped."""
        with self._lock:
            arenas = list(self._arenas)
            self._arenas.clear()
        for arena in arenas:
            arena.end()
        for arena in arenas:
            if arena.thread is not None:
                with arena.changed:
                    is_used = arena.users > 0
                if is_used:
                    log.warning("kvhold: copies are still running; the arena stays pinned")
                else:
                    arena.thread.join()


def _live(
    driver: DeviceDriver, arena: PinnedArena, slice_bytes: int, owner: "weakref.ref[PinnedArenas]"
) -> None:
    """`owner` is weak: the thread must not keep it alive."""
    _pin(driver, arena, slice_bytes, owner)
    with arena.changed:
        arena.changed.wait_for(lambda: arena.is_ending and not arena.users)
        arena.is_leaving = True
        arena.changed.notify_all()
    _unpin(driver, arena, slice_bytes)
    arena.is_left = not arena.pinned_bytes


def _pin(
    driver: DeviceDriver, arena: PinnedArena, slice_bytes: int, owner: "weakref.ref[PinnedArenas]"
) -> None:
    arenas = owner()
    refused_before = arenas is None or arenas.refusal is not None
    del arenas
    refusal = None if refused_before else _pin_slices(driver, arena, slice_bytes)
    if refusal is not None and (arenas := owner()) is not None:
        arenas.note_refusal(refusal)
    with arena.changed:
        arena.is_settled = True
        arena.changed.notify_all()


def _pin_slices(driver: DeviceDriver, arena: PinnedArena, slice_bytes: int) -> str | None:
    size = arena.writable.size
    for begin in range(0, size, slice_bytes):
        end = min(begin + slice_bytes, size)
        with arena.changed:
            if arena.is_ending:
                return None
            arena.is_pinning = True
            arena.changed.wait_for(lambda: not arena.unpinned_copies)
        began_s = time.monotonic()
        refusal = None
        try:
            driver.pin(arena.base + begin, end - begin)
        except DeviceRefused as error:
            refusal = str(error)
            log.warning(
                "kvhold: the device pins only %s of the host's memory, so copies are slower: %s",
                format_size(begin),
                error,
            )
        except DeviceError as error:
            refusal = arena.fault = f"the arena could not be pinned: {error}"
            log.error("kvhold: %s", refusal)
        with arena.changed:
            arena.is_pinning = False
            if refusal is None:
                arena.pinned_bytes = end
            arena.changed.notify_all()
        if refusal is not None:
            return refusal
        _report_pinned(arena)
        if arena.thread is not None:
            with arena.changed:
                arena.changed.wait_for(lambda: arena.is_ending, time.monotonic() - began_s)
    log.info("kvhold: %s are pinned", format_size(size))
    return None


def _report_pinned(arena: PinnedArena) -> None:
    try:
        arena.report(arena.pinned_bytes)
    except KVHoldError as error:
        log.debug(
            "kvhold: %s are pinned; the report to the node failed: %s",
            format_size(arena.pinned_bytes),
            error,
        )


def _unpin(driver: DeviceDriver, arena: PinnedArena, slice_bytes: int) -> None:
    for begin in range(0, arena.pinned_bytes, slice_bytes):
        try:
            driver.unpin(arena.base + begin)
        except DeviceError as error:
            log.warning("kvhold: the arena could not be unpinned: %s", error)
            _never_unmapped.append(arena)
            return
    arena.pinned_bytes = 0


_never_unmapped: list[PinnedArena] = []
"""Unpinning failed: they stay mapped, so no memory reuses their addresses."""


def _end_all(arenas: list[PinnedArena]) -> None:
    for arena in arenas:
        arena.end()


def _address(buffer: Buffer) -> int:
    return int(buffer.__array_interface__["data"][0])
