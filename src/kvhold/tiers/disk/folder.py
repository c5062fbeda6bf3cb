"""One folder of values on a local disk: their names, and the lock that makes it ours. Blocking; every call is for a thread.

    folder = Folder.open("/var/cache/kvhold", direct="auto", sync=False)     # TierUnavailable names who owns it
    for found in folder.batches(): ...                                       # what is there; torn and temporary files are removed
    folder.write(name, pieces, stamp_ns=..., reuse=None); folder.read(...); folder.remove(name)

    kvhold.lock               held by flock(2) while somebody owns the folder; says who
    new/<host>.<pid>.<n>.<r>  being written
    <hh>/<key>-<size>-<time>  a value; hh is a byte of the key. The size tells a torn file, the time makes each writing a name of its own,
                              so that no removal of an old file can meet a new one; mtime is when it was used last

A value is written under a temporary name and renamed when it is whole. Files and folders that are not ours are left alone and not counted.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from kvhold.core.errors import TierUnavailable
from kvhold.core.keys import KEY_BYTES
from kvhold.tiers.files.faults import as_tier_error
from kvhold.tiers.files.names import shard_of, writer_of
from kvhold.tiers.files.tree import NEW, FileTree

_LOCK = "kvhold.lock"
_SHARD = re.compile(r"[0-9a-f]{2}")
_VALUE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-(\d{{1,15}})-([0-9a-f]{{1,16}})")


@dataclass(frozen=True)
class FoundValue:
    """A whole value's file. Times are in nanoseconds since 1970."""

    key: bytes
    name: str
    nbytes: int
    occupied_bytes: int
    written_ns: int
    used_ns: int


class Folder:
    """Made by `open`, ended by `close`; no call may be running then."""

    def __init__(self, tree: FileTree, lock: int) -> None:
        self.path = tree.path
        self._tree = tree
        self._lock = lock
        self.block_bytes = tree.state().f_frsize

    @classmethod
    def open(cls, path: str, *, direct: str, sync: bool, any_owner: bool = False) -> Self:
        """Make it ours, and make it if it is not there. Raises TierUnavailable, TierDenied or TierError."""
        try:
            tree = FileTree.open(path, direct=direct, sync=sync, any_owner=any_owner)
            try:
                return cls(tree, _own(tree))
            except BaseException:
                tree.close()
                raise
        except OSError as error:
            raise as_tier_error(error, tier="disk", operation="open", where=path) from error

    @property
    def free_bytes(self) -> int:
        """What the file system still has for us."""
        state = self._tree.state()
        return state.f_bavail * state.f_frsize

    def is_in_place(self) -> bool:
        """Whether the folder is still what its path names."""
        return self._tree.is_in_place()

    def try_to_write(self) -> None:
        """Raise OSError if no file can be made here."""
        self._tree.try_to_write()

    def batches(self) -> Iterator[list[FoundValue]]:
        """Every whole value, by the folder that it is in. Temporary and torn files are removed; two files of one key are in one batch."""
        for name in self._tree.names(NEW):
            if writer_of(name) is not None:
                self.remove(f"{NEW}/{name}")
        for shard in sorted(self._tree.names(".")):
            if _SHARD.fullmatch(shard):
                yield list(self._whole_values(shard))

    def write(self, name: str, pieces: Sequence[memoryview], *, stamp_ns: int, reuse: str | None) -> int:
        """Make the file `name` of all pieces, whole or not at all, and return what it occupies. Raises OSError.

        reuse: a file nobody needs any more, written over and renamed; where the size fits, that is twice as fast as removing it and
               making another
        """
        temporary, state = self._tree.write_new(pieces, allocate=True, used_ns=stamp_ns, reuse=reuse)
        try:
            self._tree.rename(temporary, name)
        except OSError:
            self.remove(temporary)
            raise
        return self._occupied_bytes(state)

    def read(self, name: str, pieces: Sequence[memoryview], *, at: int | None, size: int, stamp_ns: int) -> int | None:
        """Fill the pieces from the file `name` of `size` bytes; None if it is not there, or not whole. Raises OSError."""
        return self._tree.read(name, pieces, at=at, size=size, used_ns=stamp_ns)

    def remove(self, name: str) -> None:
        """Remove a file; harmless if it has gone already. Raises OSError."""
        self._tree.remove(name)

    def close(self) -> None:
        """Let others have it. Once."""
        os.close(self._lock)
        self._tree.close()

    def _whole_values(self, shard: str) -> Iterator[FoundValue]:
        for base in self._tree.names(shard):
            match, name = _VALUE.fullmatch(base), f"{shard}/{base}"
            if match is None or shard_of(key := bytes.fromhex(match[1])) != shard:
                continue
            state = self._tree.stat_file(name)
            if state is None:
                continue
            if state.st_size != int(match[2]):
                self.remove(name)
                continue
            yield FoundValue(key, name, state.st_size, self._occupied_bytes(state), int(match[3], 16), state.st_mtime_ns)

    def _occupied_bytes(self, state: os.stat_result) -> int:
        """What a file takes from its file system; the rounded size where that counts lazily."""
        return max(state.st_blocks * 512, -(-state.st_size // self.block_bytes) * self.block_bytes)


def value_name(key: bytes, nbytes: int, stamp_ns: int) -> str:
    """Where a value of `key` is written that begins at `stamp_ns`."""
    return f"{shard_of(key)}/{key.hex()}-{nbytes}-{stamp_ns:x}"


def _own(tree: FileTree) -> int:
    lock = tree.open_file(_LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise TierUnavailable("disk", "open", f"{tree.path} belongs to process {owner}; give each process a folder of its own") from None
    except BaseException:
        os.close(lock)
        raise
    return lock
