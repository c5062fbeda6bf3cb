"""A byte an element: of each token and head, each run of 128 channels has a scale of its own.

The bytes are in docs/format.md ("int8"), the arithmetic in kernels/numba_quantise.py. What is large in one token or head costs no other its
precision. Latent KV (MLA), a single wide head, is several runs, so that its rotated part has a scale of its own.
"""

from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import CODED, RAW, is_quantisable, read_elements, written_elements
from kvhold.codecs.raw import copy
from kvhold.core.errors import FrameError
from kvhold.core.layout import DTYPE_BYTES, Layout
from kvhold.kernels import numba_quantise as quantise

RUN = 128


class Int8:
    """Symmetric, by the largest magnitude of each run, which is kept in float32.

    The bound holds for each run by itself: |decoded - original| is at most 1/254 of the largest in the run (half a step) and half a unit
    in the last place of the dtype, together at most 1/127 of it. The largest come back as they were, zeros too, and nothing becomes
    infinite. A layer in which something is infinite or NaN, or that would not become smaller, is stored as it is.
    """

    name: ClassVar[str] = "int8"
    lossless: ClassVar[bool] = False
    error_bound: ClassVar[float] = 1 / 127

    def accepts(self, layout: Layout, group: int) -> bool:
        """bfloat16, float16 and float32 in the canonical packing; no state."""
        return is_quantisable(layout, group, quantise.KINDS)

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        """A layer's own size, and a byte."""
        return 1 + layout.groups[group].layer_bytes(num_tokens)

    def encode(self, plain: memoryview, out: memoryview, *, layout: Layout, group: int, layer: int, num_tokens: int) -> int:
        """Scales, then codes."""
        place = layout.groups[group]
        elements = read_elements(plain, f"<u{DTYPE_BYTES[place.dtype]}")
        scales = elements.size // place.head_dim * -(-place.head_dim // RUN)
        end = 1 + 4 * scales + elements.size
        if end > len(plain) or not quantise.all_finite(elements, place.dtype):
            out[0] = RAW
            copy(plain, out[1 : 1 + len(plain)])
            return 1 + len(plain)
        largest = np.empty(scales, np.float32)
        codes = np.frombuffer(out, np.int8)[1 + 4 * scales : end]
        quantise.int8_encode(elements, place.dtype, place.head_dim, RUN, codes, largest)
        out[0] = CODED
        np.frombuffer(out[1 : 1 + 4 * scales], "<f4")[:] = largest
        return end

    def decode(self, encoded: memoryview, out: memoryview, *, layout: Layout, group: int, layer: int, num_tokens: int) -> None:
        """Raises FrameError for a wrong length, and for scales that are negative or not finite."""
        place = layout.groups[group]
        form = encoded[0] if len(encoded) else None
        if form == RAW and len(encoded) == 1 + len(out):
            copy(encoded[1:], out)
            return
        elements = len(out) // DTYPE_BYTES[place.dtype]
        scales = elements // place.head_dim * -(-place.head_dim // RUN)
        if form != CODED or len(encoded) != 1 + 4 * scales + elements:
            raise FrameError("length", f"int8 layer {layer} is {len(encoded)} bytes of the form {form}")
        largest = read_scales(encoded[1 : 1 + 4 * scales], self.name, layer)
        codes = np.frombuffer(encoded[1 + 4 * scales :], np.int8)
        with written_elements(out, f"<u{DTYPE_BYTES[place.dtype]}") as target:
            quantise.int8_decode(codes, largest, place.dtype, place.head_dim, RUN, target)


def read_scales(data: memoryview, codec: str, layer: int) -> quantise.Floats:
    """float32 [n]. Raises FrameError if one is negative or not finite."""
    scales: quantise.Floats = read_elements(data, "<f4")
    if not (scales >= 0).all() or not np.isfinite(scales).all():
        raise FrameError("length", f"{codec} layer {layer} has a scale that is negative or not finite")
    return scales
