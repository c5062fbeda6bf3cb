from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import Elements
from kvhold.codecs.quantised import LayerShape, Quantised, read_scales
from kvhold.kernels import numba_quantise as quantise
from kvhold.kernels.numba_floats import LEAST_NORMAL

BY_CHANNEL, BY_HEAD = 1, 2
# with fewer tokens, scales by channel add more than 1/8 byte per element
TOKENS_FOR_CHANNELS = 32


class FP8(Quantised):
    """e4m3 (OCP; torch.float8_e4m3fn), scaled so that a channel's largest magnitude becomes 448
    (docs/codecs.md).
    """

    name: ClassVar[str] = "fp8"
    error_bound: ClassVar[float] = 0.04  # 1/28 + 1/256

    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        largest = quantise.column_largest(elements, place.dtype, place.planes, place.width)
        form, scales = BY_CHANNEL, largest
        if place.tokens < TOKENS_FOR_CHANNELS:
            form, scales = (
                BY_HEAD,
                largest.reshape(place.planes * place.heads, place.head_dim).max(axis=1),
            )
            largest = np.repeat(scales, place.head_dim).reshape(largest.shape)
        end = 1 + 4 * scales.size + elements.size
        most = float(largest.max())
        if end > place.nbytes or not np.isfinite(most) or 0 < most < LEAST_NORMAL[place.dtype]:
            return None
        quantise.fp8_encode(
            elements, place.dtype, largest, np.frombuffer(out, np.uint8)[end - elements.size : end]
        )
        out[0] = form
        np.frombuffer(out[1 : 1 + 4 * scales.size], "<f4")[:] = scales.reshape(-1)
        return end

    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        form = encoded[0]
        scales = place.planes * place.heads * (place.head_dim if form == BY_CHANNEL else 1)
        if form not in (BY_CHANNEL, BY_HEAD) or len(encoded) != 1 + 4 * scales + target.size:
            raise place.wrong(f"{len(encoded)} bytes of the form {form}")
        largest = read_scales(encoded[1 : 1 + 4 * scales], place)
        if form == BY_HEAD:
            largest = np.repeat(largest, place.head_dim)
        codes = np.frombuffer(encoded[1 + 4 * scales :], np.uint8)
        quantise.fp8_decode(codes, largest.reshape(place.planes, -1), place.dtype, target)
