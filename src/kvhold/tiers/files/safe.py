"""Open folders and files that no other user can change.

A safe folder belongs to this user or root, and others can neither write there nor replace it, a
folder above or a link on the way. A safe file is a regular file of this user, with one name.
"""

import errno
import fcntl
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kvhold.core.cleanup import on_error

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MOST_LINKS = 40


class Unsafe(PermissionError):
    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return str(self.strerror)


def open_folder(path: str | os.PathLike[str], *, make: bool = True, any_owner: bool = False) -> int:
    """`path` is absolute.

    make:      make missing folders with mode 0700
    any_owner: skip the checks, for a folder of another user or a group
    """
    folder = os.open("/", FOLDER)
    parts = _parts(os.fspath(path))
    links, walked = 0, "/"
    with on_error(lambda: os.close(folder)):
        while parts:
            name = parts.pop()
            if not any_owner:
                _check_above(os.fstat(folder), walked)
            if (target := _link_target(name, folder, walked, any_owner=any_owner)) is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
                parts += _parts(target)
                if target.startswith("/"):
                    os.close(folder)
                    folder, walked = os.open("/", FOLDER), "/"
                continue
            below = _step_into(name, folder, make=make)
            os.close(folder)
            folder, walked = below, os.path.normpath(os.path.join(walked, name))  # noqa: PTH118
        if not any_owner:
            check_folder(os.fstat(folder), os.fspath(path))
        if fcntl.fcntl(folder, fcntl.F_GETFL) & os.O_PATH:
            os.close(os.open(".", FOLDER, dir_fd=folder))
        _let_owner_in(folder)
    return folder


def open_own_file(
    name: str, flags: int, *, dir_fd: int, shown: str | None = None, any_owner: bool = False
) -> int:
    """O_CREAT makes a missing file with mode 0600. `O_TRUNC` would empty it before the check."""
    assert not flags & os.O_TRUNC
    shown = shown or name
    try:
        fd = os.open(
            name,
            flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY,
            0o600,
            dir_fd=dir_fd,
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unsafe(f"{shown} is a symbolic link, which is not followed; remove it") from None
        raise
    state = os.fstat(fd)
    why = ""
    if not stat.S_ISREG(state.st_mode):
        why = "is not a regular file"
    elif state.st_uid != os.geteuid() and not any_owner:
        why = f"belongs to {user_name(state.st_uid)}"
    elif state.st_nlink > 1:
        why = "has another name elsewhere (a hard link)"
    if why:
        os.close(fd)
        raise Unsafe(f"{shown} {why}; remove it")
    return fd


def check_folder(state: os.stat_result, path: str) -> None:
    if state.st_uid not in (0, os.geteuid()):
        raise Unsafe(
            f"{path} belongs to {user_name(state.st_uid)}, who could change its content; "
            f"chown it to {user_name(os.geteuid())}, or choose another folder"
        )
    if state.st_mode & stat.S_IWOTH:
        raise Unsafe(
            f"{path} can be written to by every user (mode {state.st_mode & 0o7777:o}); "
            "chmod it to 700, or choose another folder"
        )
    if state.st_mode & stat.S_IWGRP and not _is_private_group(state.st_gid):
        raise Unsafe(
            f"{path} can be written to by the group {_group_name(state.st_gid)} (mode "
            f"{state.st_mode & 0o7777:o}); "
            f"chmod g-w it, or choose another folder"
        )


def user_name(uid: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _parts(path: str) -> list[str]:
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _check_above(state: os.stat_result, path: str) -> None:
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise Unsafe(
            f"{path} can be written to by every user, who could replace its content; "
            "chmod o-w it, or choose another folder"
        )


def _link_target(name: str, folder: int, walked: str, *, any_owner: bool) -> str | None:
    """None: not a link. Raises Unsafe for another user's link."""
    try:
        state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(state.st_mode):
        return None
    if not any_owner and state.st_uid not in (0, os.geteuid()):
        raise Unsafe(
            f"{walked.rstrip('/')}/{name} is a symbolic link of {user_name(state.st_uid)}; "
            "choose another folder"
        )
    return os.readlink(name, dir_fd=folder)


def _step_into(name: str, folder: int, *, make: bool) -> int:
    flags = FOLDER | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=folder)
    # may be entered but not listed, like many home folders
    except PermissionError:
        return os.open(
            name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
        )
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=folder)
    below = os.open(name, flags, dir_fd=folder)
    _let_owner_in(below)
    return below


def _let_owner_in(folder: int) -> None:
    state = os.fstat(folder)
    if state.st_uid == os.geteuid() and state.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(folder, stat.S_IMODE(state.st_mode) | stat.S_IRWXU)


def _is_private_group(gid: int) -> bool:
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (
        group.gr_gid == user.pw_gid
        and group.gr_name == user.pw_name
        and set(group.gr_mem) <= {user.pw_name}
    )


def _group_name(gid: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def replace_own_file(
    path: Path,
    parts: Iterable[bytes],
    *,
    any_owner: bool = False,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """After a crash, `path` is the old file or the new one. is_wanted: asked before the exchange"""
    temporary = f"{path.name}.new"
    folder = open_folder(path.parent, any_owner=any_owner)
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        file = open_own_file(temporary, flags, dir_fd=folder, shown=f"{path}.new")
        with os.fdopen(file, "wb") as opened:
            opened.writelines(parts)
            opened.flush()
            os.fsync(opened.fileno())
        if is_wanted():
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
    finally:
        os.close(folder)
