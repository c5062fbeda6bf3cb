"""Damage to the arena of a running cache, from outside of it: what a stray write of some process would do.

with OpenArena(pid) as arena:                 # os.getpid() for a cache of this process
    arena.flip(offset, bit=3)
"""

import os
from pathlib import Path
from typing import Self

_NAME = "/memfd:kvhold-arena"


class OpenArena:
    """The arena of a process, opened beside all that the process itself does. Needs the same user."""

    def __init__(self, pid: int, *, number: int = -1) -> None:
        """number: which one, by descriptor, where the process has several; the last one unless told. Raises LookupError if it has none."""
        found = []
        for link in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda path: int(path.name)):
            try:
                if str(link.readlink()).startswith(_NAME):
                    found.append(link)
            except FileNotFoundError:  # the listing's own
                continue
        if not found:
            raise LookupError(f"process {pid} has no arena")
        self.fd = os.open(found[number], os.O_RDWR | os.O_CLOEXEC)

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
