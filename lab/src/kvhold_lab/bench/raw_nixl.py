"""NIXL alone: one read from another process's memory."""

import subprocess
import sys
import time
from typing import Any, Self

from kvhold.net.nixl_agent import NixlAgent
from kvhold.net.remote_memory import ReadPiece, address_of
from kvhold_lab.bench.limits import Values

_POLL_S = 0.0001
_PATIENCE_S = 60.0


class RawNixl:
    def __init__(self, into: Values) -> None:
        total = sum(view.nbytes for view in into)
        code = f"from kvhold_lab.bench import raw_nixl; raw_nixl.lend({total})"
        self._peer = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._peer.stdout is not None
        metadata, address = self._peer.stdout.readline().split()
        self._agent = NixlAgent()
        self._pieces = []
        at = int(address)
        for view in into:
            self._agent.register(address_of(view), view.nbytes)
            self._pieces.append(ReadPiece(address_of(view), at, view.nbytes))
            at += view.nbytes
        self._name = self._agent.add_remote(bytes.fromhex(metadata))

    def read(self) -> None:
        read = self._agent.begin_read(self._name, self._pieces)
        until_s = time.monotonic() + _PATIENCE_S
        while not self._agent.is_done(read):
            if time.monotonic() > until_s:
                raise TimeoutError(f"NIXL has not ended a read within {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        self._agent.end_read(read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._agent.remove_remote(self._name)
        self._agent.close()
        assert self._peer.stdin is not None and self._peer.stdout is not None
        self._peer.stdin.close()
        self._peer.wait(10)
        self._peer.stdout.close()


def lend(total: int) -> None:
    memory = memoryview(bytearray(b"x") * total)  # pages of its own, not the zero page
    agent = NixlAgent()
    agent.register(address_of(memory), total)
    print(agent.metadata().hex(), address_of(memory), flush=True)
    sys.stdin.read()
    agent.close()
