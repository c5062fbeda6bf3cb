"""How the arithmetic of codecs is compiled: for stated types, at import, from numba's cache where
there is one, without the GIL.
"""

from typing import Any

from numba import njit, types


def readonly(kind: Any, axes: int = 1) -> Any:
    """The type of a contiguous array that is only read; writable ones fit as well."""
    return types.Array(kind, axes, "C", readonly=True)


def compiled(*signatures: Any) -> Any:
    """A decorator: the first call is as fast as the second."""

    def decorate(source: Any) -> Any:
        try:
            return njit(list(signatures), nogil=True, cache=True)(source)
        except (RuntimeError, OSError):  # nowhere to keep the cache
            return njit(list(signatures), nogil=True)(source)

    return decorate
