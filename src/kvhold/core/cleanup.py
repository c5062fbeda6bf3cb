from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_error(*steps: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    # a cancelled call and Ctrl-C, too
    except BaseException:
        for step in steps:
            step()
        raise
