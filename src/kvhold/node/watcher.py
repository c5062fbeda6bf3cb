"""Start a killed node again at once, by a process that waits for the node's end: the watcher.

    had_one = restart_when_killed(path)      # returns in a child, which becomes the node

A full start needs an interpreter and its imports, which takes seconds on a host with busy cores.
The watcher has both, and forks the node as its child.

A node that ended by itself, or by an error, is not started again. Neither is a restarted node that
was killed within 5 seconds. Then the watcher ends, too, and an engine starts the next node. While
the watcher lives it has a lock beside the socket, so that no engine starts another node. It holds
no socket, no file of a tier and no memory of the arena.
"""

import fcntl
import gc
import os
import time
from pathlib import Path

from kvhold.core.config import Config
from kvhold.memory.arena import has_room
from kvhold.node.paths import open_beside, watch_path

_LEAST_LIFE_S = 5.0  # of a restarted node, to be restarted once more
_ROOM_WITHIN_S = 2.0  # for engines to notice the end of the last node, and to unmap its arena
_ROOM_PAUSE_S = 0.01  # no event tells that other processes have freed memory


def restart_when_killed(path: Path) -> bool:
    """Become the watcher, and return in a child; return in another child each time the last one was
    killed.

    Returns whether there was a child before. If another watcher has the lock, returns False in this
    process, without a child. Call it before there are threads. Raises OSError.
    """
    lock = open_beside(watch_path(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    gc.collect()
    gc.freeze()  # a collection in a child does not visit these objects, and so copies no page
    had_one = False
    while True:
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            os.close(lock)  # the watcher still has the lock
            return had_one
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or (had_one and time.monotonic() - began_s < _LEAST_LIFE_S):
            os._exit(code if code >= 0 else 1)
        had_one = True


def wait_for_room(config: Config, ram_bytes: int) -> None:
    """Wait until the memory of the last node is free, if that takes no longer than
    `_ROOM_WITHIN_S`.
    """
    until_s = time.monotonic() + _ROOM_WITHIN_S
    while not has_room(ram_bytes, config.huge_pages) and time.monotonic() < until_s:
        time.sleep(_ROOM_PAUSE_S)
