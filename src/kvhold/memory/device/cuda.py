"""A `DeviceDriver` for NVIDIA GPUs. Needs cuda-bindings.

Streams and events are torch's, shared with the engine. A failed registration leaves no error
behind.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver as cuda

from kvhold.core.errors import DeviceError, DeviceRefused
from kvhold.kernels.view import Int64s
from kvhold.memory.device.driver import Copies, DeviceEvent, Lane
from kvhold.memory.device.streams import TorchDriver, TorchEvent, device_errors, own_event

_REFUSALS = (
    cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED,
    cuda.CUresult.CUDA_ERROR_NOT_PERMITTED,
    cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
)
_MOST_PIECES = 4096
_CYCLES_A_SECOND = 2e9


class CudaDriver(TorchDriver):
    has_direct_copies = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._context = _checked(
            cuda.cuDevicePrimaryCtxRetain(_checked(cuda.cuDeviceGet(self._index)))
        )
        self._copy_batch = _find_copy_batch()
        self._attributes = cuda.CUmemcpyAttributes()
        self._attributes.srcAccessOrder = (
            cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        )
        self._attributes.flags = cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

    def new_stream(self, *, is_urgent: bool) -> Any:
        return torch.cuda.Stream(self.device, priority=-1 if is_urgent else 0)

    def new_event(self) -> TorchEvent:
        return TorchEvent(torch.cuda.Event(blocking=True))

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))

    def copy(self, lane: Lane, after: Sequence[DeviceEvent], copies: Copies) -> TorchEvent:
        """Avoids torch's stream context, which takes 0.1 ms."""
        stream, event = self._streams[lane], self.new_event()
        with device_errors(), self._here():
            for one in after:
                own_event(one).wait(stream)
            self._submit(lane, copies, cuda.CUstream(stream.cuda_stream))
            event.event.record(stream)
        return event

    def pin(self, address: int, nbytes: int) -> None:
        with self._here():
            self._enter()
            result = cuda.cuMemHostRegister(address, nbytes, cuda.CU_MEMHOSTREGISTER_PORTABLE)
        if result[0] in _REFUSALS:
            raise DeviceRefused(f"cuMemHostRegister: {_text(result[0])}")
        _checked(result)

    def unpin(self, address: int) -> None:
        with self._here():
            self._enter()
            _checked(cuda.cuMemHostUnregister(address))

    def _submit(self, lane: Lane, copies: Copies, stream: Any) -> None:
        self._enter()
        to, of = copies.host, copies.device
        if lane is not Lane.STORE:
            to, of = of, to
        if copies.pinned and to.size > 1 and self._copy_batch is not None:
            self._submit_batches(to, of, copies.nbytes, stream)
            return
        for one, other, nbytes in zip(
            to.tolist(), of.tolist(), copies.nbytes.tolist(), strict=True
        ):
            if nbytes:
                _checked(cuda.cuMemcpyAsync(one, other, nbytes, stream))

    def _submit_batches(self, to: Int64s, of: Int64s, nbytes: Int64s, stream: Any) -> None:
        assert self._copy_batch is not None
        kept = nbytes > 0
        if not kept.all():
            to, of, nbytes = to[kept], of[kept], nbytes[kept]
        first = ctypes.c_size_t(0)
        for begin in range(0, to.size, _MOST_PIECES):
            arrays = [
                np.ascontiguousarray(each[begin : begin + _MOST_PIECES])
                for each in (to, of, nbytes)
            ]
            code = self._copy_batch(
                *(array.ctypes.data for array in arrays),
                arrays[0].size,
                self._attributes.getPtr(),
                ctypes.addressof(first),
                1,
                int(stream),
            )
            if code:
                raise DeviceError(f"CUDA: cuMemcpyBatchAsync: error {code}")

    def _enter(self) -> None:
        """torch does not always make the device's context current. `_here` undoes it."""
        _checked(cuda.cuCtxSetCurrent(self._context))

    def _current(self) -> Any:
        return torch.cuda.current_stream(self.device)


def _find_copy_batch() -> Callable[..., int] | None:
    """cuMemcpyBatchAsync by its address: cuda-bindings is too slow. None: older than CUDA 13."""
    flags = cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    result = cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, int(flags))
    if result[0] != cuda.CUresult.CUDA_SUCCESS or not result[1]:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer
    )
    return kind(int(result[1]))


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA: {_text(result[0])}")
    return result[1] if len(result) > 1 else None


def _text(status: Any) -> str:
    said = cuda.cuGetErrorString(status)
    return said[1].decode() if len(said) > 1 and said[1] else str(status)
