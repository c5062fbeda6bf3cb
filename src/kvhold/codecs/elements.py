"""A layer's bytes as elements that compiled code can work on: bits in unsigned integers, where their type wants them to lie.

A layer may begin at any address. Where that is none for its elements (a frame's payload is not aligned), they are copied once.
"""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
