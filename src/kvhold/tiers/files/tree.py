"""One folder of ours: temporary files in `new/`, whole ones elsewhere, all named relative to a descriptor of the folder.

    tree = FileTree.open(path, direct="auto", sync=False)                       # OSError
    temporary = tree.write_new(pieces, nbytes, ...); tree.rename(temporary, "3f/name")
    tree.read("3f/name", pieces, at=None, size=None); tree.remove("3f/name"); tree.close()

Blocking; every call is for a thread, and raises OSError. Nothing follows a symbolic link below the folder. The folder must be safe
(`safe.py`), unless it is said that it may be anybody's.
"""

import ctypes
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from errno import EINVAL, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Self

from kvhold.tiers.files.names import temporary_name
from kvhold.tiers.files.safe import FOLDER, open_folder, open_own_file
from kvhold.tiers.files.transfer import fill_file, fill_parts, preallocate, set_direct

NEW = "new"  # the folder for temporary files

_RENAME_EXCHANGE = 2
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # the last so that a pipe of somebody's does not hold us


class FileTree:
    """Made by `open`, ended by `close`; no call may be running then."""

    def __init__(self, path: str, root: int, *, direct: bool, sync: bool, any_owner: bool) -> None:
        self.path = path
        self._root = root
        self._any_owner = any_owner
        self._direct = direct
        self._sync = sync
        self._renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Python has none

    @classmethod
    def open(cls, path: str, *, direct: str, sync: bool, any_owner: bool = False) -> Self:
        """The folder, made if it is not there. Raises `Unsafe` for one that others could change.

        direct:    `always` raises EOPNOTSUPP where there is no O_DIRECT; `auto` does without
        any_owner: the folder may belong to others, who may write to it
        """
        root = open_folder(path, any_owner=any_owner)
        tree = cls(path, root, direct=direct != "never", sync=sync, any_owner=any_owner)
        try:
            if direct == "always" and not tree._has_direct():
                raise OSError(EOPNOTSUPP, "its file system has no O_DIRECT; use direct=auto")
        except OSError:
            tree.close()
            raise
        return tree

    def is_in_place(self) -> bool:
        """Whether the folder is still what its path names; not if it was removed, or something was mounted over it."""
        try:
            mine, there = os.fstat(self._root), Path(self.path).stat()
        except OSError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def state(self) -> os.statvfs_result:
        """Of the file system."""
        return os.fstatvfs(self._root)

    def names(self, folder: str) -> list[str]:
        """What is in a folder below, or in `.`; nothing if it is not there."""
        try:
            fd = os.open(folder, FOLDER | os.O_NOFOLLOW, dir_fd=self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return os.listdir(fd)  # noqa: PTH208 - a pathlib.Path has no descriptor
        finally:
            os.close(fd)

    def stat_file(self, name: str) -> os.stat_result | None:
        """Of a regular file; None for anything else."""
        try:
            state = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return state if stat.S_ISREG(state.st_mode) else None

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a file right in the folder, made if it is not there. Raises `Unsafe` for anything but a file of ours."""
        shown = f"{self.path}/{name}"
        return open_own_file(name, flags | os.O_CREAT, dir_fd=self._root, shown=shown, any_owner=self._any_owner)

    def try_to_write(self) -> None:
        """Raise if no file can be made here."""
        temporary, fd = self._create()
        os.close(fd)
        self.remove(temporary)

    def write_new(
        self, pieces: Sequence[memoryview], *, allocate: bool, used_ns: int | None = None, reuse: str | None = None
    ) -> tuple[str, os.stat_result]:
        """A new temporary file of all pieces: its name and state. Nothing is left behind if that fails.

        allocate: take the space before writing. Not on network file systems, where the C library would write a byte to each block
        used_ns:  its mtime
        reuse:    a file nobody needs any more, which is renamed and written over
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
                os.close(fd)  # a network file system may tell here what it could not write
        except OSError:
            with suppress(OSError):  # the first one tells more; the next start tries again
                self.remove(temporary)
            raise

    def rename(self, old: str, new: str) -> None:
        """Whatever had the name `new` is gone. The folder of `new` is made if it is not there."""
        try:
            os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)
        except FileNotFoundError:
            self._make_folder(new.rpartition("/")[0])
            os.rename(old, new, src_dir_fd=self._root, dst_dir_fd=self._root)
        self._sync_folder(new.rpartition("/")[0])

    def exchange(self, one: str, other: str) -> None:
        """Each gets the other's name, in one step. Raises FileNotFoundError where one is not there, EOPNOTSUPP where it cannot be."""
        if self._renameat2 is None or self._renameat2(self._root, one.encode(), self._root, other.encode(), _RENAME_EXCHANGE):
            code = ENOSYS if self._renameat2 is None else ctypes.get_errno()
            if code in (ENOSYS, EINVAL, EOPNOTSUPP):
                raise OSError(EOPNOTSUPP, "this file system cannot exchange two files, so no value in it can be replaced")
            raise OSError(code, os.strerror(code), other)
        for name in (one, other):
            self._sync_folder(name.rpartition("/")[0])

    def link(self, old: str, new: str) -> None:
        """A second name for `old`. Raises FileExistsError rather than overwrite; OSError where links are not supported."""
        try:
            os.link(old, new, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            self._make_folder(new.rpartition("/")[0])
            os.link(old, new, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        self._sync_folder(new.rpartition("/")[0])

    def read(
        self, name: str, pieces: Sequence[memoryview], *, at: int | None, size: int | None = None, used_ns: int | None = None
    ) -> int | None:
        """Fill the pieces: with the whole file, or from offset `at` on to their end. Returns the number of bytes.

        None if there is no such file, if it is not of `size` where that is given, if it does not fit or ends too early.
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
                with suppress(OSError):  # only the order after a restart would suffer
                    os.utime(fd, ns=(used_ns, used_ns))
            return nbytes
        finally:
            os.close(fd)

    def remove(self, name: str) -> bool:
        """Remove a file; false if it has gone already."""
        try:
            os.unlink(name, dir_fd=self._root)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Once."""
        os.close(self._root)

    def _create(self, reuse: str | None = None) -> tuple[str, int]:
        temporary = f"{NEW}/{temporary_name()}"
        if reuse is not None:
            with suppress(FileNotFoundError):  # removed behind our back; then a new one
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
                os.fchmod(fd, 0o700)  # whatever the umask is
            finally:
                os.close(fd)
            self._sync_folder(".")

    def _sync_folder(self, name: str) -> None:
        if not self._sync:
            return
        fd = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=self._root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
