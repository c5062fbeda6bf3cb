"""Undo the work of a failed or interrupted block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_error(*steps: Callable[[], object]) -> Iterator[None]:
    """Run the steps if the block does not end normally; the error goes on."""
    try:
        yield
    # a cancelled call and Ctrl-C, too
    except BaseException:
        for step in steps:
            step()
        raise
