"""One folder of values on a local disk. Blocking.

    kvhold.lock               held by flock(2) while a process owns the folder; has its pid
    kvhold.identity           a random name; it stays the same wherever the folder is mounted
    new/<host>.<pid>.<n>.<r>  a file that is being written
    <hh>/<key>-<size>-<time>  a value; hh is a byte of the key

The size detects a torn file. The time makes names unique: a late removal never hits a newer file. A
file's mtime is its last use. No call may overlap `close`.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex
from threading import Lock
from typing import Self

from kvhold.core.cleanup import on_error
from kvhold.core.errors import TierUnavailable
from kvhold.core.keys import KEY_BYTES
from kvhold.tiers.files.faults import as_tier_error
from kvhold.tiers.files.names import shard_of, writer_of
from kvhold.tiers.files.pauses import with_pauses
from kvhold.tiers.files.tree import NEW, FileTree

_LOCK = "kvhold.lock"
_IDENTITY = "kvhold.identity"
_IDENTITY_BYTES = 16
_SHARD = re.compile(r"[0-9a-f]{2}")
_VALUE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})-(\d{{1,15}})-([0-9a-f]{{1,16}})")
_LATEST_NS = 2**63 - 1
_MOST_BYTES = (2**32 - 1) * 512


@dataclass(frozen=True)
class FoundValue:
    key: bytes
    name: str
    nbytes: int
    occupied_bytes: int
    written_ns: int
    used_ns: int


class FileLeft(OSError): ...


class Folder:
    def __init__(self, tree: FileTree, lock: int, identity: str) -> None:
        self.path = tree.path
        self.identity = identity
        self._tree = tree
        self._lock = lock
        self._removals: dict[str, int] = {}  # subfolder -> removals a power cut may undo
        self._counting = Lock()
        self.block_bytes = tree.state().f_frsize

    @classmethod
    def open(cls, path: str, *, direct: str, sync: bool, any_owner: bool = False) -> Self:
        """Raises TierUnavailable if another process owns it, TierDenied, TierError."""
        try:
            tree = FileTree.open(path, direct=direct, sync=sync, any_owner=any_owner)
            with on_error(tree.close):
                lock = _own(tree)
                with on_error(lambda: os.close(lock)):
                    return cls(tree, lock, _identity(tree))
        except OSError as error:
            raise as_tier_error(error, tier="disk", operation="open", where=path) from error

    @property
    def free_bytes(self) -> int:
        state = self._tree.state()
        return state.f_bavail * state.f_frsize

    def is_in_place(self) -> bool:
        return self._tree.is_in_place()

    def try_to_write(self) -> None:
        self._tree.try_to_write()

    def batches(self) -> Iterator[list[FoundValue]]:
        """A batch per subfolder. Removes temporary and torn files."""
        for name in self._tree.names(NEW):
            if writer_of(name) is not None:
                self.remove(f"{NEW}/{name}")
        for shard in sorted(self._tree.names(".")):
            if _SHARD.fullmatch(shard):
                self._count_removal(shard)
                yield list(self._whole_values(shard))

    def write(
        self, name: str, pieces: Sequence[memoryview], *, stamp_ns: int, reuse: str | None
    ) -> int:
        """The whole file or nothing. Return its occupied bytes.

        Raises OSError; FileLeft if the file may exist.

        reuse: a file of equal size to overwrite and rename; twice as fast as a new one
        """
        temporary, state = self._tree.write_new(
            pieces, allocate=True, used_ns=stamp_ns, reuse=reuse
        )
        try:
            self._tree.rename(temporary, name)
        except OSError as error:
            try:
                self.remove(temporary)
                self.remove(name)
            except OSError:
                raise FileLeft(error.errno, error.strerror) from error
            raise
        finally:
            if reuse is not None:
                self._count_removal(shard_in(reuse))
        return self._occupied_bytes(state)

    def read(
        self, name: str, pieces: Sequence[memoryview], *, at: int | None, size: int, stamp_ns: int
    ) -> int | None:
        """None: missing, or of another size. Raises OSError."""
        return self._tree.read(name, pieces, at=at, size=size, used_ns=stamp_ns)

    def remove(self, name: str) -> None:
        if self._tree.remove(name):
            self._count_removal(shard_in(name))

    @property
    def unsynced(self) -> list[str]:
        with self._counting:
            return list(self._removals)

    def sync_removals(self, shard: str) -> None:
        with self._counting:
            number = self._removals.get(shard)
        self._tree.sync_folder(shard)
        with self._counting:
            if self._removals.get(shard) == number:
                self._removals.pop(shard, None)

    def close(self) -> None:
        os.close(self._lock)
        self._tree.close()

    def _count_removal(self, shard: str) -> None:
        if shard != NEW:
            with self._counting:
                self._removals[shard] = self._removals.get(shard, 0) + 1

    def _whole_values(self, shard: str) -> Iterator[FoundValue]:
        for base in with_pauses(self._tree.names(shard)):
            match, name = _VALUE.fullmatch(base), f"{shard}/{base}"
            if match is None or shard_of(key := bytes.fromhex(match[1])) != shard:
                continue
            if int(match[3], 16) > _LATEST_NS or int(match[2]) > _MOST_BYTES:
                continue
            state = self._tree.stat_file(name)
            if state is None:
                continue
            if state.st_size != int(match[2]):
                self.remove(name)
                continue
            yield FoundValue(
                key,
                name,
                state.st_size,
                self._occupied_bytes(state),
                int(match[3], 16),
                max(0, min(state.st_mtime_ns, _LATEST_NS)),
            )

    def _occupied_bytes(self, state: os.stat_result) -> int:
        """At least the size: some file systems count blocks late."""
        return max(state.st_blocks * 512, -(-state.st_size // self.block_bytes) * self.block_bytes)


def shard_in(name: str) -> str:
    return name.partition("/")[0]


def value_name(key: bytes, nbytes: int, stamp_ns: int) -> str:
    return f"{shard_of(key)}/{key.hex()}-{nbytes}-{stamp_ns:x}"


def parts_of_name(name: str) -> tuple[bytes, int, int]:
    key, nbytes, stamp = name.rpartition("/")[2].split("-")
    return bytes.fromhex(key), int(nbytes), int(stamp, 16)


def _identity(tree: FileTree) -> str:
    file = tree.open_file(_IDENTITY, os.O_RDWR)
    try:
        identity = os.pread(file, 64, 0).decode(errors="replace").strip()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * _IDENTITY_BYTES}}}", identity):
            identity = token_hex(_IDENTITY_BYTES)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{identity}\n".encode(), 0)
            os.fsync(file)
            tree.sync_folder(".")
    finally:
        os.close(file)
    return identity


def _own(tree: FileTree) -> int:
    lock = tree.open_file(_LOCK, os.O_RDWR)
    with on_error(lambda: os.close(lock)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
            raise TierUnavailable(
                "disk",
                "open",
                f"{tree.path} belongs to process {owner}; give each process a folder of its own",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
