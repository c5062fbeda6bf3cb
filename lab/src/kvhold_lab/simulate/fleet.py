"""Replays a trace on hosts that are each other's peers. Memories are LRU.

A prompt's beginning comes from memory, peers, then a shared tier.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from random import Random
from typing import Literal

from kvhold.core.errors import ConfigError
from kvhold.tiers.peers.index import MOST_PEERS
from kvhold_lab.simulate.trace import Cut

Routing = Literal["random", "affinity"]
ROUTINGS: tuple[Routing, ...] = ("random", "affinity")

_MOST_LOAD = 1.25  # of the mean; a host with more requests gets none
_SPARE_REQUESTS = 8  # which every host may have beyond that


@dataclass(frozen=True)
class FleetSetup:
    """memory_chunks: of each host; shared_chunks: of the shared tier, if any
    copies:         of the trace; 0: one for each host
    peers:          followed by each host: those of its group
    """

    hosts: int
    memory_chunks: int
    routing: Routing = "random"
    shared_chunks: int = 0
    copies: int = 0
    peers: int = MOST_PEERS - 1
    seed: int = 1


@dataclass(frozen=True)
class FleetRow:
    """found_here, found_at_peers, found_shared: shares of all tokens

    Rates are one host's. index_chunks: of a host's peers, mean
    """

    hosts: int
    copies: int
    routing: str
    memory_bytes: int
    shared_bytes: int
    found_here: float
    found_at_peers: float
    found_shared: float
    changes_per_s: float
    changes_read_per_s: float
    peer_bytes_per_s: float
    index_chunks: float


class _Lru:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.here: OrderedDict[int, None] = OrderedDict()

    def use(self, chunks: Sequence[int], num_here: int) -> tuple[Sequence[int], list[int]]:
        """Return the stored and the evicted chunks."""
        stored = chunks[num_here : self._capacity]
        for chunk in reversed(stored):
            self.here[chunk] = None
        for chunk in reversed(chunks[:num_here]):
            self.here.move_to_end(chunk)
        excess = max(0, len(self.here) - self._capacity)
        return stored, [self.here.popitem(last=False)[0] for _ in range(excess)]

    def num_found(self, chunks: Sequence[int]) -> int:
        return next((i for i, chunk in enumerate(chunks) if chunk not in self.here), len(chunks))


class _Router:
    def __init__(self, setup: FleetSetup, hosts: Sequence[_Lru]) -> None:
        self._routing = setup.routing
        self._random = Random(setup.seed)
        self._hosts = hosts
        self._num_requests = [0] * len(hosts)

    def choose(self, prompt: Sequence[int], holders: "_Holders") -> int:
        chosen = self._random.randrange(len(self._hosts))
        if self._routing == "affinity":
            most = _MOST_LOAD * sum(self._num_requests) / len(self._hosts) + _SPARE_REQUESTS
            free = [host for host in holders.of_longest(prompt) if self._num_requests[host] < most]
            if free:
                chosen = min(free, key=self._num_requests.__getitem__)
        self._num_requests[chosen] += 1
        return chosen


class _Holders:
    def __init__(self) -> None:
        self._of: dict[int, set[int]] = {}

    def add(self, host: int, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self._of.setdefault(chunk, set()).add(host)

    def remove(self, host: int, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            if (of := self._of.get(chunk)) is not None:
                of.discard(host)
                if not of:
                    del self._of[chunk]

    def num_found(self, chunks: Sequence[int], among: range) -> int:
        for i, chunk in enumerate(chunks):
            if not any(host in among for host in self._of.get(chunk, ())):
                return i
        return len(chunks)

    def of_longest(self, prompt: Sequence[int]) -> set[int]:
        """Hosts with the longest prefix."""
        best: set[int] = set()
        for chunk in prompt:
            having = self._of.get(chunk, set())
            if not (having & best if best else having):
                break
            best = having & best if best else having
        return best

    def num_chunks(self, among: range) -> int:
        return sum(any(host in among for host in of) for of in self._of.values())


def replay_fleet(cut: Cut, setup: FleetSetup, token_bytes: int) -> FleetRow:
    """Raises ConfigError: no times, or no prompt fills a chunk."""
    if cut.times_s is None:
        raise ConfigError("a fleet needs the requests' times; give each line a timestamp")
    if not cut.chunks.size:
        raise ConfigError(
            f"no prompt of the trace fills a chunk of {cut.tokens_per_chunk} tokens; lower "
            "--block-tokens if its ids stand for fewer tokens"
        )
    chunk_bytes = cut.tokens_per_chunk * token_bytes
    memories = [_Lru(setup.memory_chunks) for _ in range(setup.hosts)]
    shared, holders = _Lru(setup.shared_chunks), _Holders()
    router = _Router(setup, memories)
    here = at_peers = from_shared = asked = changes = 0
    copies = setup.copies or setup.hosts
    for prompt in _prompts(cut, copies):
        host = router.choose(prompt, holders)
        memory, group = memories[host], _group(host, setup)
        asked += len(prompt)

        num_here = memory.num_found(prompt)
        here += num_here
        missing = prompt[num_here:]
        num_peers = holders.num_found(missing, group)
        at_peers += num_peers
        below = missing[num_peers:]
        num_shared = shared.num_found(below)
        from_shared += num_shared

        stored, evicted = memory.use(prompt, num_here)
        holders.add(host, stored)
        holders.remove(host, evicted)
        changes += len(stored) + len(evicted)
        shared.use(below, num_shared)

    seconds = float(cut.times_s[-1] - cut.times_s[0]) or 1.0
    groups = {_group(host, setup) for host in range(setup.hosts)}
    sent = changes / seconds / setup.hosts
    return FleetRow(
        hosts=setup.hosts,
        copies=copies,
        routing=setup.routing,
        memory_bytes=setup.memory_chunks * chunk_bytes,
        shared_bytes=setup.shared_chunks * chunk_bytes,
        found_here=here / asked,
        found_at_peers=at_peers / asked,
        found_shared=from_shared / asked,
        changes_per_s=sent,
        changes_read_per_s=sent
        * sum(len(group) * (len(group) - 1) for group in groups)
        / setup.hosts,
        peer_bytes_per_s=at_peers * chunk_bytes / seconds / setup.hosts,
        index_chunks=sum(len(group) * holders.num_chunks(group) for group in groups) / setup.hosts,
    )


def _group(host: int, setup: FleetSetup) -> range:
    first = host // (setup.peers + 1) * (setup.peers + 1)
    return range(first, min(first + setup.peers + 1, setup.hosts))


def _prompts(cut: Cut, copies: int) -> Iterator[list[int]]:
    assert cut.times_s is not None
    spans, times_s = list(pairwise(cut.starts.tolist())), cut.times_s.tolist()
    length_s = (times_s[-1] - times_s[0]) or 1.0

    def of_copy(copy: int) -> Iterator[tuple[float, int, int]]:
        shift_s = length_s * copy / copies
        begin = next((i for i, at in enumerate(times_s) if at - times_s[0] >= shift_s), 0)
        for number in range(len(spans)):
            request = (begin + number) % len(spans)
            past_s = times_s[request] - times_s[0] - shift_s
            yield (past_s if past_s >= 0 else past_s + length_s), copy, request

    for _, copy, request in merge(*(of_copy(copy) for copy in range(copies))):
        start, end = spans[request]
        first = copy * cut.num_ids
        yield [first + chunk for chunk in cut.chunks[start:end].tolist()]
