"""Bytes between a value's parts and one file, past the page cache where that pays.

    fill_file(fd, pieces, direct=True)                           # all of it, or OSError
    done = fill_parts(fd, pieces, nbytes, at=0, direct=True)     # less than nbytes: the file ended

O_DIRECT carries as many leading bytes as lie on whole pages of memory and file; what follows (a tail that is no whole page, parts that are
not aligned) goes through the page cache by the same descriptor, and so does everything where a file system has no O_DIRECT. Blocking,
for threads; the system calls release the GIL. It knows no names and no folders.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from errno import EINVAL, EIO, ENOSYS, EOPNOTSUPP

import numpy as np

from kvhold.tiers.base import Parts

PAGE_BYTES = 4096  # what O_DIRECT wants of addresses, lengths and offsets, on every disk we know of
LEAST_DIRECT_BYTES = 128 << 10  # below it the page cache is faster, both ways

_MOST_PIECES = 1024  # IOV_MAX
_UNSUPPORTED = frozenset({EINVAL, EOPNOTSUPP, ENOSYS})


def as_pieces(parts: Parts) -> list[memoryview]:
    """The parts as flat bytes, less the empty ones."""
    return [part.cast("B") for part in parts if part.nbytes]


def direct_bytes(pieces: Sequence[memoryview], nbytes: int, at: int) -> int:
    """How many of the first `nbytes` may go by O_DIRECT to or from file offset `at`: 0, or enough of them to be worth it."""
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
    """Write all pieces from the file's start on. Raises OSError if it cannot write them all."""
    nbytes = sum(piece.nbytes for piece in pieces)
    done = _transfer(os.pwritev, fd, pieces, nbytes, at=0, direct=direct)
    if done != nbytes:
        raise OSError(EIO, f"wrote {done} of {nbytes} bytes")


def fill_parts(fd: int, pieces: Sequence[memoryview], nbytes: int, *, at: int, direct: bool) -> int:
    """Read `nbytes` from offset `at` on into the first of the pieces. Returns how many there were; nothing is written beyond them."""
    return _transfer(os.preadv, fd, pieces, nbytes, at=at, direct=direct)


def preallocate(fd: int, nbytes: int) -> None:
    """Take the space now, so that a full disk is told before anything is written, and in few extents. No-op where it is not known."""
    if nbytes:
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise


def set_direct(fd: int, on: bool) -> bool:
    """Whether a file, from now on, is read and written past the page cache."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if not on or error.errno not in _UNSUPPORTED:
            raise
        return False
    return on


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, pieces: Sequence[memoryview], nbytes: int, *, at: int, direct: bool
) -> int:
    """`preadv` or `pwritev` until `nbytes` are through or the file ends."""
    limit = direct_bytes(pieces, nbytes, at) if direct else 0
    is_direct = limit > 0 and set_direct(fd, True)
    done = 0
    while done < nbytes:
        if is_direct and (done >= limit or done % PAGE_BYTES):  # the second after a short transfer
            is_direct = set_direct(fd, False)
        batch = _cut(pieces, done, limit if is_direct else nbytes)
        try:
            moved = call(fd, batch, at + done)
        except OSError as error:
            if not is_direct or error.errno != EINVAL:
                raise
            limit = 0  # this file system wants other alignments
            continue
        if moved == 0:
            break
        done += moved
    return done


def _cut(pieces: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """The bytes from `start` to `stop` of all pieces, or as many as one call takes."""
    cut, at = [], 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.nbytes)
        if first < last:
            cut.append(piece[first:last])
        at += piece.nbytes
        if at >= stop or len(cut) == _MOST_PIECES:
            break
    return cut
