"""An event that a thread can wait for together with sockets.

notifier = Notifier(); poll.register(notifier, select.POLLIN); poll.poll(); notifier.clear()
notifier.set()                                     # in another thread
"""

import os
import threading
from contextlib import suppress

from kvhold.core.errors import NodeError


class Notifier:
    """An event like `threading.Event`, with a descriptor.

    Any thread may call; after `close`, calls do nothing.
    """

    def __init__(self) -> None:
        """Raises NodeError when no descriptor is left."""
        self._fd = -1
        self._lock = threading.Lock()
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise NodeError(f"cannot join a node: {error}") from None

    def fileno(self) -> int:
        """Return the descriptor, which is readable while the event is set."""
        return self._fd

    def set(self) -> None:
        """Set the event, and wake the waiting thread."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Reset the event."""
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. No thread may be waiting."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def close_in_child(self) -> None:
        """Close in a forked child, with a new lock: a thread of the parent may hold the old one."""
        self._lock = threading.Lock()
        self.close()

    def __del__(self) -> None:
        self.close()
