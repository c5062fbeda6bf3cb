"""Keep Python's garbage collector from stopping a node's loop: chunks are in no cycles."""

import gc
import sys

_MOST_YOUNG = 2000  # a fraction of a millisecond
_is_ours = False


def avoid_pauses() -> None:
    """Also sets the switch interval to 0.5 ms."""
    global _is_ours
    gc.collect()
    gc.freeze()
    gc.disable()
    _is_ours = True
    sys.setswitchinterval(0.0005)


def collect_young(*, may_look: bool) -> None:
    """Call it every second. may_look: False after a call that may have made a large object"""
    if _is_ours:
        if may_look and gc.get_count()[0] < _MOST_YOUNG:
            gc.collect(0)
        gc.freeze()


def collect_all() -> None:
    """Call it while no client is connected."""
    if _is_ours:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
