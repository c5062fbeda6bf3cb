"""Loads prompts, for peers, as a lookup does."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvhold.cache.chores import Turns
from kvhold.cache.query_limits import check_query
from kvhold.cache.state import CacheState
from kvhold.core.api import Found
from kvhold.core.errors import ConfigError, KVHoldError, LayoutError
from kvhold.core.keys import HASH_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.reasons import REASONS
from kvhold.core.sizes import format_size
from kvhold.net import peers as p
from kvhold.tiers.peers import PeersTier

_MOST_LOADS = 16
_ANSWER_S = 1.0
_CHANGES_S = 2.0  # for the follower's latest changes
_PAUSE_S = 0.01
Result = TypeVar("Result")


class _Prompt:
    """In the state's loop."""

    def __init__(self, state: CacheState, query: Query) -> None:
        self._state, self._query = state, query
        self._ticket = 0
        self._has_ended = False
        self.found: Found | None = None

    def begin(self) -> None:
        layout = self._state.layout(self._query.layout)
        num_keys = check_query(layout, self._query)
        _check_quota(self._state, self._query, layout)
        self._state.run(self._begin_turns(), num_keys)

    def step(self) -> None:
        if self._ticket and self._state.is_over(self._ticket):
            ticket, self._ticket = self._ticket, 0
            self._state.run(self._settle_turns(ticket), len(self._query.hashes) // HASH_BYTES)

    def holds(self, keys: Sequence[bytes]) -> bytes:
        return bytes(self._state.ram.find(key) is not None for key in keys)

    def end(self) -> None:
        self._has_ended = True
        self._state.release_owner(self)

    def _begin_turns(self) -> Turns[None]:
        self._took((yield from self._state.lookup_turns(self, self._query, uses="none")))

    def _settle_turns(self, ticket: int) -> Turns[None]:
        self._took((yield from self._state.refresh_turns(ticket, settle=True)))

    def _took(self, found: Found) -> None:
        if found.arriving and not self._has_ended:
            self._ticket = found.ticket
            return
        self.found = found
        self._state.release_owner(self)


class PromptLoad:
    """In the peers' loop."""

    def __init__(self, loads: "PeerLoads", request: p.PeerLoad) -> None:
        self._loads = loads
        self._prompt = _Prompt(loads.state, request.query)
        self._fault = ""
        self._loading = asyncio.get_running_loop().create_task(self._load(request))
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def holds(self, keys: Sequence[bytes]) -> p.PeerHolds:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _ANSWER_S
        while True:
            is_over = self._loading.done()
            here = await self._loads.in_node(lambda: self._prompt.holds(keys))
            if is_over:
                self._loading.result()
                found = self._prompt.found or Found(0, 0)
                why = REASONS[found.reason] if found.reason is not None else ""
                return p.PeerHolds(here, found.num_tokens, self._fault or why)
            if (keys and all(here)) or loop.time() >= until_s:
                return p.PeerHolds(here)
            await asyncio.sleep(_PAUSE_S)

    def end(self) -> None:
        self._loading.cancel()
        self._loads.end(self, self._prompt.end)

    async def _load(self, request: p.PeerLoad) -> None:
        try:
            await self._loads.wait_for_changes(request)
            await self._loads.in_node(self._prompt.begin)
            while self._prompt.found is None:
                await asyncio.sleep(_PAUSE_S)
                await self._loads.in_node(self._prompt.step)
        except LayoutError:
            self._fault = "no engine of this namespace has joined its node"
        except ConfigError as error:
            self._fault = str(error)


class PeerLoads:
    def __init__(self, state: CacheState, post: Callable[[Callable[[], None]], None]) -> None:
        self.state = state
        self.tier: PeersTier | None = None
        self._post = post
        self._running: set[PromptLoad] = set()

    def begin(self, request: p.PeerLoad) -> PromptLoad:
        load = PromptLoad(self, request)
        self._running.add(load)
        return load

    def end(self, load: PromptLoad, release: Callable[[], None]) -> None:
        self._running.discard(load)
        self._post(release)

    async def wait_for_changes(self, request: p.PeerLoad) -> None:
        if len(self._running) > _MOST_LOADS:
            raise ConfigError(f"it loads {_MOST_LOADS} prompts for peers already")
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CHANGES_S
        while True:
            knows = self.tier and self.tier.knows_changes(request.incarnation, request.number)
            if knows:
                return
            if loop.time() >= until_s:
                raise ConfigError(
                    "it does not follow this node (its tier peers://)"
                    if knows is None
                    else f"it lacks changes of this node after {_CHANGES_S:g} s"
                )
            await asyncio.sleep(_PAUSE_S)

    async def in_node(self, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def settle(step: Callable[[], None]) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if answer.done() else step())

        def run() -> None:
            try:
                result = work()
            except KVHoldError as error:
                settle(partial(answer.set_exception, error))
            else:
                settle(partial(answer.set_result, result))

        self._post(run)
        return await answer


def _check_quota(state: CacheState, query: Query, layout: Layout) -> None:
    limits, chunks = state.ram.limits, len(query.hashes) // HASH_BYTES
    nbytes = sum(
        chunks * query.num_shards * layout.chunk_bytes(group, layout.tokens_per_chunk)
        for group, one in enumerate(layout.groups)
        if one.attention == "full"
    )
    for setting, most in (
        ("namespace_quota_bytes", limits.of(query.namespace)),
        ("ram_bytes", limits.total_bytes or state.ram.capacity_bytes),
    ):
        if most and nbytes > most:
            raise ConfigError(
                f"over quota: the prompt has {format_size(nbytes)}, its {setting} is "
                f"{format_size(most)}"
            )
