"""Restarts a killed node at once. Its lock keeps engines from starting one."""

import fcntl
import gc
import os
import time
from pathlib import Path

from kvhold.core.config import Config
from kvhold.memory.arena import has_room
from kvhold.node.paths import open_beside, watch_path

_LEAST_LIFE_S = 5.0
_ROOM_WITHIN_S = 2.0  # for engines to unmap the last arena
_ROOM_PAUSE_S = 0.01


def restart_when_killed(path: Path) -> bool:
    """Become the watcher. Return in a child, and in a new child when the first one was killed.

    Returns whether there was an earlier child; False, in this process, if another watcher has the
    lock. Call it before there are threads. Raises OSError.
    """
    lock = open_beside(watch_path(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return False
    gc.collect()
    gc.freeze()
    had_one = False
    while True:
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            os.close(lock)
            return had_one
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0 or (had_one and time.monotonic() - began_s < _LEAST_LIFE_S):
            os._exit(code if code >= 0 else 1)
        had_one = True


def wait_for_room(config: Config, ram_bytes: int) -> None:
    until_s = time.monotonic() + _ROOM_WITHIN_S
    while not has_room(ram_bytes, config.huge_pages) and time.monotonic() < until_s:
        # no event says that memory is free
        time.sleep(_ROOM_PAUSE_S)
