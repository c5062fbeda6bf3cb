"""`kvhold serve --listen HOST:PORT`. One event loop; values are not copied. Sizes are checked
before memory is reserved.
"""

import asyncio
import signal
from collections.abc import Callable
from math import inf

from kvhold.core.cleanup import on_error
from kvhold.core.config import Config
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import KEY_BYTES
from kvhold.core.store_options import MAX_TTL_S
from kvhold.net import central as c
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.central_store import CentralStore, NotReserved
from kvhold.node.login_server import LoginServer, ServedProtocol
from kvhold.tiers.ram import Entry

_PAGE_KEYS = 10_000
_PROTOCOL = ServedProtocol(
    c.CENTRAL_MAGIC, c.CENTRAL_VERSION, "kvhold central cache", c.DEFAULT_PORT
)
_request: Decoder[c.Request] = Decoder(c.Request)


class Central(LoginServer):
    def __init__(self, config: Config, central_store: CentralStore | None = None) -> None:
        """Raises ConfigError: an address that may not be exposed; CapacityError."""
        super().__init__(config.listen, "listen", config.listen.address, _PROTOCOL)
        self._config = config.listen
        self.central_store = CentralStore(config) if central_store is None else central_store
        self.metrics = self.central_store.metrics
        self._stopped = asyncio.Event()

    async def serve(self, on_ready: Callable[["Central"], None] | None = None) -> None:
        """Raises NodeError: cannot listen."""
        loop = asyncio.get_running_loop()
        listener = self._listen()
        accepting = loop.create_task(self._accept(listener))
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            await self.central_store.start()
            if on_ready is not None:
                on_ready(self)
            await self._stopped.wait()
        finally:
            await self._end(accepting)
            listener.close()
            await self.central_store.close()

    def stop(self) -> None:
        self._stopped.set()

    def _welcome(self, version: int) -> c.CentralWelcome:
        return c.CentralWelcome(version, self._config.max_value_bytes)

    async def _converse_with(self, stream: Stream) -> None:
        while True:
            prefix = await stream.read(LENGTH_BYTES)
            async with asyncio.timeout(self._config.request_timeout_s):
                await self._answer(stream, _request.decode(await stream.read(body_length(prefix))))

    async def _answer(self, stream: Stream, request: c.Request) -> None:
        match request:
            case c.Check():
                await stream.send([encode(c.CentralDone())])
            case c.Probe():
                silent = set[str]()
                sizes = await self.central_store.probe(c.split_keys(request.keys), silent)
                await stream.send([encode(c.ValueSizes(sizes, whole=not silent))])
            case c.Get():
                await self._get(stream, request)
            case c.Put():
                await self._put(stream, request)
            case c.Delete():
                silent = set()
                removed = await self.central_store.delete(c.split_keys(request.keys), silent)
                await stream.send([encode(c.Removed(removed, whole=not silent))])
            case c.Scan():
                await self._scan(stream, request)

    async def _get(self, stream: Stream, request: c.Get) -> None:
        keys = c.split_keys(request.keys)
        starts = request.starts
        if (
            len(request.room) != len(keys)
            or (starts is not None and len(starts) != len(keys))
            or min(starts or [0]) < 0
        ):
            raise ProtocolError(
                "a get with lists of unequal length, or a range that begins before its value"
            )
        await self.central_store.bring(keys)
        sizes: list[int | None] = []
        pieces: list[memoryview] = []
        with self.central_store.all_lent(keys) as values:
            for at, value in enumerate(values):
                piece = (
                    None
                    if value is None
                    else _piece(value, request.room[at], None if starts is None else starts[at])
                )
                sizes.append(None if piece is None else len(piece))
                if piece is not None:
                    pieces.append(piece)
            await stream.send([encode(c.ValueSizes(sizes)), *pieces])

    async def _put(self, stream: Stream, request: c.Put) -> None:
        keys = c.split_keys(request.keys)
        if len(keys) != len(request.sizes) or min(request.sizes, default=1) < 1:
            raise ProtocolError("a put with lists of unequal length, or a value without bytes")
        ttl_s = request.ttl_s
        if ttl_s is not None and not ttl_s >= 0:
            raise ProtocolError(f"a time to live of {ttl_s} seconds")
        if ttl_s is not None and ttl_s > MAX_TTL_S:
            ttl_s = inf
        faults = [
            await self._receive(stream, key, size, ttl_s)
            for key, size in zip(keys, request.sizes, strict=True)
        ]
        await stream.send([encode(c.Stored(faults))])

    async def _receive(self, stream: Stream, key: bytes, nbytes: int, ttl_s: float | None) -> str:
        room: Entry | NotReserved = (
            self.central_store.reserve(key, nbytes, ttl_s)
            if nbytes <= self._config.max_value_bytes
            else "full"
        )
        if not isinstance(room, Entry):
            await stream.skip(nbytes)
            return "" if room == "stored" else room
        with on_error(lambda: self.central_store.ram.abandon(room)):
            await stream.read_into([self.central_store.ram.view(room)], nbytes)
        self.central_store.commit(room)
        return ""

    async def _scan(self, stream: Stream, request: c.Scan) -> None:
        if len(request.prefix) > KEY_BYTES or len(request.after) not in (0, KEY_BYTES):
            raise ProtocolError("a scan's prefix or last key has an invalid size")
        page = await self.central_store.scans.page(request.prefix, request.after, _PAGE_KEYS)
        await stream.send([encode(c.CentralKeys(b"".join(page.keys), page.more, page.whole))])


def _piece(value: memoryview, room: int, start: int | None) -> memoryview | None:
    if start is None:
        return value if len(value) <= room else None
    return value[start : start + room] if 0 < room <= len(value) - start else None
