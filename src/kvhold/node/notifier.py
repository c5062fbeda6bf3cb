"""An event that a thread can wait for together with sockets.

notifier = Notifier(); poll.register(notifier, select.POLLIN); poll.poll(); notifier.clear()
notifier.set()                                     # in another thread
"""

import os
import threading
from contextlib import suppress

from kvhold.core.errors import NodeError


class Notifier:
    """As `threading.Event`, with a descriptor. Any thread; after `close` nothing happens any more."""

    def __init__(self) -> None:
        """Raises NodeError when there is no descriptor left."""
        self._fd = -1
        self._lock = threading.Lock()
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise NodeError(f"cannot join a node: {error}") from None

    def fileno(self) -> int:
        """Readable while it is set."""
        return self._fd

    def set(self) -> None:
        """Wake who waits."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Set it back."""
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Only where nobody waits for it any more."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def close_in_child(self) -> None:
        """In a forked child, where a thread of the parent's may have had the lock."""
        self._lock = threading.Lock()
        self.close()

    def __del__(self) -> None:
        self.close()
