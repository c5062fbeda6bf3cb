"""Serves chunks and changes to followers, lends chunks, and loads prompts. One event loop.

The bytes in flight and per second are limited, in total and per peer.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvhold import __version__
from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.net import peers as p
from kvhold.net.central import split_keys
from kvhold.net.remote_memory import RemoteMemory, address_of
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.byte_budget import ByteBudget
from kvhold.node.byte_rate import ByteRate
from kvhold.node.lending import ChunkSource, PeerLeases
from kvhold.node.login_server import LoginServer, ServedProtocol
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.served_peers import ServedPeer, ServedPeers
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.peers.bus import clock_ms
from kvhold.tiers.peers.channel import NIXL, NOT_WITH_TLS, TCP, ChannelPlan

_PROTOCOL = ServedProtocol(
    p.PEERS_MAGIC, p.PEERS_VERSION, "kvhold node for peers", p.DEFAULT_PORT, p.VERSIONS_APART
)
_GROUP_BYTES = 17 << 20  # pinned for one get: a batch with headers
_LENT_GROUP_BYTES = 64 << 20  # by one lease
_GROUP_KEYS = 128  # per turn of the node's loop
_GROUP_S = 0.1
_LEAST_BYTES_PER_S = 1 << 20
_request: Decoder[p.Request] = Decoder(p.Request)


class RunningLoad(Protocol):
    async def holds(self, keys: Sequence[bytes]) -> p.PeerHolds: ...

    def end(self) -> None: ...


class PromptLoads(Protocol):
    def begin(self, request: p.PeerLoad) -> RunningLoad: ...


@dataclass
class _Conversation:
    peer: ServedPeer
    leases: PeerLeases
    load: RunningLoad | None = None


class PeerServer(LoginServer):
    address_setting = "listen"

    def __init__(
        self,
        config: ServePeersConfig,
        source: ChunkSource,
        feed: PeerFeed,
        metrics: Metrics,
        plan: ChannelPlan | None = None,
        loads: PromptLoads | None = None,
    ) -> None:
        """metrics: of the server's thread
        plan:    None: chunks are sent over TCP

        Raises ConfigError.
        """
        if 0 < config.bytes_per_s < _LEAST_BYTES_PER_S:
            raise ConfigError(
                f"peers.bytes_per_s = {config.bytes_per_s}: one chunk would take seconds; set at "
                "least 1MiB, or 0 for no limit"
            )
        super().__init__(config, "peers", config.listen, _PROTOCOL)
        self._config = config
        self._source = source
        self._feed = feed
        self._loads = loads
        self.metrics = metrics
        plan = plan or ChannelPlan()
        is_refused = bool(config.tls_cert) and plan.is_measured
        self._memory = None if plan.reason or is_refused else plan.memory
        self._why_not_lent = plan.reason or (NOT_WITH_TLS if is_refused else "")
        self.peers = ServedPeers(metrics)
        self.budget = ByteBudget(max(1, config.in_flight_bytes))
        self.rate = ByteRate(config.bytes_per_s)
        self._most_at_once = self.budget.limit
        if config.bytes_per_s:
            at_once = int(config.bytes_per_s * _GROUP_S)
            self._most_at_once = min(self._most_at_once, at_once)
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        """Raises NodeError."""
        self._listener = self._listen()

    def start(self) -> None:
        assert self._listener is not None
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Nothing is pinned when this returns."""
        if self._accepting is not None:
            await self._end(self._accepting)
        self.close()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    @property
    def num_served(self) -> int:
        return self._num_served

    def _welcome(self, version: int) -> p.PeerWelcome:
        key = self._feed.bus_key
        return p.PeerWelcome(
            version,
            __version__,
            self._feed.incarnation,
            socket.gethostname(),
            p.PeerBus(key, clock_ms()) if key else None,
            "" if self._memory is None else NIXL,
        )

    @property
    def channel(self) -> tuple[str, str]:
        """The offered channel, and why it is not NIXL."""
        reason = self._why_not_lent if self._memory is None else self._memory.fault
        return (TCP if reason else NIXL), reason

    def _note_refused(self, host: str, reason: str) -> None:
        self.peers.refused(host, reason)

    async def _converse_with(self, stream: Stream) -> None:
        request = await self._next_request(stream)
        introduction = request if isinstance(request, p.Introduce) else None
        peer = self.peers.joined(stream.host, introduction)
        timeout_s = self._config.request_timeout_s
        leases = PeerLeases(self._source, self.budget, peer, timeout_s=timeout_s)
        conversation = _Conversation(peer, leases)
        try:
            if introduction is not None:
                request = await self._next_request(stream)
            while True:
                await self._answer(stream, request, conversation)
                request = await self._next_request(stream)
        finally:
            if conversation.load is not None:
                conversation.load.end()
            await leases.end()
            self.peers.left(peer)

    async def _next_request(self, stream: Stream) -> p.Request:
        prefix = await stream.read(LENGTH_BYTES)
        async with asyncio.timeout(self._config.request_timeout_s):
            return _request.decode(await stream.read(body_length(prefix)))

    async def _answer(
        self, stream: Stream, request: p.Request, conversation: _Conversation
    ) -> None:
        peer, leases = conversation.peer, conversation.leases
        match request:
            case p.Follow():
                peer.following += 1
                try:
                    await self._be_followed(stream, request)
                finally:
                    peer.following -= 1
            case p.PeerGet():
                await self._get(stream, request, peer)
            case p.OpenChannel():
                await self._send(stream, [encode(self._offer())])
            case p.GetSample():
                sample = self._lent_memory().sample
                self.rate.add(sample.nbytes)
                await self._send(stream, [encode(p.PeerValues([sample.nbytes])), sample])
            case p.PeerRead():
                await self._lend(stream, request, peer, leases)
            case p.Returned():
                leases.returned(request.lease)
            case p.PeerLoad():
                if self._loads is None or conversation.load is not None:
                    raise ProtocolError("a second load on a connection, or loads are not served")
                conversation.load = self._loads.begin(request)
            case p.PeerHas():
                if conversation.load is None:
                    raise ProtocolError("a peer asks for a load that it has not begun")
                keys = split_keys(request.keys) if request.keys else []
                if len(keys) > p.MOST_KEYS:
                    raise ProtocolError(f"{len(keys)} keys; at most {p.MOST_KEYS} are allowed")
                await self._send(stream, [encode(await conversation.load.holds(keys))])
            case p.Introduce():
                raise ProtocolError("a peer introduces itself twice, or too late")

    async def _be_followed(self, stream: Stream, request: p.Follow) -> None:
        number = request.after if request.incarnation == self._feed.incarnation else -1
        while True:
            record = self._feed.changes_after(number)
            if record is None:
                for page in self._feed.pages():
                    await self._send(stream, [encode(page)])
                    number = page.number
            else:
                data, number = record
                await self._send(stream, [data])
            await self._feed.wait(number)

    async def _get(self, stream: Stream, request: p.PeerGet, peer: ServedPeer) -> None:
        keys, room, starts = _keys_of(request), request.room, request.starts
        if starts is not None and (len(starts) != len(keys) or min(starts) < 0):
            raise ProtocolError("each range has a start, which is 0 or later")
        # a range needs its whole frame
        most = room if starts is None else [self._feed.size_of(key) for key in keys]
        begin = 0
        while begin < len(keys):
            end = _group_end(most, begin, min(_GROUP_BYTES, self._most_at_once))
            await self._get_group(
                stream,
                peer,
                keys[begin:end],
                room[begin:end],
                None if starts is None else starts[begin:end],
                most[begin:end],
            )
            begin = end

    async def _get_group(
        self,
        stream: Stream,
        peer: ServedPeer,
        keys: list[bytes],
        room: list[int],
        starts: list[int] | None,
        most: list[int],
    ) -> None:
        nbytes = min(self.budget.limit, sum(max(0, one) for one in most))
        taken_bytes = await self._take(keys, room, peer)
        async with self.budget.taken(nbytes, peer), self._source.lent(keys, most) as frames:
            sizes: list[int | None] = []
            pieces: list[memoryview] = []
            for at, frame in enumerate(frames):
                if frame is not None and starts is not None:
                    frame = _range_of(frame, starts[at], room[at])
                sizes.append(None if frame is None else size_of(frame))
                pieces += frame or ()
            self._sent(peer, sizes, taken_bytes)
            await self._send(stream, [encode(p.PeerValues(sizes)), *pieces])

    async def _take(self, keys: Sequence[bytes], room: Sequence[int], peer: ServedPeer) -> int:
        """Returns the expected bytes."""
        if not self.rate.bytes_per_s:
            return 0
        began_s = asyncio.get_running_loop().time()
        sizes = [self._feed.size_of(key) for key in keys]
        nbytes = sum(min(size, max(0, most)) for size, most in zip(sizes, room, strict=True))
        await self.rate.take(nbytes, peer)
        peer.waited(asyncio.get_running_loop().time() - began_s)
        return nbytes

    def _sent(self, peer: ServedPeer, sizes: Sequence[int | None], taken_bytes: int) -> None:
        found = [size for size in sizes if size is not None]
        self.rate.add(sum(found) - taken_bytes)
        peer.sent(len(found), sum(found), absent=len(sizes) - len(found))

    def _lent_memory(self) -> RemoteMemory:
        if self._memory is None:
            raise ProtocolError("this node lends no memory (its peers.channel)")
        return self._memory

    def _offer(self) -> p.ChannelOffer:
        memory = self._memory
        if memory is None or memory.fault:
            return p.ChannelOffer(self.channel[1])
        return p.ChannelOffer(
            "",
            memory.number,
            memory.metadata,
            memory.region.address,
            memory.region.nbytes,
            address_of(memory.sample),
            memory.sample.nbytes,
        )

    async def _lend(
        self, stream: Stream, request: p.PeerRead, peer: ServedPeer, leases: PeerLeases
    ) -> None:
        memory, keys = self._lent_memory(), _keys_of(request)
        end = _group_end(request.room, 0, min(_LENT_GROUP_BYTES, self._most_at_once))
        taken_bytes = await self._take(keys[:end], request.room[:end], peer)
        lease, frames = await leases.lend(keys[:end], request.room[:end])
        sizes: list[int | None] = []
        lent, addresses, pieces = [0] * end, [0] * end, list[memoryview]()
        for at, frame in enumerate(frames):
            sizes.append(None if frame is None else size_of(frame))
            parts = list(frame or ())
            if len(parts) == 2 and parts[1].nbytes:
                address = address_of(parts[1])
                if memory.region.has(address, parts[1].nbytes):
                    lent[at], addresses[at] = parts.pop().nbytes, address
            pieces += parts
        self._sent(peer, sizes, taken_bytes)
        answer = p.Lent(memory.number, lease, sizes, lent, addresses)
        await self._send(stream, [encode(answer), *pieces])

    async def _send(self, stream: Stream, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        async with asyncio.timeout(self._config.request_timeout_s):
            await stream.send(pieces)


def _keys_of(request: p.PeerGet | p.PeerRead) -> list[bytes]:
    keys = split_keys(request.keys)
    if not 0 < len(keys) <= p.MOST_KEYS or len(request.room) != len(keys):
        raise ProtocolError(
            f"a get of {len(keys)} keys with {len(request.room)} sizes; 1 to {p.MOST_KEYS} keys "
            "are allowed, each with a size"
        )
    return keys


def _group_end(most: Sequence[int], begin: int, limit_bytes: int) -> int:
    nbytes, end = 0, begin
    while end < min(len(most), begin + _GROUP_KEYS):
        nbytes += max(0, most[end])
        if end > begin and nbytes > limit_bytes:
            break
        end += 1
    return end


def _range_of(frame: Parts, start: int, nbytes: int) -> Parts | None:
    """None: the frame ends earlier, or the range is empty."""
    if not 0 < nbytes <= size_of(frame) - start:
        return None
    found: list[memoryview] = []
    for part in frame:
        if nbytes and start < part.nbytes:
            found.append(part[start : start + nbytes])
            nbytes -= found[-1].nbytes
        start = max(0, start - part.nbytes)
    return found
