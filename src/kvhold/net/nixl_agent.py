"""By its UCX backend, as `remote_memory.py` uses it (docs/decisions/0035)."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from random import getrandbits
from typing import Any

import numpy as np

from kvhold.net.remote_memory import ChannelFault, ReadPiece

MISSING = "the package nixl is not installed here: pip install 'kvhold[nixl]'"
_BACKEND = "UCX"
_WORKERS = 1
_PROGRESS_US = 1000  # with 0, its thread spins
# the wheels, by CUDA version
_WHEELS = ("nixl_cu13", "nixl_cu12")


def is_installed() -> bool:
    return any(find_spec(wheel) is not None for wheel in _WHEELS)


class NixlAgent:
    """Two agents: UCX locks a worker with spinlocks, so the thread that serves others' reads has
    its own.
    """

    def __init__(self) -> None:
        """Raises ChannelFault, or an exception of NIXL."""
        self._nixl = _bindings()
        self._lender = _Part(self._nixl, has_thread=True)
        self._reader = _Part(self._nixl, has_thread=False)

    def register(self, address: int, nbytes: int) -> None:
        for part in (self._lender, self._reader):
            part.register(address, nbytes)

    def metadata(self) -> bytes:
        return bytes(self._lender.agent.getLocalMD())

    def add_remote(self, metadata: bytes) -> str:
        return bytes(self._reader.agent.loadRemoteMD(metadata)).decode()

    def remove_remote(self, name: str) -> None:
        self._reader.agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, pieces: Sequence[ReadPiece]) -> int:
        nixl, reader = self._nixl, self._reader
        here, there = (
            nixl.nixlXferDList(nixl.DRAM_SEG, np.array(rows, np.uint64))
            for rows in (
                [(piece.here, piece.nbytes, 0) for piece in pieces],
                [(piece.there, piece.nbytes, 0) for piece in pieces],
            )
        )
        read: int = reader.agent.createXferReq(
            nixl.NIXL_READ, here, there, name, "", reader.backends
        )
        reader.agent.postXferReq(read)
        return read

    def is_done(self, read: int) -> bool:
        return bool(self._reader.agent.getXferStatus(read) == self._nixl.NIXL_SUCCESS)

    def progress(self) -> None:
        self._reader.agent.getNotifs({}, self._reader.backends)

    def end_read(self, read: int) -> None:
        self._reader.agent.releaseXferReq(read)

    def close(self) -> None:
        for part in (self._reader, self._lender):
            part.close()


class _Part:
    """has_thread: makes progress by itself; else only in calls."""

    def __init__(self, nixl: Any, *, has_thread: bool) -> None:
        self._nixl = nixl
        config = nixl.nixlAgentConfig(
            has_thread, False, 0, nixl.NIXL_THREAD_SYNC_STRICT, _WORKERS, _PROGRESS_US
        )
        self.agent: Any = nixl.nixlAgent(f"kvhold-{getrandbits(64):016x}", config)
        if _BACKEND not in self.agent.getAvailPlugins():
            raise ChannelFault(f"NIXL has no plugin {_BACKEND}")
        self.backends = [self.agent.createBackend(_BACKEND, {})]
        self._registered: list[Any] = []

    def register(self, address: int, nbytes: int) -> None:
        nixl = self._nixl
        memory = nixl.nixlRegDList(nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        self.agent.registerMem(memory, self.backends)
        self._registered.append(memory)

    def close(self) -> None:
        for memory in self._registered:
            self.agent.deregisterMem(memory, self.backends)
        self._registered.clear()
        self.agent = None


def _bindings() -> Any:
    """Raises ChannelFault: no wheel's libraries can be loaded here."""
    faults = []
    for wheel in _WHEELS:
        try:
            return import_module(f"{wheel}._bindings")
        except ImportError as error:
            faults.append(str(error))
    raise ChannelFault(f"NIXL cannot be loaded: {'; '.join(faults)}")
