"""The contract of a device for `DeviceCopier`.

Operations of one lane run in order; only events order lanes. Every fault of the device is a
DeviceError, and permanent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvhold.kernels.view import Int64s, Tensor
from kvhold.memory.copier import Stage


class Lane(Enum):
    GATHER = "gather"  # kernels that read blocks
    STORE = "store"  # low priority
    LOAD = "load"  # from the arena
    SCATTER = "scatter"  # high priority
    SUM = "sum"  # kernels that take checksums


class DeviceEvent(Protocol):
    def fired(self) -> bool:
        """The stream has reached this point."""

    def wait(self) -> None: ...


@dataclass(frozen=True)
class Copies:
    """One direction. host, device, nbytes: int64 [n]. pinned: else the call may block"""

    host: Int64s
    device: Int64s
    nbytes: Int64s
    pinned: bool


class DeviceDriver(Stage, Protocol):
    """Any thread may call."""

    has_direct_copies: bool
    """`copy` reaches all memory of the device, not only its rings."""

    def record(self) -> DeviceEvent:
        """On the thread's current stream."""

    def hold(self, event: DeviceEvent) -> None:
        """The thread's current stream waits for the event."""

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> DeviceEvent:
        """Call `work` on the lane's stream, after the events `after`. The event is after `work`."""

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> DeviceEvent:
        """To the host on `Lane.STORE`, else to the device."""

    def new_ring(self, nbytes: int) -> Tensor:
        """Device memory: uint8 [nbytes]."""

    def pin(self, address: int, nbytes: int) -> None:
        """Register host memory. Raises DeviceRefused."""

    def unpin(self, address: int) -> None:
        """No copy of this memory may be running."""
