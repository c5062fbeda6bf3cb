"""Plain values to bytes, to hash them into names. Never stored.

Only equal values of equal types give the same bytes.
"""

from collections.abc import Sequence
from typing import TypeAlias, Union

Plain: TypeAlias = Union[bool, int, float, str, bytes, Sequence["Plain"], None]  # noqa: UP007


def canonical(value: Plain) -> bytes:
    """Encode as type tag, length (8 bytes, little-endian), content. A list equals a tuple."""
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"t" if value else b"f", b"")
    if isinstance(value, int):
        return _tagged(b"i", str(value).encode())
    if isinstance(value, float):
        return _tagged(b"d", value.hex().encode())
    if isinstance(value, str):
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return _tagged(b"b", value)
    if isinstance(value, (tuple, list)):
        return _tagged(b"l", b"".join(map(canonical, value)))
    raise TypeError(f"cannot name a {type(value).__name__}: {value!r}")


def _tagged(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content
