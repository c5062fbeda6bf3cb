"""A node that was killed is started again at once, by a process that waits for its end.

    had_one = restart_when_killed(path)      # returns in a child, which is to be the node

A start from nothing takes an interpreter and its imports, which is seconds on a host whose cores
are taken. The watcher has both, and its child is the node. A node that has ended by itself, or by
an error, is not started again, nor is one that was started again and was killed within 5 seconds:
then the watcher ends, too, and the next start is an engine's. While it lives it has a lock beside
the socket, so that no engine starts another node meanwhile. It holds no socket, no file of a tier
and no memory of the arena.
"""

import fcntl
import gc
import os
import time
from pathlib import Path

from kvhold.core.config import Config
from kvhold.memory.arena import has_room
from kvhold.node.paths import open_beside, watch_path

_LEAST_LIFE_S = 5.0  # of one that was started again
_ROOM_WITHIN_S = 2.0  # for engines to notice the end of the last node, and to unmap its arena
_ROOM_PAUSE_S = 0.01  # memory that other processes free tells nobody


def restart_when_killed(path: Path) -> bool:
    """Return in a child, and in another one each time the last was killed.

    Returns whether there was one before.

    Where another watcher has the place, this process goes on without a child. Call it before there
    are threads. Raises OSError.
    """
    lock = open_beside(watch_path(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    gc.collect()
    gc.freeze()  # a child that collects looks at none of this, and copies no page for it
    had_one = False
    while True:
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            os.close(lock)  # the watcher has it still
            return had_one
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or (had_one and time.monotonic() - began_s < _LEAST_LIFE_S):
            os._exit(code if code >= 0 else 1)
        had_one = True


def wait_for_room(config: Config, ram_bytes: int) -> None:
    """Wait until the memory of the last node is free, if that takes no longer than `_ROOM_WITHIN_S`."""
    until_s = time.monotonic() + _ROOM_WITHIN_S
    while not has_room(ram_bytes, config.huge_pages) and time.monotonic() < until_s:
        time.sleep(_ROOM_PAUSE_S)
