from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_128
from struct import iter_unpack
from typing import TYPE_CHECKING, Any

import numpy as np

from kvhold.cache.computing import AnnouncementWait
from kvhold.cache.index.names import chunk_names, tail_names
from kvhold.cache.state import CacheState
from kvhold.codecs.frame import checksum
from kvhold.core.checksums import unpack
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import NAME_BYTES, spans_of
from kvhold.net import messages as m
from kvhold.tiers.ram import Entry
from kvhold_lab.simulation.clears import OneHost, Promise, SimOrigin
from kvhold_lab.simulation.world import World

if TYPE_CHECKING:
    from kvhold_lab.simulation.handovers import HandoverPromises


@lru_cache(maxsize=4096)
def kv(key: bytes, nbytes: int) -> bytes:
    return shake_128(key + nbytes.to_bytes(4, "little")).digest(nbytes)


@dataclass(frozen=True)
class MemoryPlace:
    node: "CheckedMemory | None"
    offset: int = 0
    allocation: int = 0


@dataclass
class CheckedMemory:
    number: int
    data: bytearray
    address: int
    allocations: dict[int, int] = field(default_factory=dict)


class Checker:
    def __init__(self, world: World, promise: Promise | None = None) -> None:
        self._world = world
        self.promise = promise if promise is not None else OneHost()
        self.origins: dict[int, SimOrigin] = {}
        self._memory: CheckedMemory | None = None
        self._state: CacheState | None = None
        self._places: dict[tuple[str, int], dict[int, MemoryPlace]] = {}
        self._lookups: dict[int, tuple[int, float]] = {}
        self._span_tickets: set[int] = set()
        self.span_names: set[bytes] = set()
        self._stored = self.promise.stored
        self._asked_s: dict[int, float] = {}
        self._granted: dict[int, int] = {}
        self.flipped: set[tuple[int, int]] = set()
        self.garbled: set[int] = set()
        self.kicked: set[str] = set()
        self.scrubbing: Callable[[], list[Entry]] = list
        self.lent: Callable[[], list[Entry]] = list
        self.handovers: HandoverPromises | None = None
        self.num_prompt_clears = 0

    def watch(self, number: int, state: CacheState, data: bytearray) -> CheckedMemory:
        memory = CheckedMemory(number, data, np.frombuffer(data, np.uint8).ctypes.data)
        self._memory, self._state = memory, state
        slabs: Any = state.ram._slabs
        allocate, free = slabs.allocate, slabs.free

        def allocated(nbytes: int) -> int | None:
            offset: int | None = allocate(nbytes)
            if offset is not None:
                if offset in memory.allocations:
                    self._world.find(f"memory at {offset} was allocated twice")
                memory.allocations[offset] = self._world.number()
            return offset

        def freed(offset: int) -> None:
            if memory.allocations.pop(offset, None) is None:
                self._world.find(f"memory at {offset} was freed twice")
            free(offset)

        slabs.allocate, slabs.free = allocated, freed
        if self.handovers is not None:
            self.handovers.watch(state)
        return memory

    def node_died(self, *, clears_done: bool) -> None:
        self._places.clear()
        self._lookups.clear()
        self._span_tickets.clear()
        self._granted.clear()
        self.promise.node_died(clears_done=clears_done)

    def may_be_damaged(self, node: int, offset: int) -> bool:
        return (node, offset) in self.flipped or node in self.garbled

    def place_of(self, part: memoryview) -> MemoryPlace:
        memory = self._memory
        if memory is None or part.obj is not memory.data:
            return MemoryPlace(None)
        return self.place_at(int(np.frombuffer(part, np.uint8).ctypes.data) - memory.address)

    def place_at(self, offset: int) -> MemoryPlace:
        assert self._memory is not None
        return MemoryPlace(self._memory, offset, self._memory.allocations.get(offset, -1))

    def touches(self, place: MemoryPlace | None, who: str) -> None:
        if place is None or place.node is None:
            return
        now = place.node.allocations.get(place.offset)
        if now != place.allocation:
            self._world.find(
                f"{who}: memory at {place.offset} no longer belongs to it (its allocation was "
                f"{place.allocation}, now it is {now})"
            )

    def place(self, kind: str, node: int, number: int, offset: int) -> MemoryPlace | None:
        if self._memory is None or self._memory.number != node:
            return None
        return self._places.get((kind, number), {}).get(offset)

    def asked(self, request: m.Request) -> tuple[int, float]:
        number = self._world.number()
        if isinstance(request, m.Lookup | m.LookupSpans):
            self._asked_s[number] = self._world.now
        elif isinstance(request, m.Clear) and not request.tier:
            for prefix in _cleared_by(request):
                self.promise.asked_to_clear(prefix, number)
        return number, self._world.wall()

    def answered(
        self, owner: Any, request: m.Request, answer: m.Message, asked: tuple[int, float]
    ) -> None:
        if isinstance(answer, m.LookupAnswer) and answer.waits:
            self._check_wait(answer.ticket)
        match request, answer:
            case m.Lookup(), m.LookupAnswer() if answer.ticket:
                self._lookups[answer.ticket] = asked
            case m.LookupSpans(), m.SpansAnswer():
                tickets = {span.ticket for span in answer.spans if span.ticket}
                self._lookups |= dict.fromkeys(tickets, asked)
                self._span_tickets |= tickets
            case m.Reserve(), m.Granted() if answer.reservation:
                self._granted[answer.reservation] = self._world.number()
                self._note_places("reservation", answer.reservation, answer.offsets)
            case m.Claim(), m.Leased():
                self._note_places("lease", answer.lease, answer.offsets)
                self._check_lease(owner, request.ticket, answer.lease)
            case m.Clear(tier=""), m.Done():
                for prefix in _cleared_by(request):
                    self.promise.cleared(prefix, asked[0], self._world.number())
                self._world.note("cleared %s", (request.namespace or b"").hex()[:8])
            case m.ClearPrompt(only_end=False), m.Done():
                self.num_prompt_clears += 1
                for _, name in (*chunk_names(request.query), *tail_names(request.query)):
                    self.promise.cleared(name, asked[0], self._world.number())
                self._world.note("cleared a prompt")

    def committing(self, owner: Any, reservation: int, chunks: list[int]) -> None:
        assert self._state is not None
        held = self._state._leases._holdings.get(owner)
        reserved = held.reservations.get(reservation) if held is not None else None
        for chunk in chunks if reserved is not None else ():
            for entry in reserved.chunks.get(chunk, ()) if reserved is not None else ():
                self._stored[entry.key] = max(
                    self._stored.get(entry.key, 0), self._granted.get(reservation, 0)
                )

    def _note_places(self, kind: str, number: int, offsets: list[bytes]) -> None:
        memory = self._memory
        assert memory is not None
        self._places[kind, number] = {
            offset: MemoryPlace(memory, offset, memory.allocations.get(offset, -1))
            for row in offsets
            for (offset,) in iter_unpack("q", row)
            if offset != ABSENT
        }

    def _check_wait(self, ticket: int) -> None:
        """A waiting lookup computes nothing."""
        state: Any = self._state
        search = state._searches.get(ticket)
        if search is None or search.wait is None:
            self._world.find(f"ticket {ticket} is told to wait, and waits for nothing")
            return
        if isinstance(search.wait, AnnouncementWait):
            return
        announcement, computing = search.wait.announcement, state._computing
        if announcement.owner is search.owner:
            self._world.find(f"ticket {ticket} waits for its own client")
        if ticket in computing._by_owner.get(search.owner, {}):
            self._world.find(f"ticket {ticket} waits, and has announced chunks")
        if any(computing._by_name.get(name) is not announcement for name in search.wait.names):
            self._world.find(f"ticket {ticket} waits for chunks that are not announced any more")

    def _check_lease(self, owner: Any, ticket: int, lease: int) -> None:
        assert self._state is not None
        asked, asked_wall = self._lookups.get(ticket, (0, 0.0))
        if not asked:
            self._world.find(
                f"ticket {ticket} is valid, but no lookup of this node was answered with it"
            )
            return
        held = self._state._leases._holdings.get(owner)
        for entry in held.leases.get(lease, ()) if held is not None else ():
            self._check_leased(entry, asked, min(asked_wall, self._world.wall()))
            if ticket not in self._span_tickets and entry.key[:NAME_BYTES] in self.span_names:
                self._world.find(f"{entry.key.hex()[-16:]} is a span's, and a prompt found it")

    def _check_leased(self, entry: Entry, asked: int, wall: float) -> None:
        name = entry.key.hex()[-16:]
        if not entry.committed:
            self._world.find(f"{name} was leased before it was committed")
        if not entry.pins:
            self._world.find(f"{name} was leased without a pin")
        if entry.expires_at and entry.expires_at <= wall:
            self._world.find(f"{name} was found after its expiry")
        stored = self._stored.get(entry.key)
        if stored is None:
            self._world.find(f"{name} was found, but was never stored")
            return
        assert self._memory is not None
        allocation = self._memory.allocations.get(entry.offset, -1)
        origin = self.origins.get(allocation)
        born = self.promise.born(entry.key, origin, allocation)
        for began, why in self.promise.binding(
            entry.key, origin, asked, self._asked_s.get(asked, 0.0)
        ):
            if born < began:
                self._world.find(
                    f"{name} was found by a lookup after {why}, but was not stored since"
                )

    def check_pins(self) -> None:
        state: Any = self._state
        if self.handovers is not None:
            self.handovers.check(state)
        counts: Counter[int] = Counter()
        entries: dict[int, Entry] = {id(entry): entry for entry in state.ram._entries.values()}
        holders: list[Any] = [ticket.pinned for ticket in state._leases._tickets.values()]
        holders += [
            lease for held in state._leases._holdings.values() for lease in held.leases.values()
        ]
        holders += [search.pinned.values() for search in state._searches._searches.values()]
        holders += [state._writes._held.values(), self.scrubbing(), self.lent()]
        holders += [state._handovers.kept(), state._retains.kept()]
        copies = state.copies
        holders += [one.held for one in (*copies._copies.values(), *copies._left.values())]
        for held in holders:
            for entry in held:
                entries[id(entry)] = entry
                counts[id(entry)] += 1
        for number, entry in entries.items():
            if entry.pins != counts[number]:
                self._world.find(
                    f"{entry.key.hex()[-16:]} has {entry.pins} pins, but {counts[number]} holders"
                )
                return

    def num_held(self) -> dict[str, int]:
        state: Any = self._state
        held = Counter(
            {
                owner.name: len(all_of.tickets) + len(all_of.leases) + len(all_of.reservations)
                for owner, all_of in state._leases._holdings.items()
            }
        )
        for owner, announcements in state._computing._by_owner.items():
            held[owner.name] += len(announcements)
        return {name: number for name, number in held.items() if number}

    def check_idle_chunks(self) -> None:
        """Check every visible chunk's bytes, after a full scrub."""
        assert self._state is not None
        ram = self._state.ram
        for entry in [entry for part in ram.parts() for entry in part if entry.checksums]:
            stated = unpack(entry.checksums)
            view, size = ram.view(entry), entry.nbytes // len(stated)
            found = [
                checksum(view[layer * size : (layer + 1) * size]) for layer in range(len(stated))
            ]
            if ram.find(entry.key) is entry and found != list(stated):
                self._world.find(
                    f"{entry.key.hex()[-16:]} at {entry.offset} is damaged, but the scrubber did "
                    "not find it"
                )
                return

    def check_baseline(self) -> None:
        state, memory = self._state, self._memory
        assert state is not None and memory is not None
        ram: Any = state.ram
        left = {
            "used bytes": ram.used_bytes,
            "chunks": ram.num_chunks,
            "pinned chunks": ram.num_pinned,
            "allocations": len(memory.allocations),
            "continued keys": len(ram._to_be_continued),
            "namespaces with bytes": len(ram._used_by),
            "arriving chunks": state._searches.num_arriving,
            "waiting writes": len(state._writes),
            "bytes of waiting writes": state._writes.queued_bytes,
            "owners": len(state._leases._holdings),
            "tickets": len(state._leases._tickets),
            "announced chunks": state._computing.num_chunks,
            "prompts handed over": len(state._handovers._prompts()),
            "names handed over": len(state._handovers._kept),
            "retained names": len(state._retains._kept),
            "retained prompts": len(state._retains._retains()),
            "clears": state._clears,
            "clears of prompts": len(state.prompt_clears),
            "clears of tiers": len(state.tier_clears),
            "moves": len(state.moves._moves) + len(state.copies._copies),
        }
        for name, count in left.items():
            if count:
                self._world.find(f"at the end there are {count} {name}")


def _cleared_by(clear: m.Clear) -> tuple[bytes, ...]:
    """Prefixes of keys: of a namespace and of its spans, which its clear forgets, too."""
    if not clear.namespace:
        return (b"",)
    return tuple(dict.fromkeys((clear.namespace, spans_of(clear.namespace))))
