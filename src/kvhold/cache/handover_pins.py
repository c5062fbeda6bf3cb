"""Keeps the chunks of handed-over prompts in memory until another engine reads them. No I/O.

That ends with the other engine's lookup, its host's read of the last whole chunk, `keep_s` after
the last store, a clear, or the owner. The first chunks are kept, up to a quarter of memory and
quota.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import inf

from kvhold.cache.chores import Turns
from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.index.pins import Pins
from kvhold.cache.kept_chunks import KeptChunks, name_bytes, stored_names, suffixes
from kvhold.core.keys import HASH_BYTES, NAME_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeIntent
from kvhold.tiers.ram import Entry, RamTier

_MOST_KEYS = 1024  # per prompt
_MOST_PROMPTS = 1024  # per owner
_MOST_CHUNKS = 16_384  # per owner
_KEYS_A_TURN = 64


class HandoverEnd(StrEnum):
    """READ: by the other engine, or its host. REPEATED: the request was looked up again."""

    READ = "read"
    DEADLINE = "deadline"
    REPEATED = "repeated"
    OWNER_LEFT = "owner left"
    CLEARED = "cleared"


@dataclass(eq=False)
class _Prompt:
    """last:   name of the last whole chunk
    unsent: its keys that another host needs, and has not read
    names:  of its kept chunks
    """

    owner: Hashable
    request: str
    last: bytes
    unsent: set[bytes]
    keep_s: float
    due_s: float
    has_ended: bool = False
    names: list[bytes] = field(default_factory=list)


_Prompts = dict[bytes, dict[_Prompt, None]]


class HandoverPins:
    def __init__(
        self, ram: RamTier, metrics: Metrics, pins: Pins, clock: Callable[[], float]
    ) -> None:
        self._ram = ram
        self._metrics = metrics
        self._clock = clock
        self._by_owner: dict[Hashable, dict[str, _Prompt]] = {}
        self._by_last: _Prompts = {}
        self._kept: KeptChunks[_Prompt] = KeptChunks(ram, pins)
        self._next_due_s = inf

    @property
    def num_chunks(self) -> int:
        return self._kept.num_chunks

    def kept(self) -> list[Entry]:
        return self._kept.entries()

    def begin_turns(
        self, owner: Hashable, query: Query, layout: Layout, intent: ComputeIntent
    ) -> Turns[None]:
        """The prompt may end between two steps."""
        if not intent.keep_s > 0:  # NaN, too
            return
        self.expire()
        request = intent.cost.request
        if (earlier := self._by_owner.get(owner, {}).get(request)) is not None:
            self._end(earlier, HandoverEnd.REPEATED)
        names = self._names(owner, query, layout)
        if not names:
            return
        due_s = self._clock() + intent.keep_s
        last = names[min(len(names), len(query.hashes) // HASH_BYTES) - 1]
        unsent = {last + suffix for suffix in suffixes(query, layout, _full_groups(layout))}
        prompt = _Prompt(owner, request, last, unsent, intent.keep_s, due_s)
        self._next_due_s = min(self._next_due_s, due_s)
        self._by_owner.setdefault(owner, {})[request] = prompt
        self._by_last.setdefault(prompt.last, {})[prompt] = None
        yield len(names) // 2
        yield from self._keep_turns(prompt, names, query, layout)

    def _keep_turns(
        self, prompt: _Prompt, names: list[bytes], query: Query, layout: Layout
    ) -> Turns[None]:
        all_suffixes, nbytes = suffixes(query, layout), name_bytes(query, layout)
        units = 0
        for number, name in enumerate(names):
            if prompt.has_ended:
                return
            if name not in self._kept and self._kept.free_bytes(query.namespace) < nbytes:
                self._skip((len(names) - number) * len(all_suffixes), "no share")
                return
            prompt.names.append(name)
            self._kept.add(name, prompt, nbytes)
            for suffix in all_suffixes:
                if (entry := self._ram.find(name + suffix)) is not None:
                    self._kept.keep(name, entry)
            units += 1 + len(all_suffixes)
            if units >= _KEYS_A_TURN:
                yield units
                units = 0

    def stored(self, entry: Entry) -> None:
        if not self._kept:
            return
        self.expire()
        name = entry.key[:NAME_BYTES]
        prompts = self._kept.keepers(name)
        if not prompts:
            return
        now_s = self._clock()
        for prompt in prompts:
            prompt.due_s = now_s + prompt.keep_s
        self._kept.keep(name, entry)

    def removed(self, entry: Entry) -> None:
        self._kept.removed(entry)

    def read(self, query: Query) -> None:
        """End the longest prompt that the query begins with; of equal ones, the oldest."""
        if not self._by_last:
            return
        names = [name for _, name in islice(chunk_names(query), _MOST_KEYS)]
        names = names or _longest_tail(query)
        for name in reversed(names):
            if (prompts := self._by_last.get(name)) is not None:
                self._end(next(iter(prompts)), HandoverEnd.READ)
                return

    def sent(self, key: bytes) -> None:
        if (prompts := self._by_last.get(key[:NAME_BYTES])) is None:
            return
        prompt = next(iter(prompts))
        prompt.unsent.discard(key)
        if not prompt.unsent:
            self._end(prompt, HandoverEnd.READ)

    def expire(self) -> None:
        """Cheap if nothing is due."""
        now_s = self._clock()
        if now_s < self._next_due_s:
            return
        for prompt in self._prompts():
            if prompt.due_s <= now_s:
                self._end(prompt, HandoverEnd.DEADLINE)
        self._next_due_s = min([prompt.due_s for prompt in self._prompts()], default=inf)

    def release_owner(self, owner: Hashable) -> None:
        for prompt in list(self._by_owner.get(owner, {}).values()):
            self._end(prompt, HandoverEnd.OWNER_LEFT)

    def clear(self, prefix: bytes) -> None:
        for prompt in self._prompts():
            if prompt.last.startswith(prefix):
                self._end(prompt, HandoverEnd.CLEARED)

    def _prompts(self) -> list[_Prompt]:
        return [prompt for held in self._by_owner.values() for prompt in held.values()]

    def _names(self, owner: Hashable, query: Query, layout: Layout) -> list[bytes]:
        held = self._by_owner.get(owner, {})
        num_keys = len(layout.groups) * query.shards
        left = _MOST_CHUNKS - sum(len(prompt.names) for prompt in held.values())
        most = 0 if len(held) >= _MOST_PROMPTS else max(0, min(left, _MOST_KEYS // num_keys))
        num_whole = len(query.hashes) // HASH_BYTES
        names = stored_names(query, most) if num_whole else _longest_tail(query)[:most]
        self._skip(max(0, num_whole - most) * num_keys, "too many")
        nbytes, free_bytes = name_bytes(query, layout), self._kept.free_bytes(query.namespace)
        for number, name in enumerate(names):
            if name not in self._kept:
                free_bytes -= nbytes
                if free_bytes < 0:
                    self._skip((len(names) - number) * num_keys, "no share")
                    return names[:number]
        return names

    def _skip(self, num_chunks: int, reason: str) -> None:
        if num_chunks:
            self._metrics.add("kvhold_handover_skipped_chunks", num_chunks, reason=reason)

    def _end(self, prompt: _Prompt, why: HandoverEnd) -> None:
        prompt.has_ended = True
        held = self._by_owner[prompt.owner]
        del held[prompt.request]
        if not held:
            del self._by_owner[prompt.owner]
        _drop(self._by_last, prompt.last, prompt)
        self._kept.drop(prompt.names, prompt)
        self._metrics.add("kvhold_handovers", result=why)


def _drop(prompts: _Prompts, name: bytes, prompt: _Prompt) -> None:
    of_name = prompts[name]
    del of_name[prompt]
    if not of_name:
        del prompts[name]


def _longest_tail(query: Query) -> list[bytes]:
    return [name for _, name in tail_names(query)][-1:]


def _full_groups(layout: Layout) -> list[int]:
    return [n for n, group in enumerate(layout.groups) if group.attention == "full"]
