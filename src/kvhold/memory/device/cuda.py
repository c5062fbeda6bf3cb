"""A `DeviceDriver` for NVIDIA GPUs. Needs cuda-bindings.

Streams and events are torch's, shared with the engine. Copies and registrations call the CUDA
driver: one call copies many pieces, and a failed registration leaves no error behind.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver as cuda

from kvhold.core.errors import DeviceError, DeviceRefused
from kvhold.memory.device.driver import Copies, DeviceEvent, Lane
from kvhold.memory.device.streams import TorchDriver, TorchEvent

_REFUSALS = (
    cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED,
    cuda.CUresult.CUDA_ERROR_NOT_PERMITTED,
    cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
)
_MOST_PIECES = 4096
_CYCLES_A_SECOND = 2e9


class CudaDriver(TorchDriver):
    """See `DeviceDriver`."""

    has_direct_copies = True

    def __init__(self, device: torch.device) -> None:
        """Raises DeviceError."""
        super().__init__(device)
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._context = _checked(
            cuda.cuDevicePrimaryCtxRetain(_checked(cuda.cuDeviceGet(self._index)))
        )
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = (
            cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        )
        self._attributes.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

    def new_stream(self, *, is_urgent: bool) -> Any:
        """Lower numbers are more urgent; the engine's own stream has 0."""
        return torch.cuda.Stream(self.device, priority=-1 if is_urgent else 0)

    def new_event(self) -> TorchEvent:
        """A waiting thread sleeps."""
        return TorchEvent(torch.cuda.Event(blocking=True))

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> TorchEvent:
        stream = self._streams[lane].cuda_stream
        return self.launch(lane, after, lambda: self._submit(lane, copies, cuda.CUstream(stream)))

    def pin(self, address: int, nbytes: int) -> None:
        self._enter()
        result = cuda.cuMemHostRegister(address, nbytes, cuda.CU_MEMHOSTREGISTER_PORTABLE)
        if result[0] in _REFUSALS:
            raise DeviceRefused(f"cuMemHostRegister: {_text(result[0])}")
        _checked(result)

    def unpin(self, address: int) -> None:
        self._enter()
        _checked(cuda.cuMemHostUnregister(address))

    def _submit(self, lane: Lane, copies: Copies, stream: Any) -> None:
        self._enter()
        kept = np.flatnonzero(copies.nbytes)
        host, device = (
            list(map(cuda.CUdeviceptr, each[kept].tolist()))
            for each in (copies.host, copies.device)
        )
        to, of = (host, device) if lane is Lane.STORE else (device, host)
        sizes = copies.nbytes[kept].tolist()
        if not copies.pinned or kept.size == 1:
            for one, other, nbytes in zip(to, of, sizes, strict=True):
                _checked(cuda.cuMemcpyAsync(one, other, nbytes, stream))
            return
        for begin in range(0, kept.size, _MOST_PIECES):
            some = slice(begin, begin + _MOST_PIECES)
            count = len(sizes[some])
            _checked(
                cuda.cuMemcpyBatchAsync(
                    to[some], of[some], sizes[some], count, [self._attributes], [0], 1, stream
                )
            )

    def _enter(self) -> None:
        """Make the device's context current: torch does not always."""
        _checked(cuda.cuCtxSetCurrent(self._context))

    def _current(self) -> Any:
        return torch.cuda.current_stream(self.device)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA: {_text(result[0])}")
    return result[1] if len(result) > 1 else None


def _text(status: Any) -> str:
    said = cuda.cuGetErrorString(status)
    return said[1].decode() if len(said) > 1 and said[1] else str(status)
