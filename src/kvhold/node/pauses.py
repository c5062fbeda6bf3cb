"""Keep Python's garbage collector (of reference cycles) from stopping a node's loop.

    avoid_pauses()                  # once, in a process that is only a node
    collect_young(may_look=True)    # every second, between two turns of the loop
    collect_all()                   # while no client is connected

An index of a million chunks has some millions of objects. A full collection visits all of them,
which takes half a second. Even a collection of young objects takes 160 ms if one of them is a list
of a million chunks, as a long lookup makes. So the node decides when the collector runs:

- over young objects once a second, if they are few and no long call ran
- over all objects when the last client has left

Young objects that were not visited become old, which costs nothing. Chunks, their names and
requests are in no cycles; reference counting frees them.

`avoid_pauses` also reduces the interpreter's switch interval from 5 ms to 0.5 ms.
"""

import gc
import sys

_MOST_YOUNG = 2000  # objects, which take a fraction of a millisecond
_is_ours = False  # whether this module runs the collector


def avoid_pauses() -> None:
    """Stop automatic collections. From then on only this module runs the collector."""
    global _is_ours
    gc.collect()
    gc.freeze()
    gc.disable()
    _is_ours = True
    sys.setswitchinterval(0.0005)


def collect_young(*, may_look: bool) -> None:
    """Collect the young objects, if `avoid_pauses` was called; then count them as old.

    may_look: False: do not collect, because a long call may have made a large object
    """
    if _is_ours:
        if may_look and gc.get_count()[0] < _MOST_YOUNG:
            gc.collect(0)
        gc.freeze()


def collect_all() -> None:
    """Collect all objects, if `avoid_pauses` was called."""
    if _is_ours:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
