"""Serves this node's chunks and changes to its followers, read-only.

The bytes in flight are limited, in total and per peer (`byte_budget.py`). One event loop, in
`peer_thread.py`.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvhold import __version__
from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.net import peers as p
from kvhold.net.central import split_keys
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.byte_budget import ByteBudget
from kvhold.node.login_server import LoginServer, ServedProtocol
from kvhold.node.peer_feed import PeerFeed
from kvhold.node.served_peers import ServedPeer, ServedPeers
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.peers.bus import clock_ms

_PROTOCOL = ServedProtocol(p.PEERS_MAGIC, p.PEERS_VERSION, "kvhold node for peers", p.DEFAULT_PORT)
_GROUP_BYTES = 8 << 20  # pinned at once for one get
_GROUP_KEYS = 128  # per turn of the node's loop
_request: Decoder[p.Request] = Decoder(p.Request)


class ChunkSource(Protocol):
    def lent(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> AbstractAsyncContextManager[list[Parts | None]]:
        """Frames stay in place until the block ends. None: not here, or larger than its room."""


class PeerServer(LoginServer):
    address_setting = "listen"

    def __init__(
        self, config: ServePeersConfig, source: ChunkSource, feed: PeerFeed, metrics: Metrics
    ) -> None:
        """metrics: of the server's thread

        Raises ConfigError: an address that may not be exposed, or unusable credentials.
        """
        super().__init__(config, "peers", config.listen, _PROTOCOL)
        self._config = config
        self._source = source
        self._feed = feed
        self.metrics = metrics
        self.peers = ServedPeers(metrics)
        self.budget = ByteBudget(max(1, config.in_flight_bytes))
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

    def _welcome(self) -> p.PeerWelcome:
        key = self._feed.bus_key
        return p.PeerWelcome(
            p.PEERS_VERSION,
            __version__,
            self._feed.incarnation,
            socket.gethostname(),
            p.PeerBus(key, clock_ms()) if key else None,
        )

    def _note_refused(self, host: str, reason: str) -> None:
        self.peers.refused(host, reason)

    async def _converse_with(self, stream: Stream) -> None:
        request = await self._next_request(stream)
        introduction = request if isinstance(request, p.Introduce) else None
        peer = self.peers.joined(stream.host, introduction)
        try:
            if introduction is not None:
                request = await self._next_request(stream)
            while True:
                await self._answer(stream, request, peer)
                request = await self._next_request(stream)
        finally:
            self.peers.left(peer)

    async def _next_request(self, stream: Stream) -> p.Request:
        prefix = await stream.read(LENGTH_BYTES)
        async with asyncio.timeout(self._config.request_timeout_s):
            return _request.decode(await stream.read(body_length(prefix)))

    async def _answer(self, stream: Stream, request: p.Request, peer: ServedPeer) -> None:
        match request:
            case p.Follow():
                peer.following += 1
                try:
                    await self._be_followed(stream, request)
                finally:
                    peer.following -= 1
            case p.PeerGet():
                await self._get(stream, request, peer)
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
        keys, room, starts = split_keys(request.keys), request.room, request.starts
        if (
            not 0 < len(keys) <= p.MOST_KEYS
            or len(room) != len(keys)
            or (starts is not None and len(starts) != len(keys))
            or min(starts or [0]) < 0
        ):
            raise ProtocolError(
                f"a get of {len(keys)} keys with {len(room)} sizes; 1 to {p.MOST_KEYS} keys are "
                "allowed, each with a size, and ranges begin at 0 or later"
            )
        # a range needs its whole frame
        most = room if starts is None else [self._feed.size_of(key) for key in keys]
        begin = 0
        while begin < len(keys):
            end = _group_end(most, begin, min(_GROUP_BYTES, self.budget.limit))
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
        async with self.budget.taken(nbytes, peer), self._source.lent(keys, most) as frames:
            sizes: list[int | None] = []
            pieces: list[memoryview] = []
            for at, frame in enumerate(frames):
                if frame is not None and starts is not None:
                    frame = _range_of(frame, starts[at], room[at])
                sizes.append(None if frame is None else size_of(frame))
                pieces += frame or ()
            found = [size for size in sizes if size is not None]
            peer.sent(len(found), sum(found), absent=len(sizes) - len(found))
            await self._send(stream, [encode(p.PeerValues(sizes)), *pieces])

    async def _send(self, stream: Stream, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        async with asyncio.timeout(self._config.request_timeout_s):
            await stream.send(pieces)


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
