"""Move bytes between a value's parts and a file, past the page cache where faster.

O_DIRECT moves the leading bytes that are page-aligned in memory and in the file.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from errno import EINVAL, EIO, ENOSYS, EOPNOTSUPP

import numpy as np

from kvhold.tiers.base import Parts

PAGE_BYTES = 4096
LEAST_DIRECT_BYTES = 128 << 10  # below this, the page cache is faster

_MOST_PIECES = 1024  # IOV_MAX
_UNSUPPORTED = frozenset({EINVAL, EOPNOTSUPP, ENOSYS})


def as_pieces(parts: Parts) -> list[memoryview]:
    return [part.cast("B") for part in parts if part.nbytes]


def direct_bytes(pieces: Sequence[memoryview], nbytes: int, at: int) -> int:
    """How many of the first `nbytes` can use O_DIRECT at file offset `at`.

    0 below LEAST_DIRECT_BYTES, or if less than half are aligned.
    """
    if at % PAGE_BYTES or nbytes < LEAST_DIRECT_BYTES:
        return 0
    total = 0
    for piece in pieces:
        if np.frombuffer(piece, np.uint8).ctypes.data % PAGE_BYTES:
            break
        total += piece.nbytes
        if total % PAGE_BYTES:
            break
    total = min(total, nbytes) // PAGE_BYTES * PAGE_BYTES
    return total if 2 * total >= nbytes else 0


def fill_file(fd: int, pieces: Sequence[memoryview], *, direct: bool) -> None:
    nbytes = sum(piece.nbytes for piece in pieces)
    done = _transfer(os.pwritev, fd, pieces, nbytes, at=0, direct=direct)
    if done != nbytes:
        raise OSError(EIO, f"wrote {done} of {nbytes} bytes")


def fill_parts(fd: int, pieces: Sequence[memoryview], nbytes: int, *, at: int, direct: bool) -> int:
    return _transfer(os.preadv, fd, pieces, nbytes, at=at, direct=direct)


def preallocate(fd: int, nbytes: int) -> None:
    """A full disk fails before any write."""
    if nbytes:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise


def set_direct(fd: int, on: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if not on or error.errno not in _UNSUPPORTED:
            raise
        return False
    return on


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    pieces: Sequence[memoryview],
    nbytes: int,
    *,
    at: int,
    direct: bool,
) -> int:
    limit = direct_bytes(pieces, nbytes, at) if direct else 0
    is_direct = limit > 0 and set_direct(fd, True)
    done = 0
    while done < nbytes:
        if is_direct and (done >= limit or done % PAGE_BYTES):
            is_direct = set_direct(fd, False)
        batch = _cut(pieces, done, limit if is_direct else nbytes)
        try:
            moved = call(fd, batch, at + done)
        except OSError as error:
            if not is_direct or error.errno != EINVAL:
                raise
            limit = 0
            continue
        if moved == 0:
            break
        done += moved
    return done


def _cut(pieces: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    cut, at = [], 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.nbytes)
        if first < last:
            cut.append(piece[first:last])
        at += piece.nbytes
        if at >= stop or len(cut) == _MOST_PIECES:
            break
    return cut
