"""SIGTERM ends a command in order: `with ending_in_order(): ...`."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends what the command has started, engines, nodes and servers, on the way out, as
    Ctrl-C does. The main thread's.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
