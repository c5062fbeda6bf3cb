import os
from contextlib import suppress
from pathlib import Path
from typing import Self

_NAME = "/memfd:kvhold-arena"


class OpenArena:
    def __init__(self, pid: int, fd: int | None = None) -> None:
        """Raises LookupError unless there is exactly one arena.

        fd: the arena's descriptor in the process; None: the process's only arena
        """
        found = [Path(f"/proc/{pid}/fd/{fd}")] if fd is not None else _arenas(pid)
        if len(found) != 1:
            raise LookupError(f"process {pid} has {len(found)} arenas")
        self.fd = os.open(found[0], os.O_RDWR | os.O_CLOEXEC)

    def flip(self, offset: int, bit: int = 0) -> None:
        (byte,) = os.pread(self.fd, 1, offset)
        os.pwrite(self.fd, bytes([byte ^ 1 << bit]), offset)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arenas(pid: int) -> list[Path]:
    found: dict[int, Path] = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(link.readlink()).startswith(_NAME):
                found[link.stat().st_ino] = link
    return list(found.values())
