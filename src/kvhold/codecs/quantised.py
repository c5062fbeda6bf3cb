"""The base class of codecs with a loss.

A layer's first byte is its form: RAW, or one of the codec's.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvhold.codecs.elements import RAW, Elements, is_quantisable, read_elements, written_elements
from kvhold.codecs.raw import copy
from kvhold.core.errors import FrameError
from kvhold.core.layout import DTYPE_BYTES, Layout
from kvhold.kernels.numba_floats import KINDS, Floats


@dataclass(frozen=True)
class LayerShape:
    """[planes, tokens, heads, head_dim] of `dtype`."""

    codec: str
    layer: int
    layers: int
    planes: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def nbytes(self) -> int:
        return self.planes * self.tokens * self.width * DTYPE_BYTES[self.dtype]

    @property
    def kind(self) -> str:
        return f"<u{DTYPE_BYTES[self.dtype]}"

    def wrong(self, what: str) -> FrameError:
        return FrameError("length", f"{self.codec} layer {self.layer}: {what}")


class Quantised(ABC):
    """For KV of tokens in bfloat16, float16 and float32. A layer is stored unchanged if an
    element is not finite, or if it would not shrink.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    error_bound: ClassVar[float]

    def accepts(self, layout: Layout, group: int) -> bool:
        return is_quantisable(layout, group, KINDS)

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        return 1 + layout.groups[group].layer_bytes(num_tokens)

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
        place = self._place(layout, group, layer, num_tokens)
        end = self._code(read_elements(plain, place.kind), place, out)
        if end is not None:
            return end
        out[0] = RAW
        copy(plain, out[1 : 1 + len(plain)])
        return 1 + len(plain)

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
        place = self._place(layout, group, layer, num_tokens)
        if not len(encoded):
            raise place.wrong("no bytes")
        if encoded[0] != RAW:
            with written_elements(out, place.kind) as target:
                self._restore(encoded, place, target)
        elif len(encoded) == 1 + len(out):
            copy(encoded[1:], out)
        else:
            raise place.wrong(f"{len(encoded)} bytes of the form {RAW}")

    @abstractmethod
    def _code(self, elements: Elements, place: LayerShape, out: memoryview) -> int | None:
        """Return the bytes, at most `place.nbytes`. None: store unchanged."""

    @abstractmethod
    def _restore(self, encoded: memoryview, place: LayerShape, target: Elements) -> None:
        """The form is not RAW; trust nothing else."""

    def _place(self, layout: Layout, group: int, layer: int, num_tokens: int) -> LayerShape:
        found = layout.groups[group]
        return LayerShape(
            self.name,
            layer,
            found.layers,
            found.planes,
            num_tokens,
            found.heads,
            found.head_dim,
            found.dtype,
        )


def read_scales(data: memoryview, place: LayerShape) -> Floats:
    """float32 [n]. Raises FrameError if one is negative or not finite."""
    scales: Floats = read_elements(data, "<f4")
    if not (scales >= 0).all() or not np.isfinite(scales).all():
        raise place.wrong("a scale that is negative or not finite")
    return scales
