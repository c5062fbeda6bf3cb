"""Publish the cache's contents as vLLM's KV cache events, for routers.

vLLM's block hashes exist only with a request: each chunk that it stores or finds is *described*,
and *announced* while all its shards are in memory.

`take` runs on the scheduler's thread and never waits, the rest on the lookup thread.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvhold.core.api import Cache, Event
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, ChunkNames, Prompt, place_suffix
from kvhold.core.layout import Layout
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.releases import event_extra_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_EVENT_BUFFER = 100_000  # lasts for minutes of constant eviction
_MOST_DESCRIBED = 4096  # chunks, about 10 KB each
_PACE_S, _RETRY_S = 0.05, 1.0


def with_events(settings: Config, config: "VllmConfig") -> Config:
    """Add a buffer if vLLM publishes events."""
    return (
        replace(settings, event_buffer=_EVENT_BUFFER)
        if publishes(config) and not settings.event_buffer
        else settings
    )


def make_describer(
    config: "VllmConfig", kv_cache: "KVCacheConfig", geometry: Geometry
) -> "Describer":
    hashed_tokens = resolve_kv_cache_block_sizes(kv_cache, config)[1]
    tables = tuple(
        ChunkTable(
            number=part.table,
            block_tokens=part.group.block_tokens,
            kind=get_kv_cache_spec_kind(kv_cache.kv_cache_groups[part.table].kv_cache_spec).value,
            window=get_kv_cache_spec_sliding_window(
                kv_cache.kv_cache_groups[part.table].kv_cache_spec
            ),
        )
        for part in geometry.parts
    )
    return Describer(geometry.layout, geometry.shards, tables, hashed_tokens)


def publishes(config: "VllmConfig") -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


@dataclass(frozen=True)
class ChunkTable:
    number: int
    block_tokens: int
    kind: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Described:
    """stored: one event per group; None: vLLM does not hash its blocks"""

    first_token: int
    stored: tuple[BlockStored | None, ...]


@dataclass(frozen=True)
class Describer:
    layout: Layout
    shards: int
    tables: tuple[ChunkTable, ...]
    hashed_tokens: int

    def describe(
        self, request: "Request", names: ChunkNames, wanted: Callable[[bytes], bool]
    ) -> Iterator[tuple[bytes, Described]]:
        first = names.first_token
        for chunk, num_tokens in enumerate(names.num_tokens(self.layout).tolist()):
            end = first + num_tokens
            if end > len(request.block_hashes) * self.hashed_tokens:
                return
            name = names.namespace + names.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            if wanted(name):
                token_ids = list(request.all_token_ids[first:end])
                yield (
                    name,
                    Described(
                        first,
                        tuple(
                            self._stored(request, table, first, token_ids) for table in self.tables
                        ),
                    ),
                )
            first = end

    def _stored(
        self, request: "Request", table: ChunkTable, first: int, token_ids: list[int]
    ) -> BlockStored | None:
        size = table.block_tokens
        if size % self.hashed_tokens:
            return None
        hashes = resolve_block_hashes(request.block_hashes, self.hashed_tokens, size)
        begin, end = first // size, (first + len(token_ids)) // size
        extras: list[tuple[Any, ...] | None] = [
            generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0]
            for at in range(begin, end)
        ]
        adapter = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[at]) for at in range(begin, end)],
            parent_block_hash=maybe_convert_block_hash(hashes[begin - 1]) if begin else None,
            token_ids=token_ids,
            block_size=size,
            lora_id=adapter.adapter_id if adapter is not None else None,
            medium=MEDIUM_CPU,
            lora_name=adapter.name if adapter is not None else None,
            extra_keys=event_extra_keys(extras),
            group_idx=table.number,
            kv_cache_spec_kind=table.kind,
            kv_cache_spec_sliding_window=table.window,
            locality="LOCAL",
            session_id=request.session_id,
        )


class Announced:
    def __init__(self, tables: tuple[ChunkTable, ...], shards: int) -> None:
        self._tables = tables
        self._places = [
            frozenset(place_suffix(group, shard) for shard in range(shards))
            for group in range(len(tables))
        ]
        self._present: dict[bytes, set[bytes]] = {}
        self._described: OrderedDict[bytes, Described] = OrderedDict()
        self._announced_blocks: dict[bytes, dict[int, list[ExternalBlockHash]]] = {}
        self._blocks: Counter[tuple[int, ExternalBlockHash]] = Counter()
        self._touched: set[bytes] = set()

    def lacks(self, name: bytes) -> bool:
        return name not in self._described

    def wants(self, name: bytes) -> bool:
        return self.lacks(name) and len(self._announced_blocks.get(name, ())) < len(self._tables)

    def describe(self, name: bytes, described: Described) -> None:
        self._described[name] = described
        self._touched.add(name)
        if len(self._described) > _MOST_DESCRIBED:
            self._described.popitem(last=False)

    def happened(self, events: Iterable[Event]) -> None:
        for event in events:
            name, place = event.key[:NAME_BYTES], event.key[NAME_BYTES:]
            self._touched.add(name)
            if event.kind == "admitted":
                self._present.setdefault(name, set()).add(place)
            elif there := self._present.get(name):
                there.discard(place)
                if not there:
                    del self._present[name]

    def replace(self, snapshot: Iterable[Event]) -> None:
        self._touched.update(self._announced_blocks)
        self._present.clear()
        self.happened(snapshot)

    def withdraw(self) -> None:
        self._described.clear()
        for name in self._announced_blocks:
            self._touched.add(name)
            self._present.pop(name, None)

    def changes(self) -> "list[KVCacheEvent]":
        touched, self._touched = self._touched, set()
        ready = [
            (described.first_token, name, described)
            for name in touched
            if (described := self._described.get(name)) is not None
        ]
        ready.sort(key=lambda item: item[:2])
        events: list[KVCacheEvent] = []
        for _, name, described in ready:
            events += self._newly_stored(name, described)
        gone: dict[int, list[ExternalBlockHash]] = {}
        for name in touched:
            for group in [
                group
                for group in self._announced_blocks.get(name, ())
                if not self._is_present(name, group)
            ]:
                gone.setdefault(group, []).extend(self._take_back(name, group))
        return events + [
            BlockRemoved(
                block_hashes=hashes,
                medium=MEDIUM_CPU,
                group_idx=self._tables[group].number,
                locality="LOCAL",
            )
            for group, hashes in gone.items()
            if hashes
        ]

    def _is_present(self, name: bytes, group: int) -> bool:
        return self._places[group] <= self._present.get(name, frozenset())

    def _newly_stored(self, name: bytes, described: Described) -> Iterator[BlockStored]:
        announced = self._announced_blocks.get(name, {})
        known_before = len(announced)
        for group, stored in enumerate(described.stored):
            if stored is None or group in announced or not self._is_present(name, group):
                continue
            self._announced_blocks[name] = announced
            announced[group] = stored.block_hashes
            keys = [(group, block) for block in stored.block_hashes]
            num_known = next((i for i, key in enumerate(keys) if not self._blocks[key]), len(keys))
            self._blocks.update(keys)
            if num_known < len(keys):
                yield _without_first(stored, num_known) if num_known else stored
        # keep a chunk that was stored again before its eviction was read
        total = sum(stored is not None for stored in described.stored)
        if not total or known_before < len(announced) == total:
            del self._described[name]

    def _take_back(self, name: bytes, group: int) -> "Iterator[ExternalBlockHash]":
        announced = self._announced_blocks[name]
        for block in announced.pop(group):
            key = (group, block)
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
                yield block
        if not announced:
            del self._announced_blocks[name]


def _without_first(stored: BlockStored, blocks: int) -> BlockStored:
    return msgspec.structs.replace(
        stored,
        block_hashes=stored.block_hashes[blocks:],
        parent_block_hash=stored.block_hashes[blocks - 1],
        token_ids=stored.token_ids[blocks * stored.block_size :],
        extra_keys=stored.extra_keys[blocks:] if stored.extra_keys is not None else None,
    )


class Announcer:
    def __init__(self, cache: Cache, thread: Executor, describer: Describer) -> None:
        self._cache = cache
        self._thread = thread
        self._describer = describer
        self._announced = Announced(describer.tables, describer.shards)
        self._next: int | None = None
        self._complaint = ""
        self._pending_events: Future[list[KVCacheEvent]] | None = None
        self._due_s = 0.0

    def stored(self, request: "Request", names: ChunkNames) -> None:
        self._thread.submit(self._describe, request, lambda: names, self._announced.lacks)

    def found(self, request: "Request", prompt: Prompt, num_tokens: int) -> None:
        if num_tokens:
            self._thread.submit(
                self._describe,
                request,
                lambda: first_chunks(prompt, num_tokens),
                self._announced.wants,
            )

    def reset(self) -> None:
        self._thread.submit(self._announced.withdraw)

    def take(self) -> "list[KVCacheEvent]":
        events: list[KVCacheEvent] = []
        if self._pending_events is not None and self._pending_events.done():
            events, self._pending_events = self._pending_events.result(), None
        if self._pending_events is None and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PACE_S
            self._pending_events = self._thread.submit(self._fetch_events)
        return events

    def _describe(
        self,
        request: "Request",
        names: Callable[[], ChunkNames],
        wanted: Callable[[bytes], bool],
    ) -> None:
        try:
            for name, described in self._describer.describe(request, names(), wanted):
                self._announced.describe(name, described)
        except Exception:
            log.exception("kvhold: no KV events about request %s", request.request_id)

    def _fetch_events(self) -> "list[KVCacheEvent]":
        try:
            self._read()
            self._complaint = ""
        except KVHoldError as error:
            self._next = None
            self._announced.replace(())
            self._due_s = time.monotonic() + _RETRY_S
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("kvhold: no KV events now: %s", error)
        except Exception:
            log.exception("kvhold: KV events")
        return self._announced.changes()

    def _read(self) -> None:
        batch = self._cache.events(self._next) if self._next is not None else None
        if batch is None or batch.lost:
            batch = self._cache.snapshot()
            self._announced.replace(batch.events)
        else:
            self._announced.happened(batch.events)
        self._next = batch.next


def first_chunks(prompt: Prompt, num_tokens: int) -> ChunkNames:
    whole, tail = divmod(num_tokens, prompt.namespace.layout.tokens_per_chunk)
    names = prompt.chunks(last=whole, tail=False)
    if tail not in prompt.tail_lengths:  # none, or it ends inside a block
        return names
    at = prompt.tail_lengths.index(tail) * HASH_BYTES
    return ChunkNames(names.namespace, names.hashes + prompt.tails[at : at + HASH_BYTES], tail)
