"""The node's log file, limited in size and repeated lines.

Standard output and error go there, too. Call `write_log` before there are threads.
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
_BURST = 20
_PERIOD_S = 60.0
_MOST_KINDS = 1000


class RepeatFilter(logging.Filter):
    """Passes 20 lines per minute and place in the code; counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # kind -> start, lines
        self._counts: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now_s = (record.name, record.pathname, record.lineno), self._clock()
        since_s, count = self._counts.get(kind, (now_s, 0))
        if now_s - since_s >= _PERIOD_S:
            if count > _BURST:
                record.msg = (
                    f"{record.getMessage()} ({count - _BURST} more such lines in the last "
                    f"{now_s - since_s:.0f} s)"
                )
                record.args = ()
            since_s, count = now_s, 0
        if len(self._counts) >= _MOST_KINDS:
            self._counts.clear()
        self._counts[kind] = (since_s, count + 1)
        return count < _BURST


def write_log(path: Path, *, max_bytes: int, files: int) -> None:
    """files: with the current one. Raises OSError."""
    handler = _LogFile(path, maxBytes=max_bytes, backupCount=files - 1)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)


class _LogFile(RotatingFileHandler):
    """Readable by this user only."""

    def _open(self) -> TextIOWrapper:
        fd = open_beside(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(fd, standard)
        return open(fd, "a", encoding="utf-8", errors="backslashreplace")  # noqa: PTH123

    def doRollover(self) -> None:
        super().doRollover()
        if self.backupCount == 0 and self.stream is not None:
            self.stream.truncate(0)
