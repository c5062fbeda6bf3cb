"""One folder of kvhold: temporary files in `new/`, complete files elsewhere.

Names are relative to the folder's descriptor, and no link below it is followed. Every call blocks,
and raises OSError. None may overlap `close`.
"""

import ctypes
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from errno import EINVAL, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Self

from kvhold.core.cleanup import on_error
from kvhold.tiers.files.names import temporary_name
from kvhold.tiers.files.pauses import with_pauses
from kvhold.tiers.files.safe import FOLDER, open_folder, open_own_file
from kvhold.tiers.files.transfer import fill_file, fill_parts, preallocate, set_direct

NEW = "new"

_RENAME_EXCHANGE = 2
# O_NONBLOCK: opening a named pipe must not block
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FileTree:
    def __init__(self, path: str, root: int, *, direct: bool, sync: bool, any_owner: bool) -> None:
        self.path = path
        self._root = root
        self._any_owner = any_owner
        self._direct = direct
        self._sync = sync
        self._renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)

    @classmethod
    def open(cls, path: str, *, direct: str, sync: bool, any_owner: bool = False) -> Self:
        """Make a missing folder. Raises `Unsafe` (`safe.py`).

        direct:    `always` raises EOPNOTSUPP if there is no O_DIRECT; `auto` works without it
        any_owner: others may own the folder or write to it
        """
        root = open_folder(path, any_owner=any_owner)
        tree = cls(path, root, direct=direct != "never", sync=sync, any_owner=any_owner)
        with on_error(tree.close):
            if direct == "always" and not tree._has_direct():
                raise OSError(EOPNOTSUPP, "its file system has no O_DIRECT; use direct=auto")
        return tree

    def is_in_place(self) -> bool:
        try:
            mine, there = os.fstat(self._root), Path(self.path).stat()
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def state(self) -> os.statvfs_result:
        return os.fstatvfs(self._root)

    def names(self, folder: str) -> list[str]:
        try:
            fd = os.open(folder, FOLDER | os.O_NOFOLLOW, dir_fd=self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in with_pauses(entries)]
        finally:
            os.close(fd)

    def stat_file(self, name: str) -> os.stat_result | None:
        try:
            state = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return state if stat.S_ISREG(state.st_mode) else None

    def open_file(self, name: str, flags: int) -> int:
        """Raises `Unsafe` unless it is a regular file of this user."""
        shown = f"{self.path}/{name}"
        return open_own_file(
            name, flags | os.O_CREAT, dir_fd=self._root, shown=shown, any_owner=self._any_owner
        )

    def try_to_write(self) -> None:
        temporary, fd = self._create()
        os.close(fd)
        self.remove(temporary)

    def write_new(
        self,
        pieces: Sequence[memoryview],
        *,
        allocate: bool,
        used_ns: int | None = None,
        reuse: str | None = None,
    ) -> tuple[str, os.stat_result]:
        """The file's name and state.

        allocate: preallocate; not on network file systems, where libc writes to each block
        used_ns:  the file's mtime
        reuse:    a file to rename and overwrite
        """
        temporary, fd = self._create(reuse)
        try:
            try:
                nbytes = sum(piece.nbytes for piece in pieces)
                if reuse is not None:
                    os.ftruncate(fd, nbytes)
                if allocate:
                    preallocate(fd, nbytes)
                fill_file(fd, pieces, direct=self._direct)
                if used_ns is not None:
                    os.utime(fd, ns=(used_ns, used_ns))
                if self._sync:
                    os.fsync(fd)
                return temporary, os.fstat(fd)
            finally:
                os.close(fd)  # network file systems may report failed writes here
        except OSError:
            with suppress(OSError):
                self.remove(temporary)
            raise

    def rename(self, old: str, new: str) -> None:
        """Replaces any file named `new`, and makes a missing folder."""
        try:
            os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)
        except FileNotFoundError:
            self._make_folder(new.rpartition("/")[0])
            os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)
        self._sync_folder(new.rpartition("/")[0])

    def exchange(self, one: str, other: str) -> None:
        """Raises FileNotFoundError: one is missing; EOPNOTSUPP: impossible."""
        if self._renameat2 is None or self._renameat2(
            self._root, one.encode(), self._root, other.encode(), _RENAME_EXCHANGE
        ):
            code = ENOSYS if self._renameat2 is None else ctypes.get_errno()
            if code in (ENOSYS, EINVAL, EOPNOTSUPP):
                raise OSError(
                    EOPNOTSUPP,
                    "this file system cannot exchange two files, so no value in it can be replaced",
                )
            raise OSError(code, os.strerror(code), other)
        for name in (one, other):
            self._sync_folder(name.rpartition("/")[0])

    def link(self, old: str, new: str) -> None:
        """Raises FileExistsError if `new` exists, OSError if links do not work."""
        try:
            os.link(old, new, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            self._make_folder(new.rpartition("/")[0])
            os.link(old, new, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        self._sync_folder(new.rpartition("/")[0])

    def read(
        self,
        name: str,
        pieces: Sequence[memoryview],
        *,
        at: int | None,
        size: int | None = None,
        used_ns: int | None = None,
    ) -> int | None:
        """Read the whole file, or fill the pieces from offset `at`. Returns the bytes.

        None: missing, not of `size` (if given), too large or too short.
        """
        try:
            fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=self._root)
        except FileNotFoundError:
            return None
        try:
            state, room = os.fstat(fd), sum(piece.nbytes for piece in pieces)
            start, nbytes = (0, state.st_size) if at is None else (at, room)
            if not stat.S_ISREG(state.st_mode) or (size is not None and state.st_size != size):
                return None
            if nbytes > room or start < 0 or start + nbytes > state.st_size:
                return None
            if fill_parts(fd, pieces, nbytes, at=start, direct=self._direct) != nbytes:
                return None
            if used_ns is not None:
                with suppress(OSError):
                    os.utime(fd, ns=(used_ns, used_ns))
            return nbytes
        finally:
            os.close(fd)

    def remove(self, name: str) -> bool:
        """A power cut may bring the file back until `sync_folder`."""
        try:
            os.unlink(name, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def sync_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fsync(name)

    def close(self) -> None:
        os.close(self._root)

    def _create(self, reuse: str | None = None) -> tuple[str, int]:
        temporary = f"{NEW}/{temporary_name()}"
        if reuse is not None:
            with suppress(FileNotFoundError):
                self.rename(reuse, temporary)
                return temporary, self._open_renamed(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        try:
            return temporary, os.open(temporary, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            self._make_folder(NEW)
            return temporary, os.open(temporary, flags, 0o600, dir_fd=self._root)

    def _open_renamed(self, temporary: str) -> int:
        try:
            return os.open(temporary, os.O_WRONLY | _FILE, dir_fd=self._root)
        except OSError:
            self.remove(temporary)
            raise

    def _has_direct(self) -> bool:
        temporary, fd = self._create()
        try:
            return set_direct(fd, True)
        finally:
            os.close(fd)
            self.remove(temporary)

    def _make_folder(self, name: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(name, mode=0o700, dir_fd=self._root)
            fd = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=self._root)
            try:
                os.fchmod(fd, 0o700)
            finally:
                os.close(fd)
            self._sync_folder(".")

    def _sync_folder(self, name: str) -> None:
        if self._sync:
            self._fsync(name)

    def _fsync(self, name: str) -> None:
        fd = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=self._root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
