"""Keep Python's collector of reference cycles from stopping a node's loop.

A full collection of a million chunks takes half a second, that of a young list of a million chunks
160 ms. Skipped young objects become old, which is safe: chunks, names and requests are in no
cycles.
"""

import gc
import sys

_MOST_YOUNG = 2000  # a fraction of a millisecond
_is_ours = False


def avoid_pauses() -> None:
    """Only this module collects from now on. The switch interval falls from 5 ms to 0.5 ms."""
    global _is_ours
    gc.collect()
    gc.freeze()
    gc.disable()
    _is_ours = True
    sys.setswitchinterval(0.0005)


def collect_young(*, may_look: bool) -> None:
    """Collect young objects, then count them as old. Called every second.

    may_look=False after a long call, which may have made a large object
    """
    if _is_ours:
        if may_look and gc.get_count()[0] < _MOST_YOUNG:
            gc.collect(0)
        gc.freeze()


def collect_all() -> None:
    """Collect all objects, while no client is connected."""
    if _is_ours:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
