import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(name: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Also a decorator."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
