"""Pins: hits that this process holds, until a deadline or the node's end."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import TypedDict

from kvhold.control.node import ControlledNode
from kvhold.control.refusals import ControlRefusal
from kvhold.core.api import Hit
from kvhold.core.keys import Namespace, Query
from kvhold.core.layout import Layout
from kvhold.node import NodeClient

_MOST_PINS = 10_000
_SHARE = 4  # of the arena, by default


class PinRow(TypedDict):
    """num_tokens: pinned, from the prompt's start
    left_s:     until it ends
    """

    number: int
    owner: str
    namespace: str
    num_tokens: int
    bytes: int
    left_s: float


@dataclass(frozen=True)
class PinRequest:
    namespace: Namespace
    query: Query
    owner: str
    ttl_s: float


@dataclass
class _Pin:
    number: int
    owner: str
    namespace: bytes
    hit: Hit
    nbytes: int
    begun_s: float
    end_s: float

    def row(self) -> PinRow:
        return {
            "number": self.number,
            "owner": self.owner,
            "namespace": self.namespace.hex(),
            "num_tokens": self.hit.num_tokens,
            "bytes": self.nbytes,
            "left_s": round(max(0.0, self.end_s - time.monotonic()), 3),
        }


class PromptPins:
    """One event loop."""

    def __init__(self, node: ControlledNode, max_bytes: int) -> None:
        """max_bytes: 0: a share of the arena"""
        self._node = node
        self._max_bytes = max_bytes
        self._numbers = count(1)
        self._pins: dict[int, _Pin] = {}
        self._pinning = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()

    async def pin(self, request: PinRequest) -> PinRow:
        """Load chunks from lower tiers, and pin the hit. Raises ControlRefusal."""
        async with self._pinning:  # the quota counts whole pins
            await self._drop_ended()
            if len(self._pins) >= _MOST_PINS:
                raise _quota(f"there are {_MOST_PINS} pins")
            used = sum(pin.nbytes for pin in self._pins.values())
            pinned = await self._node.call(lambda client: self._pin(client, request, used))
            self._pins[pinned.number] = pinned
            loop = asyncio.get_running_loop()
            loop.call_later(request.ttl_s, self._end, pinned.number, loop)
            return pinned.row()

    async def rows(self) -> list[PinRow]:
        await self._drop_ended()
        return [pin.row() for pin in self._pins.values()]

    async def unpin(self, number: int) -> PinRow:
        """Raises ControlRefusal."""
        await self._drop_ended()
        pin = self._pins.pop(number, None)
        if pin is None:
            raise no_pin(number)
        await self._node.call(lambda _: pin.hit.close())
        return pin.row()

    def _pin(self, client: NodeClient, request: PinRequest, used: int) -> _Pin:
        limit = self._max_bytes or client.status()["arena_bytes"] // _SHARE
        begun_s = time.monotonic()
        hit = client.lookup(request.query)
        nbytes = bytes_of(request.namespace.layout, hit.num_tokens) * request.namespace.shards
        try:
            if not hit.num_tokens:
                raise ControlRefusal(
                    HTTPStatus.NOT_FOUND,
                    "not_cached",
                    f"nothing of this prompt is cached here ({hit.reason})",
                )
            if used + nbytes > limit:
                raise _quota(
                    f"the prompt's {nbytes} bytes, with {used} bytes pinned already, are more "
                    f"than {limit} (control.max_pinned_bytes)"
                )
        except ControlRefusal:
            hit.close()
            raise
        return _Pin(
            next(self._numbers),
            request.owner,
            request.namespace.digest,
            hit,
            nbytes,
            begun_s,
            time.monotonic() + request.ttl_s,
        )

    def _end(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        if number in self._pins:
            ending = loop.create_task(self._drop_ended())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _drop_ended(self) -> None:
        now, lost_s = time.monotonic(), self._node.lost_at_s
        ended = [
            pin
            for pin in self._pins.values()
            if pin.end_s <= now or (lost_s is not None and lost_s >= pin.begun_s)
        ]
        for pin in ended:
            del self._pins[pin.number]
        if ended:
            await self._node.call(lambda _: _close(ended))


def _close(pins: Sequence[_Pin]) -> None:
    for pin in pins:
        pin.hit.close()


def bytes_of(layout: Layout, num_tokens: int) -> int:
    """Of one shard's chunks, in all groups."""
    whole, tail = divmod(num_tokens, layout.tokens_per_chunk)
    total = 0
    for group in range(len(layout.groups)):
        total += whole * layout.chunk_bytes(group, layout.tokens_per_chunk)
        total += layout.chunk_bytes(group, tail) if tail else 0
    return total


def no_pin(number: int) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.NOT_FOUND, "no_pin", f"there is no pin {number}")


def _quota(detail: str) -> ControlRefusal:
    return ControlRefusal(HTTPStatus.CONFLICT, "quota", detail)
