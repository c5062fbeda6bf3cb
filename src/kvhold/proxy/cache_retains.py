"""Ask engines to keep the prefixes that a client's cache settings name (docs/proxy.md).

A breakpoint's place in the prompt is counted by the engine, and remembered.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from kvhold.core.errors import UNDECODABLE
from kvhold.proxy.cache_fields import KeptPrefix
from kvhold.proxy.calls import EngineCall, EngineCalls
from kvhold.proxy.engines import ProxiedEngine
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.headers import Headers, prefill_headers

log = logging.getLogger(__name__)

_MOST_PLACES = 4096
_MOST_ANSWER_BYTES = 16 << 20
_COUNT_TIMEOUT_S = 10.0


class _Counted(msgspec.Struct):
    input_tokens: int | None = None
    count: int | None = None


@dataclass(frozen=True)
class PlacedPrefix:
    """num_tokens: None: the whole prompt"""

    prefix: KeptPrefix
    num_tokens: int | None

    @property
    def hint(self) -> dict[str, Any]:
        kept = {"id": f"{self.prefix.field} {self.prefix.ttl}"[-128:], "action": "retain"}
        length = {} if self.num_tokens is None else {"num_tokens": self.num_tokens}
        return {**kept, "ttl_s": self.prefix.ttl_s, **length}


class BreakpointPlaces:
    def __init__(self, calls: EngineCalls) -> None:
        self._calls = calls
        self._places: OrderedDict[bytes, int] = OrderedDict()

    async def place(
        self,
        prefixes: Sequence[KeptPrefix],
        choose: Callable[[], ProxiedEngine | None],
        headers: Headers,
    ) -> list[PlacedPrefix]:
        """Leave out prefixes whose length no engine tells."""
        counts: list[Awaitable[int | None]] = [
            self._count(prefix, choose, headers) for prefix in prefixes
        ]
        lengths = await asyncio.gather(*counts)
        return [
            PlacedPrefix(prefix, length)
            for prefix, length in zip(prefixes, lengths, strict=True)
            if length is not None or prefix.count is None
        ]

    async def _count(
        self,
        prefix: KeptPrefix,
        choose: Callable[[], ProxiedEngine | None],
        headers: Headers,
    ) -> int | None:
        if prefix.count is None:
            return None
        name = blake2b(prefix.count, digest_size=16).digest()
        length = self._places.get(name)
        if length is None and (engine := choose()) is not None:
            length = await self._ask(engine, prefix, headers)
        if length is not None:
            self._places[name] = length
            self._places.move_to_end(name)
            while len(self._places) > _MOST_PLACES:
                self._places.popitem(last=False)
        return length

    async def _ask(self, engine: ProxiedEngine, prefix: KeptPrefix, headers: Headers) -> int | None:
        assert prefix.count is not None
        call = EngineCall("POST", prefix.count_path, prefill_headers(headers), prefix.count)
        try:
            async with asyncio.timeout(_COUNT_TIMEOUT_S):
                answer = await self._calls.open(engine, call)
                try:
                    text = await answer.read(_MOST_ANSWER_BYTES)
                finally:
                    answer.close()
            if answer.status != 200:
                log.debug("%s: %s answered %d", prefix.field, prefix.count_path, answer.status)
                return None
            counted = msgspec.json.decode(text, type=_Counted)
        except (EngineFault, TimeoutError, msgspec.ValidationError, *UNDECODABLE) as error:
            log.debug("%s: no count of its tokens: %s", prefix.field, error)
            return None
        length = counted.input_tokens if counted.count is None else counted.count
        return length if length is not None and length > 0 else None
