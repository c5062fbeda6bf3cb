"""A peer that fails is left alone for a while (`breaker.py`). One event loop."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import TypeAlias

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.core.status import FollowedPeerStatus
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.pool import Exchange, Pool, run
from kvhold.net.stream import Address, Stream
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.breaker import Breaker
from kvhold.tiers.calls import now
from kvhold.tiers.exchanges import Getting, batched, read_body, take_all
from kvhold.tiers.peers.channel import BATCH_BYTES, ChannelPlan, PeerChannel
from kvhold.tiers.peers.faults import (
    PeerDenied,
    PeerFault,
    PeerGone,
    PeerRefuses,
    PeerSlow,
    fault_of,
    refusal_of,
)
from kvhold.tiers.peers.record import PeerRecord
from kvhold.tiers.peers.speed import PeerSpeed

_MOST_KEYS = 128  # of one get: one turn of the peer
_greeting: Decoder[p.Greeting] = Decoder(p.Greeting)
_values: Decoder[p.PeerValues] = Decoder(p.PeerValues)

Connect: TypeAlias = Callable[[Address, ssl.SSLContext | None], Awaitable[Stream]]


class Peer:
    """number:       its bit in the index
    incarnation:  of the node whose chunks are in the index; 0: none
    is_self:      this node itself, named in a list that all hosts share
    is_elsewhere: the same node is followed at another of its addresses
    away_for:     why it is not followed; None: it is, or was not tried yet
    tried:        set when it is followed, or cannot be
    offers_nixl:  it lends its memory
    """

    def __init__(
        self,
        number: int,
        address: Address,
        *,
        token: str,
        tls: ssl.SSLContext | None,
        connections: int,
        pause_s: float,
        connect: Connect,
        introduction: Callable[[], p.Introduce],
        metrics: Metrics,
        plan: ChannelPlan | None = None,
        threads: Executor | None = None,
    ) -> None:
        self.number = number
        self.address = address
        self.incarnation = self.after = 0
        self.clears: dict[bytes, int] = {}
        self.is_followed = self.is_self = self.is_elsewhere = self.is_open = False
        self.is_listed = True
        self.tried = asyncio.Event()
        self.away_for: PeerFault | None = None
        self.state_at_s = time.monotonic()
        self.is_by_bus = False
        self._paused_at_s = 0.0
        self.record = PeerRecord(str(address), metrics)
        self.lost_s: float | None = None
        self.asked_bytes = 0
        self.speed = PeerSpeed()
        self._token, self._tls, self._connect = token, tls, connect
        self._pool = Pool(self.open, connections)
        self.channel = PeerChannel(plan or ChannelPlan(), str(address), self._pool)
        self.offers_nixl = False
        self._breaker = Breaker(failures=1, first_pause_s=pause_s)
        self._threads = threads
        self._introduction = introduction
        self.kvhold = self.name = ""

    @property
    def mask(self) -> int:
        return 1 << self.number

    @property
    def last_fault(self) -> PeerFault | None:
        return self.record.last_fault

    @property
    def is_paused(self) -> bool:
        next_try_s = self._breaker.next_try_s
        return next_try_s is not None and time.monotonic() < next_try_s

    def may_be_asked(self) -> bool:
        return self.is_followed and not self.is_paused

    def why_not_asked(self) -> PeerFault | None:
        if self.is_followed:
            return self.last_fault if self.is_paused else None
        return self.away_for or PeerGone("probe", self.address, "closed", "not followed yet")

    def changed_state(
        self,
        *,
        is_followed: bool = False,
        is_self: bool = False,
        is_elsewhere: bool = False,
        away_for: PeerFault | None = None,
    ) -> None:
        before = self.is_followed, self.is_self, self.is_elsewhere, type(self.away_for)
        if before != (is_followed, is_self, is_elsewhere, type(away_for)):
            self.state_at_s = time.monotonic()
        self.is_followed, self.away_for = is_followed, away_for
        self.is_self, self.is_elsewhere = is_self, is_elsewhere

    def status(self, num_chunks: int) -> FollowedPeerStatus:
        record, now_s = self.record, time.monotonic()
        state, fault, since_s = self._state()
        last = record.last_fault
        return {
            "address": str(self.address),
            "name": self.name,
            "state": state,
            "cause": "" if fault is None else fault.cause,
            "by_bus": self.is_by_bus,
            "channel": self.channel.kind,
            "channel_reason": self.channel.reason,
            "nixl_bytes": self.channel.nixl_bytes,
            "state_s": round(max(0.0, now_s - since_s), 3),
            "incarnation": self.incarnation,
            "version": self.kvhold,
            "chunks": num_chunks,
            "events": record.num_events,
            "events_per_s": round(record.events.per_s, 1),
            "loads": record.num_loads,
            "loads_per_s": round(record.loads.per_s, 2),
            "loaded_chunks": record.num_chunks,
            "loaded_bytes": record.nbytes,
            "loaded_bytes_per_s": round(record.loaded_bytes.per_s, 1),
            "absent_chunks": record.num_absent,
            "last_load_s": record.last_load_s,
            "median_load_s": record.median_load_s,
            "last_fault": "" if last is None else str(last),
            "last_fault_ago_s": None
            if last is None
            else round(max(0.0, now_s - record.last_fault_at_s), 3),
        }

    def _state(self) -> tuple[str, PeerFault | None, float]:
        fault = self.away_for
        if self.is_self:
            return "itself", None, self.state_at_s
        if self.is_elsewhere:
            return "elsewhere", None, self.state_at_s
        if self.is_followed and self.is_paused:
            return "paused", self.last_fault, self._paused_at_s
        if self.is_followed:
            return "following", None, self.state_at_s
        if fault is None:
            return "connecting", None, self.state_at_s
        is_refused = isinstance(fault, (PeerRefuses, PeerDenied))
        return "refused" if is_refused else "away", fault, self.state_at_s

    async def fetch(self, items: Sequence[Getting], *, deadline_s: float) -> PeerFault | None:
        """Sizes of missing values stay None. Returns the fault of unanswered ones.

        Memory that NIXL may still write is waited for, past the deadline, too.
        """
        nbytes = sum(item.nbytes for item in items)
        self.asked_bytes += nbytes
        try:
            return await self._fetch(items, deadline_s)
        finally:
            self.asked_bytes -= nbytes

    async def _fetch(self, items: Sequence[Getting], deadline_s: float) -> PeerFault | None:
        began_s = now()
        left = await self.channel.read(items, timeout_s=deadline_s)
        batches = [_GetBatch(batch) for batch in batched(left, _MOST_KEYS, BATCH_BYTES)]
        timeout_s = deadline_s - (now() - began_s)
        try:
            async with asyncio.timeout(timeout_s):
                await run(self._pool, batches, fault=lambda error: self.fault_of("get", error))
        except TimeoutError:
            text = f"no answer within {deadline_s:g} s"
            return self._failed(PeerSlow("get", self.address, "slow", text), items)
        if (fault := next((batch.fault for batch in batches if batch.fault), None)) is not None:
            return self._failed(self.fault_of("get", fault), items)
        self._breaker.succeeded()
        sizes = [item.size for item in items if item.size is not None]
        took_s = now() - began_s
        self.speed.add(took_s, sum(sizes), began_s + took_s)
        self.record.loaded(
            took_s,
            num_chunks=len(sizes),
            nbytes=sum(sizes),
            num_absent=len(items) - len(sizes),
        )
        return None

    def introduction(self) -> bytearray:
        return encode(self._introduction())

    async def open_to_follow(self) -> tuple[Stream, p.PeerWelcome]:
        """Raises TierError, OSError, EOFError, ProtocolError."""
        stream = await self._connect(self.address, self._tls)
        with on_error(stream.close):
            hello = login.LoginHello(p.PEERS_MAGIC, p.PEERS_VERSION, self._token)
            await stream.send([encode(hello)])
            greeting = _greeting.decode(await read_body(stream, login.MAX_HELLO_BYTES))
            if isinstance(greeting, login.LoginRefused):
                raise refusal_of(self.address, greeting)
            if not 0 <= p.PEERS_VERSION - greeting.version <= p.VERSIONS_APART:
                text = (
                    f"it answers in protocol {greeting.version}, and this node speaks "
                    f"{p.PEERS_VERSION}: upgrade the older one"
                )
                raise PeerRefuses("connect", self.address, "version", text)
        return stream, greeting

    def mended(self) -> None:
        self._pool.close_idle()
        self._breaker.succeeded()
        self.channel.follow(self.incarnation, is_offered=self.offers_nixl)

    def _failed(self, fault: PeerFault, items: Sequence[Getting]) -> PeerFault:
        self._pool.close_idle()
        self.speed.forget()
        self.record.load_failed(fault, num_missed=sum(item.size is None for item in items))
        if not self.is_paused:
            self._paused_at_s = time.monotonic()
        self._breaker.failed(now())
        return fault

    def fault_of(self, operation: str, error: Exception) -> PeerFault:
        return fault_of(operation, self.address, error)

    def close(self) -> None:
        self._pool.close()
        self.record.close()

    async def end_channel(self) -> None:
        await self.channel.end()

    async def open(self) -> Stream:
        stream, welcome = await self.open_to_follow()
        if welcome.incarnation != self.incarnation:
            stream.close()
            raise PeerGone("connect", self.address, "restarted", "the node was restarted")
        with on_error(stream.close):
            await stream.send([self.introduction()])
        stream.threads = self._threads
        return stream


class _GetBatch(Exchange):
    def __init__(self, items: list[Getting]) -> None:
        self._items = items
        self.value_bytes = sum(one.nbytes for one in items)
        starts = [one.start for one in items if one.start is not None]
        self.request = [
            encode(
                p.PeerGet(
                    b"".join(one.key for one in items),
                    [one.nbytes for one in items],
                    starts or None,
                )
            )
        ]

    async def take(self, stream: Stream) -> None:
        left = list(self._items)
        while left:
            answer = _values.decode(await read_body(stream))
            if not 0 < len(answer.sizes) <= len(left):
                raise ProtocolError(
                    f"the answer to a get of {len(left)} keys has a wrong number of sizes"
                )
            now, left = left[: len(answer.sizes)], left[len(answer.sizes) :]
            await take_all(stream, now, answer.sizes)
