"""How a node's process keeps Python itself from stopping its loop.

    avoid_pauses()          # once, when the process is a node and nothing else
    collect_while_idle()    # when nobody is connected

An index of a million chunks is some millions of objects. Python's collector of cycles walks all of them now and then, which takes half a
second, in which the node answers nobody. Chunks and their names are in no cycles; they go when nothing refers to them any more. So only
young objects are looked at while clients are connected, and all of them when the last one has left. And a thread that waits for the
interpreter gets it after half a millisecond, not after five.
"""

import gc
import sys

_YOUNG = 2000  # objects made before the young ones are looked at: a fraction of a millisecond
_NEVER = 1_000_000_000


def avoid_pauses() -> None:
    """From here on the collector looks at young objects alone."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 5, _NEVER)
    sys.setswitchinterval(0.0005)


def collect_while_idle() -> None:
    """Look at all objects, where `avoid_pauses` was called."""
    if gc.get_threshold()[2] == _NEVER:
        gc.collect()
