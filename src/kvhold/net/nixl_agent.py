"""By its UCX backend, as `remote_memory.py` uses it (docs/decisions/0035)."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from random import getrandbits
from typing import Any

import numpy as np

from kvhold.net.remote_memory import ChannelFault, ReadPiece

MISSING = "the package nixl is not installed: pip install 'kvhold[nixl]'"
_BACKEND = "UCX"
# the wheels, by CUDA version
_WHEELS = ("nixl_cu13", "nixl_cu12")


def is_installed() -> bool:
    return any(find_spec(wheel) is not None for wheel in _WHEELS)


class NixlAgent:
    def __init__(self) -> None:
        """Raises ChannelFault, or an exception of NIXL."""
        self._nixl = nixl = _bindings()
        config = nixl.nixlAgentConfig(True, False, 0, nixl.NIXL_THREAD_SYNC_STRICT)
        self._agent: Any = nixl.nixlAgent(f"kvhold-{getrandbits(64):016x}", config)
        if _BACKEND not in self._agent.getAvailPlugins():
            raise ChannelFault(f"NIXL has no plugin {_BACKEND}")
        self._backends = [self._agent.createBackend(_BACKEND, {})]
        self._registered: list[Any] = []

    def register(self, address: int, nbytes: int) -> None:
        nixl = self._nixl
        memory = nixl.nixlRegDList(nixl.DRAM_SEG, [(address, nbytes, 0, "")])
        self._agent.registerMem(memory, self._backends)
        self._registered.append(memory)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def add_remote(self, metadata: bytes) -> str:
        return bytes(self._agent.loadRemoteMD(metadata)).decode()

    def remove_remote(self, name: str) -> None:
        self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, pieces: Sequence[ReadPiece]) -> int:
        nixl = self._nixl
        here, there = (
            nixl.nixlXferDList(nixl.DRAM_SEG, np.array(rows, np.uint64))
            for rows in (
                [(piece.here, piece.nbytes, 0) for piece in pieces],
                [(piece.there, piece.nbytes, 0) for piece in pieces],
            )
        )
        read: int = self._agent.createXferReq(nixl.NIXL_READ, here, there, name, "", self._backends)
        self._agent.postXferReq(read)
        return read

    def is_done(self, read: int) -> bool:
        return bool(self._agent.getXferStatus(read) == self._nixl.NIXL_SUCCESS)

    def end_read(self, read: int) -> None:
        self._agent.releaseXferReq(read)

    def close(self) -> None:
        for memory in self._registered:
            self._agent.deregisterMem(memory, self._backends)
        self._registered.clear()
        self._agent = None


def _bindings() -> Any:
    """Raises ChannelFault: no wheel's libraries can be loaded here."""
    faults = []
    for wheel in _WHEELS:
        try:
            return import_module(f"{wheel}._bindings")
        except ImportError as error:
            faults.append(str(error))
    raise ChannelFault(f"NIXL cannot be loaded: {'; '.join(faults)}")
