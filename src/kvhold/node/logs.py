"""The node's own log file: bounded in size, and no line is repeated without end.

    write_log(path, max_bytes=10 << 20, files=3)      # instead of standard error, for the process's whole life

A full file is renamed to `node.log.1`, that to `node.log.2`, and so on; the oldest is removed. Standard output and error are pointed at
the current file, so that what a library prints is bounded, too. Call it before there are threads.
"""

import logging
import os
import time
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvhold.node.paths import open_beside

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BURST = 20  # lines of one kind in one period
_PERIOD_S = 60.0
_MOST_KINDS = 1000  # that are counted at once


class RepeatFilter(logging.Filter):
    """Lets 20 lines of one kind pass in a minute, and then says how many it held back. A kind is one place in the code."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, str, int], tuple[float, int]] = {}  # of each kind: since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now_s = (record.name, record.pathname, record.lineno), self._clock()
        since_s, count = self._counts.get(kind, (now_s, 0))
        if now_s - since_s >= _PERIOD_S:
            if count > _BURST:
                record.msg = f"{record.getMessage()} ({count - _BURST} more such lines in the last {now_s - since_s:.0f} s)"
                record.args = ()
            since_s, count = now_s, 0
        if len(self._counts) >= _MOST_KINDS:
            self._counts.clear()
        self._counts[kind] = (since_s, count + 1)
        return count < _BURST


def write_log(path: Path, *, max_bytes: int, files: int) -> None:
    """Log to `path` from now on. files: how many there are in all, the current one included. Raises OSError."""
    handler = _LogFile(path, maxBytes=max_bytes, backupCount=files - 1)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)


class _LogFile(RotatingFileHandler):
    """A rotating file for this user alone, which standard output and error are part of."""

    def _open(self) -> TextIOWrapper:
        fd = open_beside(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(fd, standard)
        return open(fd, "a", encoding="utf-8", errors="backslashreplace")  # noqa: PTH123 - the handler closes it

    def doRollover(self) -> None:
        """Start a new file. With one file in all, that one is emptied."""
        super().doRollover()
        if self.backupCount == 0 and self.stream is not None:
            self.stream.truncate(0)
