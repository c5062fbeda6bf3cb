"""Chunks from one peer's memory: by NIXL where that is faster, else over TCP.

The peer lends chunks (`net/peers.py`), which this node reads and returns. After any fault, TCP is
used for a while. One event loop.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvhold.core.errors import ProtocolError, TierError
from kvhold.net import peers as p
from kvhold.net.login import quoted
from kvhold.net.pool import Pool
from kvhold.net.remote_memory import (
    MOST_METADATA_BYTES,
    SAMPLE_BYTES,
    ChannelFault,
    MemoryRange,
    ReadPiece,
    RemoteMemory,
    address_of,
)
from kvhold.net.stream import Stream
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.breaker import Breaker
from kvhold.tiers.exchanges import Getting, batched, read_body

log = logging.getLogger(__name__)

NIXL, TCP = "nixl", "tcp"
OFF = "peers.channel is tcp"
NOT_OFFERED = "the peer does not offer NIXL (its peers.channel)"
NOT_WITH_TLS = "NIXL does not encrypt; with TLS, set peers.channel to nixl to use it"
_NOT_YET = "it is being opened"
BATCH_BYTES = 17 << 20  # the tier's, with headers
_MOST_KEYS = 128  # of one read
_LEAST_BYTES = 64 << 10  # less is faster over TCP
_PIECE_BYTES = 1 << 20  # of a sample
_ROUNDS = 3
_OPEN_S = 30.0
_READY_S = 0.05
_FIRST_PAUSE_S = 5.0
_LEAVE_S = 2.0
_RECENT = 1024
_offer: Decoder[p.ChannelOffer] = Decoder(p.ChannelOffer)
_lent: Decoder[p.Lent] = Decoder(p.Lent)
_values: Decoder[p.PeerValues] = Decoder(p.PeerValues)


class _NotFaster(ChannelFault):
    """Not tried again before the peer is restarted."""


@dataclass(frozen=True)
class ChannelPlan:
    """memory:      None: chunks come over TCP
    reason:      why they do; empty: NIXL may be used
    is_measured: use NIXL only where a measurement finds it faster
    """

    memory: RemoteMemory | None = None
    reason: str = OFF
    is_measured: bool = True


class PeerChannel:
    def __init__(
        self,
        plan: ChannelPlan,
        address: str,
        pool: Pool,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: of the measurement"""
        self.use(plan)
        self.nixl_bytes = 0
        self._address = address
        self._pool = pool
        self._clock = clock
        self._breaker = Breaker(failures=1, first_pause_s=_FIRST_PAUSE_S)
        self._opening: asyncio.Task[None] | None = None
        self._incarnation = 0
        self._offer: p.ChannelOffer | None = None
        self._name = ""
        self._recent: dict[bytes, None] = {}

    @property
    def kind(self) -> str:
        return NIXL if self._offer is not None else TCP

    @property
    def reason(self) -> str:
        """Why not NIXL; empty: it is."""
        if self._offer is not None:
            return ""
        memory = self.plan.memory
        return memory.fault if memory is not None and memory.fault else self._reason

    def use(self, plan: ChannelPlan) -> None:
        self.plan = plan
        self._reason = plan.reason or _NOT_YET

    def follow(self, incarnation: int, *, is_offered: bool) -> None:
        """In the background, once for this start of the peer."""
        if self.plan.memory is None or self.plan.reason or incarnation == self._incarnation:
            return
        self._shut(_NOT_YET if is_offered else NOT_OFFERED)
        self._breaker.succeeded()
        self._incarnation = incarnation
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if is_offered:
            self._opening = asyncio.ensure_future(self._keep_trying(self.plan.memory))

    async def read(self, items: Sequence[Getting], *, timeout_s: float) -> list[Getting]:
        """Returns the items to be got over TCP."""
        memory, offer, name = self.plan.memory, self._offer, self._name
        if memory is None or offer is None or memory.fault:
            return list(items)
        direct = {id(item) for item in items if _is_direct(item, memory)}
        waiting = [item for item in items if id(item) in direct]
        if sum(item.nbytes for item in waiting) < _LEAST_BYTES:
            return list(items)
        read_from = partial(memory.read, name)
        asked: set[int] = set()
        try:
            async with asyncio.timeout(timeout_s):
                for batch in batched(waiting, _MOST_KEYS, BATCH_BYTES):
                    await self._read_batch(read_from, offer, batch, asked)
        except TimeoutError:
            self._failed(f"no answer within {timeout_s:g} s", offer)
        except asyncio.CancelledError:
            self._failed("a read was given up", offer)
            raise
        except (ChannelFault, ProtocolError) as error:
            self._failed(str(error), offer)
        except (OSError, EOFError, TierError) as error:
            log.debug("%s: a read ends with its connection: %s", self._address, error)
        return [item for item in items if id(item) not in asked]

    def found_damaged(self, keys: Sequence[bytes]) -> None:
        """Use TCP for a while if one came by NIXL."""
        if self._offer is not None and any(key in self._recent for key in keys):
            self._failed("a chunk that came by NIXL was damaged", self._offer)

    async def end(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,), timeout=_LEAVE_S)
        self._shut("the peer is not followed any more")

    async def _read_batch(
        self,
        read_from: Callable[[Sequence[ReadPiece]], Awaitable[None]],
        offer: p.ChannelOffer,
        batch: list[Getting],
        asked: set[int],
    ) -> None:
        """Adds the items to `asked` that need no other get."""
        left = list(batch)
        async with self._pool.lend() as stream:
            while left:
                keys = b"".join(item.key for item in left)
                request = p.PeerRead(keys, [item.nbytes for item in left])
                await stream.send([encode(request)])
                lent = _lent.decode(await read_body(stream))
                items, left = left[: len(lent.sizes)], left[len(lent.sizes) :]
                pieces = _pieces(lent, offer, items)
                for item, size, nbytes in zip(items, lent.sizes, lent.lent, strict=True):
                    if size is None or not nbytes:
                        await item.take(stream, size)
                    else:
                        item.begin()
                        await stream.read_into(item.parts[:1], size - nbytes)
                if pieces:
                    await read_from(pieces)
                    self._breaker.succeeded()
                await stream.send([encode(p.Returned(lent.lease))])
                for item, size, nbytes in zip(items, lent.sizes, lent.lent, strict=True):
                    item.size = size
                    asked.add(id(item))
                    if nbytes:
                        self.nixl_bytes += nbytes
                        self._remember(item.key)

    def _remember(self, key: bytes) -> None:
        self._recent[key] = None
        if len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    async def _keep_trying(self, memory: RemoteMemory) -> None:
        """Until it is open, or cannot be for this start of the peer."""
        while self._offer is None:
            if self._breaker.next_try_s is not None:
                await asyncio.sleep(max(0.0, self._breaker.next_try_s - time.monotonic()))
            while memory.is_starting:  # noqa: ASYNC110 - its thread knows no loop
                await asyncio.sleep(_READY_S)
            if memory.fault:
                return
            try:
                async with asyncio.timeout(_OPEN_S), memory.measuring, self._pool.lend() as stream:
                    await self._open(stream, memory)
            except TimeoutError:
                self._failed(f"it could not be opened within {_OPEN_S:g} s")
            except _NotFaster as error:
                self._failed(str(error))
                return
            except (ChannelFault, ProtocolError, OSError, EOFError, TierError) as error:
                self._failed(str(error) or type(error).__name__)
            except Exception:
                log.exception("%s: NIXL could not be opened", self._address)
                self._failed("it could not be opened, see the log")

    async def _open(self, stream: Stream, memory: RemoteMemory) -> None:
        """Raises ChannelFault: not to be used."""
        await stream.send([encode(p.OpenChannel())])
        offer = _offer.decode(await read_body(stream))
        _check(offer)
        name = await memory.connect(offer.metadata)
        try:
            rates = await self._measure(stream, memory, name, offer)
        except BaseException:
            memory.disconnect(name)
            raise
        self._offer, self._name, self._reason = offer, name, ""
        log.info("%s: chunks come by NIXL, %s", self._address, rates)

    async def _measure(
        self, stream: Stream, memory: RemoteMemory, name: str, offer: p.ChannelOffer
    ) -> str:
        """Compare bytes and times of both ways. Raises ChannelFault."""
        over_tcp = memoryview(bytearray(SAMPLE_BYTES))
        there, here = offer.sample_address, address_of(memory.scratch)
        pieces = [
            ReadPiece(here + at, there + at, min(_PIECE_BYTES, SAMPLE_BYTES - at))
            for at in range(0, SAMPLE_BYTES, _PIECE_BYTES)
        ]
        tcp_s, nixl_s = [], []
        for _ in range(_ROUNDS):
            began_s = self._clock()
            await stream.send([encode(p.GetSample())])
            if _values.decode(await read_body(stream)).sizes != [SAMPLE_BYTES]:
                raise ProtocolError(f"a sample of {SAMPLE_BYTES} bytes was expected")
            await stream.read_into([over_tcp], SAMPLE_BYTES)
            tcp_s.append(self._clock() - began_s)
            memory.scratch[:] = bytes(SAMPLE_BYTES)
            began_s = self._clock()
            await memory.read(name, pieces)
            nixl_s.append(self._clock() - began_s)
            if not np.array_equal(np.frombuffer(memory.scratch, np.uint8), over_tcp):
                raise ChannelFault("the bytes that come by NIXL are not those that come over TCP")
        rates = f"{_rate(nixl_s)} GB/s, over TCP {_rate(tcp_s)} GB/s"
        if self.plan.is_measured and min(nixl_s) >= min(tcp_s):
            raise _NotFaster(f"TCP is not slower: NIXL {rates}")
        return rates

    def _failed(self, reason: str, offer: p.ChannelOffer | None = None) -> None:
        """offer: of a failed read; another may be in use by now"""
        if self._offer is not offer:
            return
        self._shut(quoted(reason))
        self._breaker.failed(time.monotonic())
        log.info("%s: chunks come over TCP, not by NIXL: %s", self._address, self._reason)
        memory = self.plan.memory
        if offer is not None and memory is not None and not memory.fault:
            self._opening = asyncio.ensure_future(self._keep_trying(memory))

    def _shut(self, reason: str) -> None:
        if self._offer is not None and self.plan.memory is not None:
            self.plan.memory.disconnect(self._name)
        self._offer, self._name, self._reason = None, "", reason
        self._recent.clear()


def _is_direct(item: Getting, memory: RemoteMemory) -> bool:
    if item.start is not None or len(item.parts) != 2 or not item.parts[1].nbytes:
        return False
    chunk = item.parts[1]
    return memory.region.has(address_of(chunk), chunk.nbytes)


def _check(offer: p.ChannelOffer) -> None:
    """Raises ChannelFault: none; ProtocolError: it cannot be."""
    if offer.fault:
        raise ChannelFault(f"at the peer: {quoted(offer.fault)}")
    if not 0 < len(offer.metadata) <= MOST_METADATA_BYTES:
        raise ProtocolError(f"an agent's metadata of {len(offer.metadata)} bytes")
    if offer.sample_bytes != SAMPLE_BYTES:
        raise ProtocolError(f"a sample of {offer.sample_bytes} bytes, not {SAMPLE_BYTES}")
    for address, nbytes in (
        (offer.address, offer.nbytes),
        (offer.sample_address, offer.sample_bytes),
    ):
        if not 0 < address < address + nbytes <= 1 << 63:
            raise ProtocolError(f"memory of {nbytes} bytes at address {address}")


def _pieces(lent: p.Lent, offer: p.ChannelOffer, items: Sequence[Getting]) -> list[ReadPiece]:
    """Raises ProtocolError: an answer that cannot be; ChannelFault: from another agent."""
    num = len(lent.sizes)
    if not 0 < num == len(lent.lent) == len(lent.addresses) == len(items):
        raise ProtocolError(f"a read was answered with {num} sizes")
    if lent.channel != offer.number:
        raise ChannelFault("the peer has another agent")
    memory = MemoryRange(offer.address, offer.nbytes)
    pieces = []
    for item, size, nbytes, address in zip(
        items, lent.sizes, lent.lent, lent.addresses, strict=True
    ):
        if size is None or not nbytes:
            continue
        header, chunk = item.parts
        if (size, nbytes) != (item.nbytes, chunk.nbytes) or not memory.has(address, nbytes):
            raise ProtocolError(
                f"a peer lends {nbytes} of {size} bytes for a chunk of {chunk.nbytes} bytes and "
                f"its header of {header.nbytes}, or memory outside its arena"
            )
        pieces.append(ReadPiece(address_of(chunk), address, nbytes))
    return pieces


def _rate(seconds: Sequence[float]) -> str:
    return f"{SAMPLE_BYTES / max(1e-9, min(seconds)) / 1e9:.2f}"
