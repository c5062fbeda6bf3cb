"""What the Triton kernels of the codecs' arithmetic ask of their arguments before a launch."""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor


def check(interpreted: bool, first: Tensor, *others: Tensor | None) -> None:
    """All in one place, and contiguous, as kernels are given no strides. Sizes are below 2**31, as they count in 32 bits."""
    if first.device.type == "cpu" and not interpreted:
        raise ValueError("the triton kernels take tensors in host memory only under TRITON_INTERPRET=1")
    for tensor in (first, *others):
        assert tensor is None or (tensor.device == first.device and tensor.is_contiguous() and tensor.numel() < 1 << 31)


def on_device(tensor: Tensor) -> AbstractContextManager[None]:
    """A launch goes to the current device: make it the tensor's."""
    return nullcontext() if tensor.device.type == "cpu" else torch.cuda.device(tensor.device)
