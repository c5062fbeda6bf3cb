from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import FrameError
from kvhold.core.layout import CANONICAL, Layout

Elements: TypeAlias = npt.NDArray[Any]

RAW, CODED = 0, 1


def read_elements(data: memoryview, kind: str) -> Elements:
    """Return aligned elements [n], such as "<u2"; a copy only if needed."""
    found = np.frombuffer(data, kind)
    return found if found.flags.aligned else found.copy()


@contextmanager
def written_elements(out: memoryview, kind: str) -> Iterator[Elements]:
    """Yield aligned elements [n], copied to `out` after the block."""
    target = np.frombuffer(out, kind)
    if target.flags.aligned:
        yield target
    else:
        spare = np.empty_like(target)
        yield spare
        np.copyto(target, spare)


def is_quantisable(layout: Layout, group: int, dtypes: Container[str]) -> bool:
    """Never a state: later tokens depend on it."""
    place = layout.groups[group]
    return place.packing == CANONICAL and place.attention != "state" and place.dtype in dtypes


class Reader:
    """Reads an encoded layer from the front. Raises FrameError."""

    def __init__(self, data: memoryview, codec: str, layer: int) -> None:
        self._data = data
        self._at = 0
        self._name = f"{codec} layer {layer}"

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise self.wrong(f"needs {count} bytes at {self._at} of {len(self._data)}")
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self) -> memoryview:
        return self._data[self._at :]

    def end(self) -> None:
        if self._at != len(self._data):
            raise self.wrong(f"{len(self._data) - self._at} bytes too many")

    def wrong(self, what: str) -> FrameError:
        return FrameError("length", f"{self._name}: {what}")
