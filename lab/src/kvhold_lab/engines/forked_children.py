"""Fork the children that `multiprocessing` would spawn, which would import vLLM again."""

import os
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver, popen_forkserver, process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any


def fork_children(folder: Path) -> None:
    """Call it first, while this process has one thread. The children's own children are spawned."""
    address = str(folder / f"{os.getpid()}.children")
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            try:
                forkserver.main(listening.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = address, ours
    server._forkserver_pid = pid
    spawned: Any = SpawnProcess
    spawned._Popen = staticmethod(_start)


def _start(child: process.BaseProcess) -> popen_forkserver.Popen:
    given: Any = child
    given._target = partial(_call, dict(os.environ), given._target)
    return popen_forkserver.Popen(child)


def _call(environment: dict[str, str], target: Callable[..., None], *args: Any, **kw: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kw)
