"""Keep Python's own collector of cycles from stopping a node's loop.

    avoid_pauses()                  # once, when the process is a node and nothing else
    collect_young(may_look=True)    # now and then, between two turns of the loop
    collect_all()                   # while no client is connected

An index of a million chunks is some millions of objects. The collector looks at all of them now and then, which takes half a second.
Even a look at young objects alone takes 160 ms if one of them is a list of a million chunks, as a long lookup makes them. So the node says
itself when the collector may look: at young objects once a second, if they are few and no long call was made; at all objects when the
last client has left. Objects that were not looked at in time count as old, which costs nothing. Chunks, their names and requests are in no
cycles: they go when nothing refers to them any more.

A thread that waits for the interpreter gets it after half a millisecond, not after five.
"""

import gc
import sys

_MOST_YOUNG = 2000  # objects, which take a fraction of a millisecond
_is_ours = False  # the collector


def avoid_pauses() -> None:
    """From here on the collector works only when it is told to."""
    global _is_ours
    gc.collect()
    gc.freeze()
    gc.disable()
    _is_ours = True
    sys.setswitchinterval(0.0005)


def collect_young(*, may_look: bool) -> None:
    """Collect young objects where `avoid_pauses` was called; from here on they are old.

    may_look: nothing was made lately that takes long to look at
    """
    if _is_ours:
        if may_look and gc.get_count()[0] < _MOST_YOUNG:
            gc.collect(0)
        gc.freeze()


def collect_all() -> None:
    """Collect all objects, where `avoid_pauses` was called."""
    if _is_ours:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
