"""Reads the memory of other processes into this one's, by an agent such as NIXL's.

One thread makes all calls of the agent. A read may write until `read` ends, also if it was given
up.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from random import getrandbits
from typing import Any, Protocol

import numpy as np

from kvhold.core.errors import KVHoldError
from kvhold.net.login import quoted

log = logging.getLogger(__name__)

SAMPLE_BYTES = 4 << 20
MOST_METADATA_BYTES = 64 << 10
_POLL_S = 0.0001
_MOST_POLL_S = 0.001
_POLLS = 16  # the pause is this part of the read's age
# for other parts of a failed read
_LINGER_S = 0.5
_CLOSE_S = 5.0
_STARTING = "it is starting"
_ENDED = "it has ended"


class ChannelFault(KVHoldError):
    """The agent cannot do it. The caller reads over TCP."""


@dataclass(frozen=True, slots=True)
class ReadPiece:
    here: int
    there: int
    nbytes: int


class Agent(Protocol):
    """One thread. Any exception is a fault of the call."""

    def register(self, address: int, nbytes: int) -> None:
        """Other agents may read this memory, and reads write it."""

    def metadata(self) -> bytes:
        """For another agent, to read the registered memory."""

    def add_remote(self, metadata: bytes) -> str:
        """The other agent's name."""

    def remove_remote(self, name: str) -> None: ...

    def begin_read(self, name: str, pieces: Sequence[ReadPiece]) -> Any:
        """`end_read` releases the read."""

    def is_done(self, read: Any) -> bool:
        """Raises if the read has failed."""

    def progress(self) -> None:
        """Let other parts of a failed read end."""

    def end_read(self, read: Any) -> None: ...

    def close(self) -> None:
        """No read is in progress."""


def address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


@dataclass(frozen=True)
class MemoryRange:
    address: int
    nbytes: int

    @classmethod
    def of(cls, view: memoryview) -> "MemoryRange":
        return cls(address_of(view), view.nbytes)

    def has(self, address: int, nbytes: int) -> bool:
        return 0 < nbytes and self.address <= address <= self.address + self.nbytes - nbytes


@dataclass(eq=False)
class _Call:
    """tell: called in the agent's thread, once, with the result or the fault."""

    work: Callable[[Agent], Any]
    tell: Callable[[Any, ChannelFault | None], None]


@dataclass(eq=False)
class _Read:
    """until_s: it has failed, and ends then"""

    name: str
    pieces: Sequence[ReadPiece]
    tell: Callable[[Any, ChannelFault | None], None]
    is_given_up: bool = False
    handle: Any = None
    fault: ChannelFault | None = None
    until_s: float = 0.0


@dataclass
class _Removal:
    name: str


class RemoteMemory:
    def __init__(
        self,
        make_agent: Callable[[], Agent],
        buffer: memoryview,
        *,
        linger_s: float = _LINGER_S,
    ) -> None:
        """make_agent: called in the thread
        buffer:     for others' reads and our own; stays mapped until the agent is closed
        """
        self.number = getrandbits(53)
        """Of this agent: addresses are not those of another one."""
        self.region = MemoryRange.of(buffer)
        self.sample = memoryview(bytearray(np.random.default_rng().bytes(SAMPLE_BYTES)))
        self.scratch = memoryview(bytearray(SAMPLE_BYTES))
        self._written = self.region, MemoryRange.of(self.scratch)
        self.measuring = asyncio.Lock()
        """Held by the reader of the scratch memory."""
        self.metadata = b""
        self.fault = _STARTING
        """Empty: it can be used."""
        self._make_agent = make_agent
        self._buffer: memoryview | None = buffer[:]
        self._linger_s = linger_s
        self._names: set[str] = set()
        self._reads: list[_Read] = []
        self._began_s = 0.0
        self._removals: list[str] = []
        self._queue: SimpleQueue[_Call | _Read | _Removal | None] = SimpleQueue()
        self._lock = threading.Lock()  # else a call may be queued after the end
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvhold-channel", daemon=True)

    @property
    def is_starting(self) -> bool:
        return self.fault == _STARTING

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """False: a read may still write to the memory. No caller may be left."""
        self._is_closing = True
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    async def connect(self, metadata: bytes) -> str:
        """Raises ChannelFault."""
        names: list[str] = []

        def connect(agent: Agent) -> None:
            name = agent.add_remote(metadata)
            if name in self._names:
                raise ChannelFault("another peer's agent has the same name")
            self._names.add(name)
            names.append(name)

        try:
            await self._answer(lambda tell: _Call(connect, tell))
        except asyncio.CancelledError:
            for name in names:
                self.disconnect(name)
            raise
        return names[0]

    def disconnect(self, name: str) -> None:
        """Ends once no read from there is left."""
        self._queue.put(_Removal(name))

    async def read(self, name: str, pieces: Sequence[ReadPiece]) -> None:
        """The memory is not written any more when this ends, also by cancellation.

        Raises ChannelFault.
        """
        for piece in pieces:
            assert any(one.has(piece.here, piece.nbytes) for one in self._written), "not registered"
        reads: list[_Read] = []

        def make(tell: Callable[[Any, ChannelFault | None], None]) -> _Read:
            reads.append(_Read(name, pieces, tell))
            return reads[0]

        await self._answer(make, when_cancelled=lambda: setattr(reads[0], "is_given_up", True))

    async def _answer(
        self,
        make: Callable[[Callable[[Any, ChannelFault | None], None]], _Call | _Read],
        when_cancelled: Callable[[], None] = lambda: None,
    ) -> Any:
        """Wait for the answer even if cancelled: the agent's thread may be at work."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, fault: ChannelFault | None) -> None:
            if not answer.done():
                if fault is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(fault)

        def tell(result: Any, fault: ChannelFault | None) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, result, fault)

        with self._lock:
            if self._is_closing or self.fault:
                raise ChannelFault(self.fault or _ENDED)
            self._queue.put(make(tell))
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait((answer,))
            except asyncio.CancelledError as error:
                cancelled = error
                when_cancelled()
        if cancelled is not None:
            answer.exception()
            raise cancelled
        return answer.result()

    def _run(self) -> None:
        fault = ChannelFault(_ENDED)
        try:
            agent = self._make_agent()
        except Exception as error:  # noqa: BLE001 - reported as the fault
            self._refuse_all(_fault_of(error))
            return
        try:
            for memory in (self.region, MemoryRange.of(self.sample), MemoryRange.of(self.scratch)):
                agent.register(memory.address, memory.nbytes)
            metadata = agent.metadata()
            if not 0 < len(metadata) <= MOST_METADATA_BYTES:
                raise ChannelFault(f"the agent's metadata has {len(metadata)} bytes")
            self.metadata, self.fault = metadata, ""
            self._work(agent)
        except Exception as error:  # noqa: BLE001 - reported as the fault
            fault = _fault_of(error)
        finally:
            self._refuse_all(fault)
            try:
                agent.close()
            except Exception:
                log.exception("the agent cannot be closed, so its memory stays in use")
            else:
                for read in self._reads:
                    read.tell(None, fault)
                self._buffer = None

    def _refuse_all(self, fault: ChannelFault) -> None:
        with self._lock:
            self.fault = str(fault)
        if not self._is_closing:
            log.warning("chunks come from peers over TCP only: %s", fault)
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, (_Call, _Read)):
                    item.tell(None, fault)

    def _work(self, agent: Agent) -> None:
        is_ending = False
        while True:
            if is_ending:
                time.sleep(self._poll_s())
            else:
                is_ending = self._take_item(agent)
            self._reads = [read for read in self._reads if not self._has_ended(agent, read)]
            busy = {read.name for read in self._reads}
            for name in [name for name in self._removals if name not in busy]:
                self._removals.remove(name)
                self._remove(agent, name)
            if is_ending and not self._reads:
                for name in sorted(self._names):
                    self._remove(agent, name)
                return

    def _take_item(self, agent: Agent) -> bool:
        """One, since a read may end as it begins. True: the end."""
        wait_s = self._poll_s() if self._reads else None
        with suppress(Empty):
            item = self._queue.get(timeout=wait_s)
            if item is None:
                return True
            self._begin(agent, item)
        return False

    def _poll_s(self) -> float:
        """Polls take the GIL."""
        since_s = time.monotonic() - self._began_s
        return min(_MOST_POLL_S, max(_POLL_S, since_s / _POLLS))

    def _begin(self, agent: Agent, item: _Call | _Read | _Removal) -> None:
        match item:
            case _Call():
                try:
                    item.tell(item.work(agent), None)
                except Exception as error:  # noqa: BLE001 - NIXL's are unknown
                    item.tell(None, _fault_of(error))
            case _Removal(name=name):
                self._removals.append(name)
            case _Read(name=name):
                if item.is_given_up or name not in self._names or name in self._removals:
                    item.tell(None, ChannelFault("the peer's agent is not connected"))
                    return
                try:
                    item.handle = agent.begin_read(name, item.pieces)
                except Exception as error:  # noqa: BLE001 - NIXL's are unknown
                    self._failed(item, error)
                self._reads.append(item)
                self._began_s = time.monotonic()

    def _has_ended(self, agent: Agent, read: _Read) -> bool:
        if read.fault is None:
            try:
                if not agent.is_done(read.handle):
                    return False
            except Exception as error:  # noqa: BLE001 - NIXL's are unknown
                self._failed(read, error)
        if read.fault is not None:
            with suppress(Exception):  # as unknown as the fault
                agent.progress()
            if time.monotonic() < read.until_s:
                return False
        if read.handle is not None:
            try:
                agent.end_read(read.handle)
            except Exception as error:  # noqa: BLE001 - NIXL's are unknown
                log.debug("a read cannot be released: %s", error)
        read.tell(None, read.fault)
        return True

    def _failed(self, read: _Read, error: Exception) -> None:
        read.fault = _fault_of(error)
        read.until_s = time.monotonic() + self._linger_s

    def _remove(self, agent: Agent, name: str) -> None:
        self._names.discard(name)
        try:
            agent.remove_remote(name)
        except Exception as error:  # noqa: BLE001 - NIXL's are unknown
            log.debug("agent %s cannot be removed: %s", name, error)


def _fault_of(error: Exception) -> ChannelFault:
    if isinstance(error, ChannelFault):
        return error
    return ChannelFault(quoted(f"{type(error).__name__}: {error}"))
