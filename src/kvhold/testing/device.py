"""A device whose streams run late, in an order that a seed draws: what lacks an event or a wait
gives wrong bytes.

    device = FakeDevice(seed=7)
    device.compute(lambda: tensor.fill_(1))             # on the engine's stream, as a kernel is
    copier = fake_copier(device)  # `DeviceCopier` over it, for `WorkerSide` and other users
    device.synchronize()  # all streams are empty, as after cudaDeviceSynchronize

Its memory is the host's. A stream is a queue: its operations run one after another, and between two
streams there is no order but that of events. Nothing runs by itself. Whoever waits has the device
run: a random operation of a random stream each time, until what is waited for has ended. So an
operation runs as late as it may, or as early. Any thread may call.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DeviceRefused
from kvhold.memory.device import Copies, DeviceCopier, Lane, PinnedArenas, Settings
from kvhold.memory.device import Event as DriverEvent

_HESITATION_S = 0.005


class Event:
    """Something that a stream of a device gets to."""

    def __init__(self, device: "FakeDevice") -> None:
        self.has_fired = False
        self._device = device

    def fired(self) -> bool:
        """Whether it has. Now and then the device has run meanwhile."""
        self._device.run_seldom()
        return self.has_fired

    def wait(self) -> None:
        """Have the device run until it has. Others may give the device work before."""
        self._device.hesitate()
        self._device.wait(self)


class Stream:
    """Operations in their order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.operations: deque[Callable[[], None] | Event] = deque()  # an Event: wait for it


class FakeDevice:
    """Streams and their order."""

    def __init__(self, seed: int) -> None:
        """seed: of the order in which streams run"""
        self.engine = Stream("engine")
        self._streams = [self.engine]
        self._gates: deque[Event] = deque()
        self._random = Random(seed)
        self._lock = threading.RLock()

    def new_stream(self, name: str) -> Stream:
        """One more."""
        with self._lock:
            self._streams.append(Stream(name))
            return self._streams[-1]

    def compute(self, work: Callable[[], None]) -> None:
        """Put work on the engine's stream."""
        self.put(self.engine, work)

    def put(self, stream: Stream, *operations: "Callable[[], None] | Event") -> Event:
        """Put operations on a stream, and an event behind them, which is returned."""
        event = Event(self)
        with self._lock:
            stream.operations += [*operations, lambda: setattr(event, "has_fired", True)]
        return event

    def delay(self, stream: Stream) -> None:
        """Have a stream stand still until somebody waits and nothing else can run."""
        gate = Event(self)
        with self._lock:
            self._gates.append(gate)
            stream.operations.append(gate)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its streams."""
        with self._lock:
            return not any(stream.operations for stream in self._streams)

    def stop(self) -> None:
        """Run nothing of what is on its streams, as where the process has ended."""
        with self._lock:
            for stream in self._streams:
                stream.operations.clear()

    def run_some(self) -> None:
        """Run as many operations as it likes to: none, some or all."""
        with self._lock:
            while self._random.random() < 0.7 and self._step(somebody_waits=False):
                pass

    def run_seldom(self) -> None:
        """Nearly always nothing: who asks often must not make the device prompt."""
        with self._lock:
            if self._random.random() < 0.02:
                self.run_some()

    def hesitate(self) -> None:
        """Let other threads go first, mostly."""
        with self._lock:
            pause_s = self._random.random() * _HESITATION_S
        time.sleep(pause_s)

    def wait(self, event: Event) -> None:
        """Run until an event has fired."""
        with self._lock:
            while not event.has_fired:
                assert self._step(), "the event that is waited for never fires"

    def synchronize(self) -> None:
        """Run until nothing is left."""
        with self._lock:
            while self._step():
                pass
            assert self.is_idle, "streams wait for each other"

    def _step(self, *, somebody_waits: bool = True) -> bool:
        ready = [
            stream
            for stream in self._streams
            if stream.operations and _is_ready(stream.operations[0])
        ]
        if not ready and self._gates and somebody_waits:
            self._gates.popleft().has_fired = True
            return True
        if not ready:
            return False
        operation = self._random.choice(ready).operations.popleft()
        if not isinstance(operation, Event):
            operation()
        return True


def _is_ready(operation: Callable[[], None] | Event) -> bool:
    return not isinstance(operation, Event) or operation.has_fired


class FakeDriver:
    """The device as a `Driver` (`memory/device/driver.py`).

    Its memory is the host's, so views are of host memory.
    """

    def __init__(
        self, device: FakeDevice, *, has_direct_copies: bool = True, refuses_pinning: bool = False
    ) -> None:
        self.has_direct_copies = has_direct_copies
        self.pinned: dict[int, int] = {}  # bytes from each address on
        self._device = device
        self._refuses_pinning = refuses_pinning
        self._streams = {lane: device.new_stream(lane.value) for lane in Lane}

    def delay(self, seconds: float) -> None:
        """See `Stage`."""
        self._device.delay(self._device.engine)

    def late_mark(self, seconds: float) -> Event:
        """See `Stage`."""
        late = self._device.new_stream("late")
        self._device.delay(late)
        return self._device.put(late)

    def drain(self) -> None:
        """See `Stage`."""
        self._device.wait(self.record())

    def compute(self, work: Callable[[], None]) -> None:
        """See `Stage`."""
        self._device.compute(work)

    def record(self) -> Event:
        """See `Driver`."""
        return self._device.put(self._device.engine)

    def hold(self, event: DriverEvent) -> None:
        """See `Driver`."""
        assert isinstance(event, Event)
        self._device.put(self._device.engine, event)

    def launch(self, lane: Lane, after: Sequence[DriverEvent], work: Callable[[], None]) -> Event:
        """See `Driver`."""
        event = self._device.put(self._streams[lane], *_own(after), work)
        self._device.run_some()
        return event

    def copy(self, lane: Lane, after: Sequence[DriverEvent], copies: Copies) -> Event:
        """See `Driver`. What is not pinned is copied when the call returns, as a driver may do."""

        def work() -> None:
            for host, device, nbytes in zip(
                copies.host.tolist(), copies.device.tolist(), copies.nbytes.tolist(), strict=True
            ):
                assert self._may_copy(host, nbytes, pinned=copies.pinned), (
                    "a copy that the device does not take"
                )
                ctypes.memmove(*((host, device) if lane is Lane.STORE else (device, host)), nbytes)

        event = self.launch(lane, after, work)
        if not copies.pinned:
            self._device.wait(event)
        return event

    def new_ring(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Driver`."""
        return np.full(nbytes, 0xA5, np.uint8)

    def pin(self, address: int, nbytes: int) -> None:
        """See `Driver`."""
        if self._refuses_pinning:
            raise DeviceRefused("this device does not register host memory")
        assert not any(
            start < address + nbytes and address < start + size
            for start, size in self.pinned.items()
        ), "registered twice"
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        """See `Driver`."""
        del self.pinned[address]

    def _may_copy(self, address: int, nbytes: int, *, pinned: bool) -> bool:
        """A real device takes what lies in one registration, or in none."""
        touched = [
            start
            for start, size in self.pinned.items()
            if start < address + nbytes and address < start + size
        ]
        if not touched:
            return not pinned
        (start, *others) = touched
        return (
            pinned
            and not others
            and start <= address
            and address + nbytes <= start + self.pinned[start]
        )


def fake_copier(
    device: FakeDevice, *, seed: int = 0, driver: FakeDriver | None = None
) -> DeviceCopier:
    """The copier that a real device has, over this one. seed: draws its sizes, so that rings are
    full and chunks are many batches.
    """
    random = Random(seed)
    sizes = Settings(
        store_ring_bytes=random.choice([1 << 14, 1 << 16, 1 << 20]),
        load_ring_bytes=random.choice([1 << 17, 1 << 20]),
        batch_bytes=random.choice([1, 1 << 15, 1 << 20]),
        direct_bytes=random.choice([1, 1 << 30]),
    )
    driver = driver or FakeDriver(device)
    return DeviceCopier(driver, PinnedArenas(driver), sizes)


def _own(events: Sequence[DriverEvent]) -> list[Event]:
    assert all(isinstance(event, Event) for event in events), "events of another device"
    return [event for event in events if isinstance(event, Event)]
