from typing import ClassVar

import numpy as np

from kvhold.codecs.frame import RAW
from kvhold.core.errors import FrameError
from kvhold.core.layout import Layout


class Raw:
    name: ClassVar[str] = RAW
    lossless: ClassVar[bool] = True
    error_bound: ClassVar[float] = 0.0

    def accepts(self, layout: Layout, group: int) -> bool:
        return True

    def max_size(self, layout: Layout, group: int, num_tokens: int) -> int:
        return layout.groups[group].layer_bytes(num_tokens)

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
        copy(plain, out[: len(plain)])
        return len(plain)

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
        """Raises FrameError if the lengths differ."""
        if len(encoded) != len(out):
            raise FrameError("length", f"raw layer {layer} is {len(encoded)} bytes of {len(out)}")
        copy(encoded, out)


def copy(source: memoryview, target: memoryview) -> None:
    """Releases the GIL, unlike an assignment to a memoryview."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
