"""A device whose streams run late, so a missing event or wait gives wrong bytes. Thread-safe."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DeviceRefused
from kvhold.memory.device import Copies, DeviceCopier, DeviceEvent, Lane, PinnedArenas, Settings

_HESITATION_S = 0.005
_CHANGES = 0.05  # how often other streams become the slow ones, per operation


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self.has_fired = False
        self._device = device

    def fired(self) -> bool:
        self._device.run_seldom()
        return self.has_fired

    def wait(self) -> None:
        self._device.hesitate()
        self._device.wait(self)


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.operations: deque[Callable[[], None] | FakeEvent] = deque()


class FakeDevice:
    """has_slow_streams: some run late for a while. Otherwise all are equally late."""

    def __init__(self, seed: int, *, has_slow_streams: bool = True) -> None:
        self.engine = FakeStream("engine")
        self._streams = [self.engine]
        self._gates: deque[FakeEvent] = deque()
        self._random = Random(seed)
        self._changes = _CHANGES if has_slow_streams else 0.0
        self._slow: list[FakeStream] | None = None if has_slow_streams else []
        self._lock = threading.RLock()

    def new_stream(self, name: str) -> FakeStream:
        with self._lock:
            self._streams.append(FakeStream(name))
            return self._streams[-1]

    def compute(self, work: Callable[[], None]) -> None:
        self.put(self.engine, work)

    def put(self, stream: FakeStream, *operations: "Callable[[], None] | FakeEvent") -> FakeEvent:
        event = FakeEvent(self)
        with self._lock:
            stream.operations += [*operations, lambda: setattr(event, "has_fired", True)]
        return event

    def delay(self, stream: FakeStream) -> None:
        """Stop a stream until nothing else can run."""
        gate = FakeEvent(self)
        with self._lock:
            self._gates.append(gate)
            stream.operations.append(gate)

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not any(stream.operations for stream in self._streams)

    def stop(self) -> None:
        with self._lock:
            for stream in self._streams:
                stream.operations.clear()

    def run_some(self) -> None:
        with self._lock:
            while self._random.random() < 0.7 and self._step(somebody_waits=False):
                pass

    def run_seldom(self) -> None:
        with self._lock:
            if self._random.random() < 0.02:
                self.run_some()

    def hesitate(self) -> None:
        with self._lock:
            pause_s = self._random.random() * _HESITATION_S
        time.sleep(pause_s)

    def wait(self, event: FakeEvent) -> None:
        with self._lock:
            while not event.has_fired:
                assert self._step(), "the awaited event never fires"

    def synchronize(self) -> None:
        with self._lock:
            while self._step():
                pass
            assert self.is_idle, "streams wait for each other"

    def _step(self, *, somebody_waits: bool = True) -> bool:
        """Slow streams run only while a caller waits, after all others."""
        if self._slow is None or self._random.random() < self._changes:
            engine, *lanes = self._streams
            one = self._random.choice(self._streams)
            self._slow = self._random.choice([[engine], lanes, [one], []])
        ready = [
            stream
            for stream in self._streams
            if stream.operations and _is_ready(stream.operations[0])
        ]
        others = [stream for stream in ready if stream not in self._slow]
        if others or not somebody_waits:
            ready = others
        if not ready and self._gates and somebody_waits:
            self._gates.popleft().has_fired = True
            return True
        if not ready:
            return False
        operation = self._random.choice(ready).operations.popleft()
        if not isinstance(operation, FakeEvent):
            operation()
        return True


def _is_ready(operation: Callable[[], None] | FakeEvent) -> bool:
    return not isinstance(operation, FakeEvent) or operation.has_fired


class FakeDriver:
    def __init__(
        self, device: FakeDevice, *, has_direct_copies: bool = True, refuses_pinning: bool = False
    ) -> None:
        self.has_direct_copies = has_direct_copies
        self.pinned: dict[int, int] = {}
        self._device = device
        self._refuses_pinning = refuses_pinning
        self._streams = {lane: device.new_stream(lane.value) for lane in Lane}

    def delay(self, seconds: float) -> None:
        self._device.delay(self._device.engine)

    def late_mark(self, seconds: float) -> FakeEvent:
        late = self._device.new_stream("late")
        self._device.delay(late)
        return self._device.put(late)

    def drain(self) -> None:
        self._device.wait(self.record())

    def compute(self, work: Callable[[], None]) -> None:
        self._device.compute(work)

    def record(self) -> FakeEvent:
        return self._device.put(self._device.engine)

    def hold(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._device.put(self._device.engine, event)

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        event = self._device.put(self._streams[lane], *_own(after), work)
        self._device.run_some()
        return event

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> FakeEvent:
        """Unpinned copies end before this returns, as with some drivers."""

        def work() -> None:
            for host, device, nbytes in zip(
                copies.host.tolist(), copies.device.tolist(), copies.nbytes.tolist(), strict=True
            ):
                assert self._may_copy(host, nbytes, pinned=copies.pinned), (
                    "a device would refuse this copy"
                )
                ctypes.memmove(*((host, device) if lane is Lane.STORE else (device, host)), nbytes)

        event = self.launch(lane, after, work)
        if not copies.pinned:
            self._device.wait(event)
        return event

    def new_ring(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.full(nbytes, 0xA5, np.uint8)

    def pin(self, address: int, nbytes: int) -> None:
        if self._refuses_pinning:
            raise DeviceRefused("this device does not register host memory")
        assert not any(
            start < address + nbytes and address < start + size
            for start, size in self.pinned.items()
        ), "registered twice"
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def _may_copy(self, address: int, nbytes: int, *, pinned: bool) -> bool:
        """Real devices accept ranges within one registration, or outside all."""
        pinned_now = self.pinned.copy()
        touched = [
            start
            for start, size in pinned_now.items()
            if start < address + nbytes and address < start + size
        ]
        if not touched:
            return not pinned
        (start, *others) = touched
        return (
            pinned
            and not others
            and start <= address
            and address + nbytes <= start + pinned_now[start]
        )


def fake_copier(
    device: FakeDevice, *, seed: int = 0, driver: FakeDriver | None = None
) -> DeviceCopier:
    """seed: chooses sizes at which rings fill and chunks are split, and who takes checksums"""
    random = Random(seed)
    sizes = Settings(
        store_ring_bytes=random.choice([1 << 14, 1 << 16, 1 << 20]),
        load_ring_bytes=random.choice([1 << 17, 1 << 20]),
        batch_bytes=random.choice([1, 1 << 15, 1 << 20]),
        direct_bytes=random.choice([1, 1 << 30]),
    )
    driver = driver or FakeDriver(device)
    sums_on = random.choice(["cpu", None])
    return DeviceCopier(driver, PinnedArenas(driver), sizes, sums_on=sums_on)


def _own(events: Sequence[DeviceEvent]) -> list[FakeEvent]:
    assert all(isinstance(event, FakeEvent) for event in events), "events of another device"
    return [event for event in events if isinstance(event, FakeEvent)]
