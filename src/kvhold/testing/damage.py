"""Damage to the arena of a running cache, from outside of it: what a stray write of some process
would do.

with OpenArena(pid) as arena:                 # a node's
    arena.flip(offset, bit=3)
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Self

_NAME = "/memfd:kvhold-arena"


class OpenArena:
    """The arena of a process, opened beside all that the process itself does.

    Needs the same user.
    """

    def __init__(self, pid: int, fd: int | None = None) -> None:
        """fd: the process's own descriptor of it; None: it has one arena.

        Raises LookupError if it has none, or several.
        """
        found = [Path(f"/proc/{pid}/fd/{fd}")] if fd is not None else _arenas(pid)
        if len(found) != 1:
            raise LookupError(f"process {pid} has {len(found)} arenas")
        self.fd = os.open(found[0], os.O_RDWR | os.O_CLOEXEC)

    def flip(self, offset: int, bit: int = 0) -> None:
        """Invert one bit of one byte."""
        (byte,) = os.pread(self.fd, 1, offset)
        os.pwrite(self.fd, bytes([byte ^ 1 << bit]), offset)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arenas(pid: int) -> list[Path]:
    found: dict[int, Path] = {}  # by inode: a descriptor may be there twice
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if str(link.readlink()).startswith(_NAME):
                found[link.stat().st_ino] = link
    return list(found.values())
