"""Agents that read each other's memory in this process, in the place of NIXL's."""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhold.net.remote_memory import MemoryRange, ReadPiece


@dataclass
class Agents:
    """may_end:  reads end only while it is set; until then their memory may be written
    fault:    of each read, if set
    damage:   the reads bring other bytes
    num_begun: reads so far
    """

    may_end: threading.Event = field(default_factory=threading.Event)
    fault: str = ""
    damage: bool = False
    num_begun: int = 0
    num_closed: int = 0
    by_name: dict[str, "FakeAgent"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.may_end.set()

    def make(self) -> "FakeAgent":
        name = f"agent-{len(self.by_name)}"
        self.by_name[name] = agent = FakeAgent(self, name)
        return agent


@dataclass
class FakeRead:
    pieces: Sequence[ReadPiece]
    is_released: bool = False


class FakeAgent:
    def __init__(self, agents: Agents, name: str) -> None:
        self.agents, self.name = agents, name
        self.memory: list[MemoryRange] = []
        self.remotes: set[str] = set()
        self.reads: list[FakeRead] = []
        self.num_progress = 0

    def register(self, address: int, nbytes: int) -> None:
        self.memory.append(MemoryRange(address, nbytes))

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_remote(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name not in self.agents.by_name:
            raise ValueError(f"{name} is no agent")
        self.remotes.add(name)
        return name

    def remove_remote(self, name: str) -> None:
        assert all(read.is_released for read in self.reads), "a read may be from there"
        self.remotes.remove(name)

    def begin_read(self, name: str, pieces: Sequence[ReadPiece]) -> FakeRead:
        assert name in self.remotes
        there = self.agents.by_name[name].memory
        for piece in pieces:
            assert any(memory.has(piece.here, piece.nbytes) for memory in self.memory)
            assert any(memory.has(piece.there, piece.nbytes) for memory in there)
        self.agents.num_begun += 1
        self.reads.append(FakeRead(pieces))
        return self.reads[-1]

    def is_done(self, read: FakeRead) -> bool:
        assert not read.is_released
        if self.agents.fault:
            raise RuntimeError(self.agents.fault)
        if not self.agents.may_end.is_set():
            return False
        for piece in read.pieces:
            ctypes.memmove(piece.here, piece.there, piece.nbytes)
            if self.agents.damage:
                ctypes.memset(piece.here, 0, 1)
                ctypes.memset(piece.here + 1, 1, 1)
        return True

    def progress(self) -> None:
        self.num_progress += 1

    def end_read(self, read: FakeRead) -> None:
        read.is_released = True

    def close(self) -> None:
        self.agents.num_closed += 1
