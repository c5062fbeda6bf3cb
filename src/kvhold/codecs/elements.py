"""A layer's bytes as elements that compiled code can work on: bits in unsigned integers, where their type wants them to lie.

A layer may begin at any address. Where that is none for its elements (a frame's payload is not aligned), they are copied once.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import FrameError
from kvhold.core.layout import CANONICAL, Layout

Elements: TypeAlias = npt.NDArray[Any]

RAW, CODED = 0, 1  # the first byte of an encoded layer of every codec but raw: its own bytes follow, or what the codec makes of them


def read_elements(data: memoryview, kind: str) -> Elements:
    """[n] of numpy type `kind`, such as "<u2", in aligned memory; `data` itself if possible."""
    found = np.frombuffer(data, kind)
    return found if found.flags.aligned else found.copy()


@contextmanager
def written_elements(out: memoryview, kind: str) -> Iterator[Elements]:
    """[n] to be filled; it is in `out` when the block ends."""
    target = np.frombuffer(out, kind)
    if target.flags.aligned:
        yield target
    else:
        spare = np.empty_like(target)
        yield spare
        np.copyto(target, spare)


def is_quantisable(layout: Layout, group: int, dtypes: Container[str]) -> bool:
    """Whether a codec with a loss may have it: KV of tokens (no state, which all that follows is computed from), in axes we know."""
    place = layout.groups[group]
    return place.packing == CANONICAL and place.attention != "state" and place.dtype in dtypes


class Reader:
    """Bytes of an encoded layer from the front, each read checked. Raises FrameError."""

    def __init__(self, data: memoryview, codec: str, layer: int) -> None:
        self._data = data
        self._at = 0
        self._name = f"{codec} layer {layer}"

    def byte(self) -> int:
        """The next one."""
        return self.take(1)[0]

    def take(self, count: int) -> memoryview:
        """The next `count`."""
        if count > len(self._data) - self._at:
            raise self.wrong(f"{count} bytes missing at {self._at} of {len(self._data)}")
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> memoryview:
        """All that is left, not taken."""
        return self._data[self._at :]

    def end(self) -> None:
        """There are no more."""
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes too many")

    def wrong(self, what: str) -> FrameError:
        """For bytes that no encoder wrote."""
        return FrameError("length", f"{self._name}: {what}")
