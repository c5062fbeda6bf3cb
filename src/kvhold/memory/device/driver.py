"""The contract of a device for `DeviceCopier`: streams by purpose, events, kernels and copies.

    event = driver.record()                                   # the end of this thread's stream now
    event = driver.launch(Lane.GATHER, [event], kernel)  # run after `event`, on the stream of that
    lane
    event = driver.copy(Lane.STORE, [event], copies)          # by a copy engine, without a kernel
    driver.hold(event)                                        # this thread's stream waits for it

A lane is a stream that the driver owns. Operations of one lane run in order; only events order
operations of different lanes. A driver raises DeviceError for every fault of the device. Such a
fault is permanent: nothing works on the device afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvhold.kernels.view import Int64s, Tensor
from kvhold.memory.copier import Stage


class Lane(Enum):
    """A stream, named by its purpose."""

    GATHER = "gather"  # kernels that read blocks into the ring
    STORE = "store"  # copies from the device to the arena; low priority
    LOAD = "load"  # copies from the arena to the device
    SCATTER = "scatter"  # kernels that write blocks from the ring; high priority


class Event(Protocol):
    """A point in a stream."""

    def fired(self) -> bool:
        """Return whether the stream has reached the point. Raises DeviceError."""

    def wait(self) -> None:
        """Block the calling thread until the stream has reached the point. Raises DeviceError."""


@dataclass(frozen=True)
class Copies:
    """Pieces of memory to copy between the host and the device, in one direction.

    host:   int64 [n], addresses in host memory
    device: int64 [n], addresses in device memory
    nbytes: int64 [n], size of each piece
    pinned: the host memory is registered with the device; else the driver copies through its own
            memory, and the call may block until the copy has ended
    """

    host: Int64s
    device: Int64s
    nbytes: Int64s
    pinned: bool


class Driver(Stage, Protocol):
    """One device. Any thread may call."""

    has_direct_copies: bool
    """Whether `copy` reaches all memory of the device, not only its rings."""

    def record(self) -> Event:
        """Record an event on the calling thread's current stream."""

    def hold(self, event: Event) -> None:
        """Make the calling thread's current stream wait for an event."""

    def launch(self, lane: Lane, after: Sequence[Event], work: Callable[[], None]) -> Event:
        """Call `work` with the lane's stream as the current one, behind the events in `after`.

        Returns an event behind the kernels that `work` launched.
        """

    def copy(self, lane: Lane, after: Sequence[Event], copies: Copies) -> Event:
        """Copy pieces: to the host on `Lane.STORE`, else to the device.

        Returns an event behind the copies.
        """

    def new_ring(self, nbytes: int) -> Tensor:
        """Allocate device memory: uint8 [nbytes]."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register host memory for copies. Raises DeviceRefused if the device refuses it."""

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy of this memory may be running."""
