"""Compile arithmetic for fixed types, at import, without the GIL. Any thread."""

from typing import Any

from numba import njit, types


def readonly(kind: Any, axes: int = 1) -> Any:
    """Writable arrays match, too."""
    return types.Array(kind, axes, "C", readonly=True)


def compiled(*signatures: Any) -> Any:
    def decorate(source: Any) -> Any:
        try:
            return njit(list(signatures), nogil=True, cache=True)(source)
        except (RuntimeError, OSError):
            return njit(list(signatures), nogil=True)(source)

    return decorate
