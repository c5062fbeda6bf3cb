"""Publishes a node's chunks as KV cache events, over ZMQ and in vLLM's format."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kvhold.core.events_config import EventsConfig
from kvhold.core.keys import NAME_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.router_events import (
    ChunkDescription,
    ClearedBlocks,
    RemovedBlocks,
    RouterBatch,
    RouterEvent,
    StoredBlocks,
)
from kvhold.core.status import RouterEventsStatus
from kvhold.node.notifier import Notifier
from kvhold.node.router_endpoints import bind_endpoint, import_zmq
from kvhold.node.router_ledger import MOST_PLACES, RouterLedger

log = logging.getLogger(__name__)

_MOST_WAITING = 1_000_000  # changes of chunks, about 150 bytes each
_MOST_WAITING_BYTES = 64 << 20  # of descriptions
_MOST_USED = 4096
_AT_ONCE = 1000
_MOST_EVENTS = 100  # in one batch
_PACE_S, _BUSY_PACE_S = 0.01, 0.001  # between two turns
_IDLE_MS, _REPLAYING_MS = 1000, 10
_MOST_REPLAYS = 32
_SEND_LIMIT = 10_000  # batches for a slow subscriber
_MOST_REQUEST_BYTES = 4096
_END = (-1).to_bytes(8, "big", signed=True)
_KINDS = {StoredBlocks: "stored", RemovedBlocks: "removed", ClearedBlocks: "cleared"}
_encoder = msgspec.msgpack.Encoder()


class RouterPublisher:
    def __init__(self, config: EventsConfig, metrics: Metrics) -> None:
        """metrics: used by the publisher's thread

        Raises ConfigError, NodeError.
        """
        self.metrics = metrics
        self._lock = threading.Lock()
        self._moves: dict[tuple[bytes, int], bool] = {}
        # freed by the publisher's thread: that takes long
        self._dropped: list[dict[tuple[bytes, int], bool]] = []
        self._taken: deque[tuple[tuple[bytes, int], bool]] = deque()
        self._descriptions: deque[ChunkDescription] = deque()
        self._description_bytes, self._num_refused = 0, 0
        self._used: deque[bytes] = deque(maxlen=_MOST_USED)
        self._is_woken, self._is_stopped = False, False
        self._ledger = RouterLedger(config.description_bytes, self._count_loss)
        self._topic = config.topic.encode()
        self._sequence = 0
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_bytes, self._most_buffer_bytes = 0, config.replay_bytes
        # identity -> next number to send
        self._replays: dict[bytes, int] = {}
        self._thread = threading.Thread(target=self._run, name="kvhold-events", daemon=True)
        zmq = self._zmq = import_zmq()
        with ExitStack() as stack:
            self._wake = Notifier()
            stack.callback(self._wake.close)
            self._context = zmq.Context(io_threads=1)
            stack.callback(self._context.destroy, linger=0)
            self._publishing = self._socket(zmq.PUB, _SEND_LIMIT)
            self.address = bind_endpoint(
                self._publishing, config.publish, "events.publish", insecure=config.insecure
            )
            self.replay_address = ""
            self._replaying: Any = None
            if config.replay:
                self._replaying = self._socket(zmq.ROUTER, _SEND_LIMIT)
                self._replaying.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_address = bind_endpoint(
                    self._replaying, config.replay, "events.replay", insecure=config.insecure
                )
            self._resources = stack.pop_all()

    def _socket(self, kind: int, most_sent: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.LINGER, 0)
        made.setsockopt(self._zmq.SNDHWM, most_sent)
        made.setsockopt(self._zmq.RCVHWM, _MOST_REPLAYS)
        made.setsockopt(self._zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        return made

    # Any thread.

    def note(self, key: bytes, place: int, present: bool) -> None:
        """place: 0: memory; n: disk n; -n: shared store n, where the key may be a prefix"""
        if abs(place) >= MOST_PLACES:
            return
        with self._lock:
            if len(self._moves) >= _MOST_WAITING:
                self._dropped.append(self._moves)
                self._moves = {}
            if place < 0:
                self._moves.pop((key, place), None)  # prefixes keep their turn
            self._moves[key, place] = present
            self._wake_up()

    def undescribed(self, names: bytes) -> list[int]:
        needed: list[int] = []
        for at in range(len(names) // NAME_BYTES):
            name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            if self._ledger.has(name):
                self._used.append(name)
            else:
                needed.append(at)
        return needed

    def describe(self, chunks: Sequence[ChunkDescription]) -> None:
        nbytes = sum(_nbytes(chunk) for chunk in chunks)
        with self._lock:
            if self._description_bytes + nbytes > _MOST_WAITING_BYTES:
                self._num_refused += len(chunks)
            else:
                self._description_bytes += nbytes
                self._descriptions.extend(chunks)
            self._wake_up()

    def status(self) -> RouterEventsStatus:
        return {
            "publish": self.address,
            "replay": self.replay_address,
            "next_sequence": self._sequence,
            "described_chunks": len(self._ledger),
            "description_bytes": self._ledger.nbytes,
            "replay_bytes": self._buffer_bytes,
            "waiting_changes": len(self._moves) + len(self._taken),
        }

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._is_stopped = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._resources.close()

    def _wake_up(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._wake.set()

    # The publisher's thread.

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake.fileno(), self._zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, self._zmq.POLLIN)
        self._publish([ClearedBlocks()])  # of an earlier node at this address
        while not self._is_stopped:
            is_busy = False
            try:
                self._wake.clear()
                is_busy = self._take_turn()
                self._accept_replays()
                self._go_on_replaying()
            except Exception:
                log.exception("events for routers: this turn has failed")
            time.sleep(_BUSY_PACE_S if is_busy else _PACE_S)
            if not is_busy:
                poller.poll(_REPLAYING_MS if self._replays else _IDLE_MS)

    def _take_turn(self) -> bool:
        with self._lock:
            self._is_woken = False
            dropped, self._dropped = self._dropped, []
            moves: dict[tuple[bytes, int], bool] = {}
            if not self._taken or dropped:
                moves, self._moves = self._moves, moves
            descriptions, self._descriptions = self._descriptions, deque()
            self._description_bytes = 0
            num_refused, self._num_refused = self._num_refused, 0
        if dropped:
            log.warning(
                "events for routers: more than %d chunks changed at once; all are announced as "
                "removed, and come back as they change",
                _MOST_WAITING,
            )
            self._count_loss("overflow")
            self._taken.clear()
            self._ledger.forget_all()
        self._taken.extend(moves.items())
        for _ in range(min(len(self._taken), _AT_ONCE)):
            (key, place), present = self._taken.popleft()
            self._ledger.move(key, place, present=present)
        while self._used:
            self._ledger.use(self._used.popleft())
        for description in descriptions:
            self._ledger.describe(description)
        for _ in range(num_refused):
            self._count_loss("full")
        events = self._ledger.changes()
        for first in range(0, len(events), _MOST_EVENTS):
            self._publish(events[first : first + _MOST_EVENTS])
        return bool(self._taken)

    def _publish(self, events: list[RouterEvent]) -> None:
        number, payload = self._sequence, _encoder.encode(RouterBatch(time.time(), events, 0))
        self._sequence += 1
        # PUB drops batches for a slow subscriber
        self._publishing.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._buffer.append((number, payload))
        self._buffer_bytes += len(payload)
        while self._buffer_bytes > self._most_buffer_bytes:
            self._buffer_bytes -= len(self._buffer.popleft()[1])
        for event in events:
            self.metrics.add("kvhold_router_events", kind=_KINDS[type(event)])

    def _accept_replays(self) -> None:
        if self._replaying is None:
            return
        for _ in range(_MOST_REPLAYS):
            if not self._replaying.poll(0):
                return
            frames = self._replaying.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8 or len(self._replays) >= _MOST_REPLAYS:
                self._count_loss("replay")
                continue
            self._replays[frames[0]] = int.from_bytes(frames[2], "big")

    def _go_on_replaying(self) -> None:
        for identity, first in list(self._replays.items()):
            try:
                for number, payload in self._since(first):
                    self._answer(identity, self._topic, number, payload)
                    self._replays[identity] = number + 1
                if self._replays[identity] < self._sequence:
                    continue
                self._answer(identity, b"", -1, b"")
            except self._zmq.Again:
                continue
            except self._zmq.ZMQError as error:
                log.debug("events for routers: who asked for a replay is gone: %s", error)
            del self._replays[identity]

    def _since(self, number: int) -> list[tuple[int, bytes]]:
        if not self._buffer:
            return []
        start = max(0, number - self._buffer[0][0])
        return [self._buffer[at] for at in range(start, min(len(self._buffer), start + _AT_ONCE))]

    def _answer(self, identity: bytes, topic: bytes, number: int, payload: bytes) -> None:
        sequence = _END if number < 0 else number.to_bytes(8, "big")
        self._replaying.send_multipart(
            (identity, b"", topic, sequence, payload), flags=self._zmq.NOBLOCK
        )

    def _count_loss(self, reason: str) -> None:
        self.metrics.add("kvhold_router_losses", reason=reason)


def _nbytes(chunk: ChunkDescription) -> int:
    return sum(len(packed) for packed in chunk.stored if packed is not None)
