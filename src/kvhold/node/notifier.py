"""To wait for together with sockets."""

import os
import threading
from contextlib import suppress

from kvhold.core.errors import NodeError


class Notifier:
    """Any thread may call, even after `close`."""

    def __init__(self) -> None:
        self._fd = -1
        self._lock = threading.Lock()
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise NodeError(f"cannot join a node: {error}") from None

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def close_in_child(self) -> None:
        """The parent's threads may hold its lock."""
        self._lock = threading.Lock()
        self.close()

    def __del__(self) -> None:
        self.close()
