"""Changes of peers over a bus (docs/peers.md). One event loop.

Records are not trusted. A node seals them with a key from its `PeerWelcome`. The clock in the seal
exposes delayed and repeated records.

seal: 16 bytes of BLAKE2b, 8 bytes of the node's clock in milliseconds, the records in order
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Protocol

from kvhold.core.errors import ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.core.setting import setting
from kvhold.net import peers as p
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length

KEY_BYTES = 32
MOST_SEALED_BYTES = 256 << 10
BATCH_BYTES = 64 << 10  # a node begins no further record in a message after this size
SILENT_S = 5.0  # a node publishes something every second
_CANCEL_AGAIN_S = 2.0
_IDLE_S = 15.0  # then a subscription is made again
_MAC_BYTES, _CLOCK_BYTES = 16, 8
_HEAD_BYTES = _MAC_BYTES + _CLOCK_BYTES
_MOST_WAITING_BYTES = 4 << 20  # of one peer
_record: Decoder[p.PeerChanges] = Decoder(p.PeerChanges)


@dataclass(frozen=True)
class BusConfig:
    bus: str = setting(
        "",
        "the servers of a NATS JetStream by which peers tell their changes, such as "
        "nats://bus-a:4222,bus-b:4222; empty: a connection to each peer",
    )
    bus_stream: str = setting("kvhold-peers", "the name of the stream, and of its subjects")
    bus_keep_s: float = setting(
        600.0, "how long the stream keeps changes, if this node makes it", minimum=10
    )
    bus_keep_bytes: int = setting(
        64 << 20, "most bytes in the stream, if this node makes it", minimum=1 << 20
    )
    bus_user: str = setting("", "the user at the bus")
    bus_password: str = setting(
        "", "that user's password; better by ${file:...} or ${env:...}", secret=True
    )
    bus_password_file: str = setting("", "a file with the password")
    bus_token: str = setting("", "the bus's token; better by ${file:...}", secret=True)
    bus_token_file: str = setting("", "a file with the bus's token")
    bus_tls: bool = setting(False, "use TLS to the bus; beyond loopback, it is required")
    bus_insecure: bool = setting(False, "use a bus on other hosts without TLS")
    bus_ca_file: str = setting(
        "", "PEM file of the authorities to trust for the bus; empty: the system's"
    )
    bus_cert_file: str = setting("", "PEM file of the certificate for the bus, if it requires one")
    bus_key_file: str = setting(
        "", "PEM file of that certificate's key; empty: it is in bus_cert_file"
    )


class BusSession(Protocol):
    async def publish(self, incarnation: int, data: bytes) -> None: ...


class Bus(Protocol):
    """source: the bus in messages, without secrets
    fault:  why it cannot be used now; else empty. Any thread
    """

    source: str
    fault: str

    async def read(self, inboxes: "Inboxes") -> None: ...

    def connected(self) -> AbstractAsyncContextManager[BusSession]: ...

    async def check(self) -> list[str]: ...


def clock_ms() -> int:
    """From a fixed moment, while this host runs."""
    return time.monotonic_ns() // 1_000_000


async def end_task(task: "asyncio.Task[None]") -> None:
    """Python 3.11's `wait_for`, which nats-py uses, may lose a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_CANCEL_AGAIN_S)


async def wait_for_end(end: asyncio.Event, num_taken: Callable[[], int]) -> None:
    """Wait for the end of a subscription, or until it has taken nothing for `_IDLE_S`."""
    before = -1
    while before != num_taken():
        before = num_taken()
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_S):
                await end.wait()
            return


def seal(records: bytes, *, key: bytes, incarnation: int, at_ms: int) -> bytes:
    clock = at_ms.to_bytes(_CLOCK_BYTES, "little")
    return _mac(key, incarnation, clock + records) + clock + records


def _mac(key: bytes, incarnation: int, data: bytes) -> bytes:
    whole = incarnation.to_bytes(8, "little") + data
    return blake2b(whole, digest_size=_MAC_BYTES, key=key, person=b"kvhold-bus").digest()


class Inbox:
    """The waiting records of one incarnation, without gaps.

    begins: the change after which it gets all changes; taken ones are gone. None: none has come
    """

    def __init__(self, incarnation: int, key: bytes, clock: Callable[[], int]) -> None:
        self.incarnation, self.key = incarnation, key
        self._clock = clock
        self._records: deque[tuple[p.PeerChanges, int]] = deque()
        self._waiting_bytes = 0
        self._begins: int | None = None
        self._ends = 0
        self._ahead_ms = 0
        self._fresh_at_ms = clock() - int(1000 * SILENT_S)
        self._arrived = asyncio.Event()

    def welcomed(self, peer_clock_ms: int, asked_ms: int) -> None:
        """asked_ms: this host's clock, not later than the peer's."""
        self._ahead_ms = asked_ms - peer_clock_ms

    @property
    def is_fresh(self) -> bool:
        return self._left_s > 0

    @property
    def _left_s(self) -> float:
        return SILENT_S - (self._clock() - self._fresh_at_ms) / 1000

    def put(self, data: bytes) -> str:
        """Why the record is ignored; empty: it is not."""
        body = data[_MAC_BYTES:]
        if not compare_digest(_mac(self.key, self.incarnation, body), data[:_MAC_BYTES]):
            return "forged"
        try:
            records = list(_records_of(memoryview(body)[_CLOCK_BYTES:]))
        except ProtocolError:
            return "protocol"
        now_ms = self._clock()
        sealed_ms = int.from_bytes(body[:_CLOCK_BYTES], "little")
        self._ahead_ms = min(self._ahead_ms, now_ms - sealed_ms)
        if now_ms - (sealed_ms + self._ahead_ms) <= 1000 * SILENT_S:
            self._fresh_at_ms = now_ms
        for record, nbytes in records:
            self._add(record, nbytes)
        self._arrived.set()
        return ""

    def _add(self, record: p.PeerChanges, nbytes: int) -> None:
        end = record.after + _num_changes(record)
        if self._begins is not None and end <= self._ends:
            return
        if self._begins is None or record.after != self._ends:
            self._records.clear()
            self._waiting_bytes, self._begins, self._ends = 0, record.after, record.after
        if end == record.after:
            return
        if self._waiting_bytes + nbytes > _MOST_WAITING_BYTES:
            self._records.clear()
            self._waiting_bytes, self._begins = 0, None
            return
        self._records.append((record, nbytes))
        self._waiting_bytes += nbytes
        self._ends = end

    def continues(self, number: int) -> bool:
        return self._begins is not None and self._begins <= number and self.is_fresh

    def drop(self, number: int) -> None:
        while self._records and self._records[0][0].after < number:
            self._pop()

    async def next(self, number: int) -> p.PeerChanges | None:
        while self.continues(number):
            if self._records:
                return self._pop()
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.001, self._left_s)):
                    await self._arrived.wait()
        return None

    def _pop(self) -> p.PeerChanges:
        record, nbytes = self._records.popleft()
        self._waiting_bytes -= nbytes
        self._begins = self._records[0][0].after if self._records else self._ends
        return record


class Inboxes:
    def __init__(self, metrics: Metrics, clock: Callable[[], int] = clock_ms) -> None:
        self._metrics = metrics
        self.now_ms = clock
        self._inboxes: dict[int, Inbox] = {}
        self.own_incarnation = 0
        self.num_ignored = 0

    def open(self, incarnation: int, told: p.PeerBus, *, asked_ms: int, own: Inbox | None) -> Inbox:
        """own: the caller's inbox, reused for the same incarnation. Another follower's is replaced

        Raises ValueError.
        """
        if len(told.key) != KEY_BYTES or not 0 < incarnation < 1 << 64:
            raise ValueError(f"a bus with a key of {len(told.key)} bytes")
        inbox = self._inboxes.get(incarnation)
        if inbox is None or inbox is not own or inbox.key != told.key:
            inbox = self._inboxes[incarnation] = Inbox(incarnation, told.key, self.now_ms)
        inbox.welcomed(told.clock_ms, asked_ms)
        return inbox

    def close(self, inbox: Inbox) -> None:
        if self._inboxes.get(inbox.incarnation) is inbox:
            del self._inboxes[inbox.incarnation]

    def put(self, incarnation: int | None, data: bytes) -> None:
        if incarnation is not None and incarnation == self.own_incarnation:
            return
        inbox = None if incarnation is None else self._inboxes.get(incarnation)
        if inbox is None:
            reason = "unknown"
        elif not _HEAD_BYTES < len(data) <= MOST_SEALED_BYTES:
            reason = "size"
        else:
            reason = inbox.put(data)
        if reason:
            self.num_ignored += 1
            self._metrics.add("kvhold_peer_bus_ignored", reason=reason)


def _records_of(data: memoryview) -> Iterator[tuple[p.PeerChanges, int]]:
    while data:
        end = LENGTH_BYTES + body_length(data[:LENGTH_BYTES])
        if end > len(data):
            raise ProtocolError("a record on the bus is cut off")
        yield _record.decode(data[LENGTH_BYTES:end]), end
        data = data[end:]


def _num_changes(record: p.PeerChanges) -> int:
    return sum(len(run.digests) for run in record.runs) // 8 + len(record.clears)
