"""A `DeviceDriver` for every device with streams in torch.

Slow: host memory is not pinned, and calls block until their copies have ended.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch

from kvhold.core.errors import CapacityError, DeviceError, DeviceRefused, LayoutError
from kvhold.kernels.view import Tensor
from kvhold.memory.device.driver import Copies, DeviceEvent, Lane

_URGENT = (Lane.SCATTER,)  # a load must not wait milliseconds for a prefill's kernel


class TorchEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def fired(self) -> bool:
        with device_errors():
            return bool(self.event.query())

    def wait(self) -> None:
        with device_errors():
            self.event.synchronize()


class TorchDriver:
    has_direct_copies = False

    def __init__(self, device: torch.device) -> None:
        """Raises LayoutError for a device without streams, and DeviceError."""
        self.device = device
        self._module: Any = torch.get_device_module(device.type)
        if not hasattr(self._module, "Stream") or not hasattr(self._module, "Event"):
            raise LayoutError(f"kvhold does not serve {device.type}: torch has no streams for it")
        self._rings: list[torch.Tensor] = []
        self._busy: torch.Tensor | None = None
        with device_errors():
            self._streams = {lane: self.new_stream(is_urgent=lane in _URGENT) for lane in Lane}

    @cached_property
    def _late_stream(self) -> Any:
        return self.new_stream(is_urgent=False)

    def _here(self) -> AbstractContextManager[Any]:
        """Leaving a stream would create a context on the first device."""
        return (
            self._module.device(self.device) if hasattr(self._module, "device") else nullcontext()
        )

    @cached_property
    def _matrix(self) -> torch.Tensor:
        return torch.zeros(1024, 1024, device=self.device)

    def new_stream(self, *, is_urgent: bool) -> Any:
        return self._module.Stream()

    def new_event(self) -> TorchEvent:
        return TorchEvent(self._module.Event())

    def delay(self, seconds: float) -> None:
        for _ in range(max(1, int(seconds * 1e4))):
            self._busy = self._matrix @ self._matrix

    def late_mark(self, seconds: float) -> TorchEvent:
        stream, event = self._late_stream, self.new_event()
        with device_errors(), self._here(), self._module.stream(stream):
            self.delay(seconds)
            event.event.record(stream)
        return event

    def drain(self) -> None:
        self.record().wait()

    def compute(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> TorchEvent:
        event = self.new_event()
        with device_errors():
            event.event.record(self._current())
        return event

    def hold(self, event: DeviceEvent) -> None:
        with device_errors():
            own_event(event).wait(self._current())

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> TorchEvent:
        stream, event = self._streams[lane], self.new_event()
        with device_errors(), self._here(), self._module.stream(stream):
            for one in after:
                own_event(one).wait(stream)
            work()
            event.event.record(stream)
        return event

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> TorchEvent:
        return self.launch(lane, after, lambda: self._copy(lane, copies))

    def new_ring(self, nbytes: int) -> Tensor:
        with device_errors():
            self._rings.append(torch.empty(nbytes, dtype=torch.uint8, device=self.device))
        return self._rings[-1]

    def pin(self, address: int, nbytes: int) -> None:
        raise DeviceRefused(
            f"kvhold does not know how to register host memory with {self.device.type}"
        )

    def unpin(self, address: int) -> None: ...

    def _copy(self, lane: Lane, copies: Copies) -> None:
        for host, device, nbytes in zip(
            copies.host.tolist(), copies.device.tolist(), copies.nbytes.tolist(), strict=True
        ):
            if nbytes:
                here, there = _host_bytes(host, nbytes), self._ring_bytes(device, nbytes)
                if lane is Lane.STORE:
                    here.copy_(there)
                else:
                    there.copy_(here)

    def _ring_bytes(self, address: int, nbytes: int) -> torch.Tensor:
        for ring in self._rings:
            if ring.data_ptr() <= address <= address + nbytes <= ring.data_ptr() + ring.numel():
                return ring[address - ring.data_ptr() :][:nbytes]
        raise AssertionError("a copy of device memory that is in no ring")

    def _current(self) -> Any:
        return self._module.current_stream()


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise torch's errors as DeviceError, and lack of device memory as CapacityError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(str(error).strip().splitlines()[0]) from error
    except RuntimeError as error:
        raise DeviceError(str(error).strip().splitlines()[0]) from error


def own_event(event: DeviceEvent) -> Any:
    assert isinstance(event, TorchEvent), "an event of another device"
    return event.event


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
