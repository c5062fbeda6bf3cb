"""One peer: its connections, what it said last, and whether to ask it.

    stream = await peer.open()                      # logged in
    await peer.fetch(items, timeout_s=2.0)          # -> a fault, or None; `items` have their sizes

A peer that fails, or does not answer in time, is left alone for a while (`breaker.py`). One event
loop.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError, TierDenied, TierError, TierUnavailable
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.pool import Exchange, Pool, run
from kvhold.net.stream import Address, Stream
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.breaker import Breaker
from kvhold.tiers.calls import now
from kvhold.tiers.exchanges import Getting, batched, read_body

TIER = "peers"
_MOST_KEYS = 128  # of one get: what the peer looks up in one turn
_greeting: Decoder[p.Greeting] = Decoder(p.Greeting)
_values: Decoder[p.PeerValues] = Decoder(p.PeerValues)

Connect: TypeAlias = Callable[[Address, ssl.SSLContext | None], Awaitable[Stream]]


class Peer:
    """number:      its bit in the index
    incarnation: of the node whose chunks are in the index; 0: none
    after:       number of the last change in the index
    clears:      what it has announced
    is_followed: the index is complete and current
    is_self:     this node itself, named in a list that all hosts share
    is_listed:   not removed from the list of a directory
    is_open:     a connection follows this incarnation
    tried:       set when it is followed, or cannot be
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
    ) -> None:
        self.number = number
        self.address = address
        self.incarnation = self.after = 0
        self.clears: dict[bytes, int] = {}
        self.is_followed = self.is_self = self.is_open = False
        self.is_listed = True
        self.tried = asyncio.Event()
        self.last_fault: TierError | None = None
        self.lost_s: float | None = None
        self.asked_bytes = 0
        self._token, self._tls, self._connect = token, tls, connect
        self._pool = Pool(self._open, connections)
        self._breaker = Breaker(failures=1, first_pause_s=pause_s)
        self._introduction = introduction
        self.kvhold = self.name = ""

    @property
    def mask(self) -> int:
        return 1 << self.number

    def may_be_asked(self) -> bool:
        if not self.is_followed:
            return False
        next_try_s = self._breaker.next_try_s
        return next_try_s is None or now() >= next_try_s

    async def fetch(self, items: Sequence[Getting], *, timeout_s: float) -> TierError | None:
        """Read values. Sizes of missing ones stay None. Returns the fault of those not answered."""
        batches = [_GetBatch(batch) for batch in batched(items, _MOST_KEYS)]
        nbytes = sum(batch.value_bytes for batch in batches)
        self.asked_bytes += nbytes
        try:
            async with asyncio.timeout(timeout_s):
                await run(self._pool, batches, fault=lambda error: self.fault_of("get", error))
        except TimeoutError:
            return self.failed(
                TierUnavailable(TIER, "get", f"{self.address}: no answer within {timeout_s:g} s")
            )
        finally:
            self.asked_bytes -= nbytes
        if (fault := next((batch.fault for batch in batches if batch.fault), None)) is not None:
            return self.failed(fault)
        self._breaker.succeeded()
        return None

    def introduction(self) -> bytearray:
        """Return the record that follows the peer's welcome."""
        return encode(self._introduction())

    async def open_to_follow(self) -> tuple[Stream, p.PeerWelcome]:
        """Raises TierError, OSError, EOFError, ProtocolError."""
        stream = await self._connect(self.address, self._tls)
        with on_error(stream.close):
            hello = login.Hello(p.PEERS_MAGIC, p.PEERS_VERSION, self._token)
            await stream.send([encode(hello)])
            greeting = _greeting.decode(await read_body(stream, login.MAX_HELLO_BYTES))
            if isinstance(greeting, login.Refused):
                kind = TierDenied if greeting.denied else TierUnavailable
                raise kind(TIER, "connect", f"{self.address}: {login.quoted(greeting.reason)}")
        return stream, greeting

    def mended(self) -> None:
        """Ask the peer again: it has a new connection."""
        self._pool.close_idle()
        self._breaker.succeeded()

    def failed(self, fault: TierError) -> TierError:
        """Leave the peer alone for a while, then ask it over new connections."""
        self._pool.close_idle()
        self.last_fault = fault
        self._breaker.failed(now())
        return fault

    def fault_of(self, operation: str, error: Exception) -> TierError:
        if isinstance(error, TierError):
            return error
        if isinstance(error, (ProtocolError, ValueError)):
            return TierError(
                TIER,
                operation,
                f"{self.address}: is not a node for peers of this version: "
                f"{login.quoted(str(error))}",
            )
        return TierUnavailable(
            TIER, operation, f"{self.address}: {str(error) or type(error).__name__}"
        )

    def close(self) -> None:
        self._pool.close()

    async def _open(self) -> Stream:
        stream, welcome = await self.open_to_follow()
        if welcome.incarnation != self.incarnation:
            stream.close()
            raise TierUnavailable(TIER, "connect", f"{self.address}: the node was restarted")
        with on_error(stream.close):
            await stream.send([self.introduction()])
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
            for size in answer.sizes:
                await left.pop(0).take(stream, size)
