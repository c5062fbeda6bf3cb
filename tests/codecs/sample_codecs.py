"""Two honest codecs, one lossless and one lossy, and what a careless author might write: the
conformance suite must tell them apart.
"""

import zlib
from typing import Any, ClassVar

import numpy as np

from kvhold.codecs.frame import layer_shape
from kvhold.core.errors import FrameError
from kvhold.core.layout import CANONICAL, Layout
from kvhold.testing.values import as_float64, from_float64


class Deflate:
    """zlib, level 1."""

    name: ClassVar[str] = "test-deflate"
    lossless: ClassVar[bool] = True
    error_bound: ClassVar[float] = 0.0

    def accepts(self, layout: Layout, group: int) -> bool:
        return True

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        size = layout.groups[group].layer_bytes(num_tokens)
        return size + size // 1000 + 64

    def encode(
        self,
        plain: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> int:
        packed = zlib.compress(plain, 1)
        out[: len(packed)] = packed
        return len(packed)

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(encoded, len(out) + 1)
        except zlib.error as error:
            raise FrameError("length", f"layer {layer}: {error}") from error
        if len(plain) != len(out) or not stream.eof or stream.unused_data:
            raise FrameError("length", f"layer {layer} is not {len(out)} bytes, compressed")
        out[:] = plain


class Int8:
    """One scale a layer, then a byte an element.

    The scale is the largest finite magnitude; what is not finite becomes the extremes.
    """

    name: ClassVar[str] = "test-int8"
    lossless: ClassVar[bool] = False
    # half a step, and half a step of the coarsest dtype, with room
    error_bound: ClassVar[float] = 0.5 / 127 + 2**-3

    def accepts(self, layout: Layout, group: int) -> bool:
        return layout.groups[group].packing == CANONICAL

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        place = layout.groups[group]
        return 8 + place.planes * num_tokens * place.heads * place.head_dim

    def encode(
        self,
        plain: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> int:
        values = as_float64(plain, layout.groups[group].dtype)
        scale = np.abs(values[np.isfinite(values)]).max(initial=0.0)
        unit = np.nan_to_num(values, posinf=scale, neginf=-scale) / (scale or 1.0) * 127
        packed = np.array([scale], "<f8").tobytes() + np.rint(unit).astype(np.int8).tobytes()
        out[: len(packed)] = packed
        return len(packed)

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Layout,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        if len(encoded) != self.max_size(layout, group, num_tokens):
            raise FrameError("length", f"layer {layer} is {len(encoded)} bytes")
        scale = np.frombuffer(encoded[:8], "<f8")[0]
        if not np.isfinite(scale) or scale < 0:
            raise FrameError("length", f"layer {layer} has the scale {scale}")
        values = np.frombuffer(encoded[8:], np.int8) / 127 * scale
        out[:] = from_float64(values, layer_shape(layout, group, num_tokens)[0])


class Forgetful(Deflate):
    """Decodes into a buffer of its own, but for the last byte."""

    def decode(self, encoded: memoryview, out: memoryview, **place: Any) -> None:
        spare = bytearray(len(out))
        super().decode(encoded, memoryview(spare), **place)
        out[:-1] = spare[:-1]


class Greedy(Deflate):
    """Promises to need less than it does."""

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        return layout.groups[group].layer_bytes(num_tokens) // 8

    def encode(self, plain: memoryview, out: memoryview, **place: Any) -> int:
        return min(
            super().encode(plain, memoryview(bytearray(2 * len(plain) + 64)), **place), len(plain)
        )


class Boastful(Deflate):
    """Claims to have written more than there was room for."""

    def encode(self, plain: memoryview, out: memoryview, **place: Any) -> int:
        return len(out) + 1


class Numpyish(Deflate):
    """Lets a numpy scalar out."""

    def encode(self, plain: memoryview, out: memoryview, **place: Any) -> int:
        return np.int64(super().encode(plain, out, **place))  # type: ignore[return-value]


class Chained(Deflate):
    """Starts each layer with what the last one ended with."""

    def __init__(self) -> None:
        self.last = b"\0"

    def encode(self, plain: memoryview, out: memoryview, **place: Any) -> int:
        packed = self.last + zlib.compress(plain, 1)
        out[: len(packed)] = packed
        self.last = packed[-1:]
        return len(packed)

    def decode(self, encoded: memoryview, out: memoryview, **place: Any) -> None:
        super().decode(encoded[1:], out, **place)


class Trusting(Deflate):
    """Lets the library's own error through."""

    def decode(self, encoded: memoryview, out: memoryview, **place: Any) -> None:
        out[:] = zlib.decompress(encoded)


class Bomb(Deflate):
    """Believes a length that it finds in the bytes."""

    def decode(self, encoded: memoryview, out: memoryview, **place: Any) -> None:
        if encoded:
            np.ones(encoded[0] << 20, np.uint8)
        super().decode(encoded, out, **place)


class Overpromising(Int8):
    """An error bound that does not hold."""

    error_bound: ClassVar[float] = 1e-4


class Vain(Deflate):
    """A name that no frame can hold."""

    name: ClassVar[str] = "deflate with the best settings"
