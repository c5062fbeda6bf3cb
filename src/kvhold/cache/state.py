"""The cache as a state machine: calls and events in, answers and commands out. No I/O, no locks.

`LocalCache` drives it under a lock, the node from its loop. A call `x_turns` is the call `x` in
steps.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import inf
from secrets import randbits

from kvhold.cache.answers import Answers
from kvhold.cache.chores import TURN, Chores, Turns, in_one_turn, unless_short
from kvhold.cache.clear_times import ClearTimes
from kvhold.cache.computing import Computing
from kvhold.cache.counts import LookupCounts
from kvhold.cache.demotions import Demotions
from kvhold.cache.handover_pins import HandoverPins
from kvhold.cache.index.changes import Changes
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.cache.index.namespace_tags import NamespaceTags
from kvhold.cache.index.pins import Pins
from kvhold.cache.leases import ClaimAnswer, Held, Leases, Owner
from kvhold.cache.lookup import Lookups
from kvhold.cache.peer_waits import PeerWaits
from kvhold.cache.planner import Planner
from kvhold.cache.prompt_clears import PromptClear, PromptClears
from kvhold.cache.query_limits import check_query, check_span_queries
from kvhold.cache.reservations import Grant, Reservations
from kvhold.cache.retains import Retains
from kvhold.cache.span_lookups import lookups_of_spans
from kvhold.cache.transfer.commands import ClearCommand, Command, KeepTagsCommand
from kvhold.cache.transfer.copies import CopyRequest, PromptCopies
from kvhold.cache.transfer.moves import Moves
from kvhold.cache.transfer.probes import append
from kvhold.cache.transfer.reencodings import ReencodeRequest, Reencodings
from kvhold.cache.transfer.searches import Searches
from kvhold.cache.transfer.tier_clears import TierClears
from kvhold.cache.transfer.use_queue import UseQueue
from kvhold.cache.transfer.write_queue import WriteQueue
from kvhold.cache.usage import LookupUsage
from kvhold.cache.values import ChunkValues
from kvhold.core.api import (
    DemoteAnswer,
    EventBatch,
    Found,
    ReencodeProgress,
    RetainAnswer,
    Uses,
)
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, LayoutError, ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, ChunkNames, Query, spans_of
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import ComputeCost, ComputeIntent, RequestInfo
from kvhold.core.reasons import PASSING, TIER_DOWN, Reason
from kvhold.core.status import HeldStatus, StateStatus
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.core.tracing import TraceContext
from kvhold.memory.arena import Arena
from kvhold.tiers.base import Origin
from kvhold.tiers.bytes_by_age import BytesByAge
from kvhold.tiers.memory_limits import MemoryLimits
from kvhold.tiers.policies import Policy, make_policy
from kvhold.tiers.ram import ADMITTED, Entry, RamTier
from kvhold.tiers.stack import TierPlace


def new_state(
    config: Config,
    arena: Arena,
    policy: Policy | None = None,
    *,
    numa_nodes: Sequence[int] = (),
) -> "CacheState":
    """Raises ConfigError."""
    if config.policy_for != "tokens" and config.policy != "learned":
        raise ConfigError(
            f"policy_for = {config.policy_for!r} needs policy = 'learned', not {config.policy!r}"
        )
    metrics = Metrics()
    if policy is None:
        policy = make_policy(config.policy)
    ram = RamTier(
        arena,
        policy,
        metrics,
        quota_bytes=config.namespace_quota_bytes,
        numa_nodes=numa_nodes,
    )
    write_behind_bytes = config.write_behind_bytes or arena.nbytes // 4
    return CacheState(
        ram,
        metrics,
        num_tiers=len(config.tiers),
        has_peers=any("peers" in url.partition("://")[0] for url in config.tiers),
        write_behind_bytes=write_behind_bytes,
        event_buffer=config.event_buffer,
        stalled_after_s=config.node.reservation_timeout_s,
        policy_for=config.policy_for,
        retained_bytes=config.hints.max_bytes,
    )


class CacheState:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        *,
        num_tiers: int = 0,
        has_peers: bool = False,
        write_behind_bytes: int = 0,
        event_buffer: int = 0,
        stalled_after_s: float = inf,
        policy_for: str = "tokens",
        retained_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ram = ram
        self.metrics = metrics
        self.tier_names = [f"tier-{number}" for number in range(1, num_tiers + 1)]
        self.turn_units, self.turn_s = TURN, inf
        self._has_tiers = num_tiers > 0
        self._layouts: dict[bytes, Layout] = {}
        # no ticket of an earlier run is valid
        self._numbers = count(randbits(48) << 8 | 1)
        self._commands: list[Command] = []
        self._clears = 0
        self._clear_times = ClearTimes()
        self.when_cleared: Callable[[bytes, float | None], None] = lambda prefix, asked_s: None
        """Called when a clear has ended in memory and in the tiers, with `ClearCommand.asked_s`."""
        self._chores = Chores()
        self._evictions = EvictionHistory(clock=clock)
        self._changes = Changes(metrics, self._evictions, event_buffer)
        self.held = BytesByAge(ram.now)
        ram.watch = self._note_change

        give_command, pins = self._give_command, Pins(ram, self._chores)
        self.planner = Planner(metrics, lambda: self.tier_names, num_tiers, clock)
        self.reencodings = Reencodings(give_command)
        self._counts = LookupCounts(metrics, self.reencodings.tenant_of, clock)
        self.usage = LookupUsage(ram, self._counts, self.planner)
        self.tags = NamespaceTags()
        self.copies = PromptCopies(
            ram, give_command, run=self._chores.run, tenant_of=self.reencodings.tenant_of
        )
        self.uses = UseQueue(metrics, give_command)
        self._computing = Computing(ram, metrics, lambda: self.planner.clock(), has_peers=has_peers)
        ram.watch_lost = self._computing.not_stored
        self._handovers = HandoverPins(ram, metrics, pins, lambda: self.planner.clock())
        self._retains = Retains(ram, metrics, pins, lambda: self.planner.clock(), retained_bytes)
        self._demotions = Demotions(ram, metrics, lambda: self.planner.clock())
        ram.before_eviction = self._expire_kept
        self._writes = WriteQueue(ram, metrics, give_command, limit_bytes=write_behind_bytes)
        reservations = Reservations(
            ram,
            metrics,
            self._evictions,
            self._writes if num_tiers else None,
            stalled_after_s=stalled_after_s,
            clock=clock,
            refused=self._computing.not_stored,
        )
        self._leases = Leases(ram, metrics, self._chores, pins, reservations, self._numbers)
        self._searches = Searches(
            ram,
            self._writes,
            metrics,
            give_command,
            self.planner,
            run=self._chores.run,
            unpin=pins.unpin,
            is_over=lambda number: self._lookups.search_ended(number),
        )
        self.prompt_clears = PromptClears(
            ram, self._searches, give_command, has_tiers=self._has_tiers
        )
        self.tier_clears = TierClears(give_command, self._clear_memory)
        peer_waits = PeerWaits(metrics, lambda: self.planner.clock(), has_peers=has_peers)
        self._lookups = self._make_lookups(pins, peer_waits, policy_for)
        self.moves = Moves(self.copies, give_command, self, begin=self._chores.add)
        self._lookups.when_over = self.moves.arrived

    def _make_lookups(self, pins: Pins, peer_waits: PeerWaits, policy_for: str) -> Lookups:
        return Lookups(
            self.ram,
            self.usage,
            self._chores,
            pins,
            self._leases,
            self._searches,
            self.planner,
            self._computing,
            peer_waits,
            self._handovers,
            Answers(
                self.ram, self.planner, self._computing, self._evictions, has_tiers=self._has_tiers
            ),
            ChunkValues(policy_for, self.planner.speeds),
            self.uses,
            self._numbers,
            has_tiers=self._has_tiers,
            find_layout=self.layout,
        )

    def register(
        self, layout: Layout, namespace: bytes = b"", store_options: StoreOptions | None = None
    ) -> None:
        self._layouts[layout.fingerprint] = layout
        if len(namespace) == NAMESPACE_BYTES and store_options is not None:
            self.reencodings.learn(namespace, layout, store_options)
            self.tags.learn(namespace, store_options.tags)

    def layout(self, fingerprint: bytes) -> Layout:
        layout = self._layouts.get(fingerprint)
        if layout is None:
            raise LayoutError(
                f"layout {fingerprint.hex()} was not registered; register the namespace first"
            )
        return layout

    def lookup_turns(
        self,
        owner: Owner,
        query: Query,
        cost: ComputeCost | None = None,
        *,
        have_tokens: int = 0,
        uses: Uses = "all",
        intent: ComputeIntent | None = None,
        trace: TraceContext = "",
        info: RequestInfo | None = None,
    ) -> Turns[Found]:
        self.tags.meet(query)
        return self._lookups.lookup_turns(
            owner,
            query,
            cost,
            have_tokens=have_tokens,
            uses=uses,
            intent=intent,
            trace=trace,
            info=info,
        )

    def spans_turns(self, owner: Owner, queries: Sequence[Query]) -> Turns[list[Found]]:
        """Each with a ticket of its own. Raises ConfigError, LayoutError, ProtocolError."""
        check_span_queries(queries, self.layout)
        return lookups_of_spans(self._lookups, owner, queries, self._give_command, self.release)

    def refresh_turns(self, ticket: int, *, settle: bool = False) -> Turns[Found]:
        return self._lookups.refresh_turns(ticket, settle=settle)

    def claim_turns(
        self, owner: Owner, ticket: int, shard: int, first_chunk: int, *, arriving: bool = False
    ) -> Turns[ClaimAnswer | None]:
        return self._lookups.claim_turns(owner, ticket, shard, first_chunk, arriving=arriving)

    def prefetch_turns(self, owner: Owner, query: Query) -> Turns[None]:
        self.tags.meet(query)
        return self._lookups.prefetch_turns(owner, query)

    def retain_turns(self, owner: Owner, query: Query, ttl_s: float) -> Turns[RetainAnswer]:
        layout = self.layout(query.layout)
        turns = self._retains.begin_turns(owner, next(self._numbers), query, layout, ttl_s)
        return unless_short(check_query(layout, query), turns)

    def demote_turns(self, query: Query, first_chunk: int = 0) -> Turns[DemoteAnswer]:
        layout = self.layout(query.layout)
        turns = self._demotions.demote_turns(query, layout, first_chunk)
        return unless_short(check_query(layout, query), turns)

    def is_over(self, ticket: int) -> bool:
        return self._lookups.is_over(ticket)

    def num_arrived(self, ticket: int) -> int:
        return self._lookups.num_arrived(ticket)

    def take_news(self) -> bool:
        return self._lookups.take_news()

    def release(self, owner: Owner, number: int, *, keep_announcement: bool = False) -> None:
        if not keep_announcement:
            self._computing.withdraw(owner, number)
        if self.reencodings.find(owner, number) is not None:
            self.reencodings.drop(number)
        elif self.moves.find(owner, number) is not None:
            self.moves.drop(number)
        elif not self._lookups.release(owner, number) and not self._retains.release(owner, number):
            self._leases.release(owner, number)

    def pinned_by(self, ticket: int) -> list[Entry]:
        return self._leases.pinned_by(ticket)

    def release_owner(self, owner: Owner) -> None:
        """The owner must no longer touch the arena."""
        self.reencodings.drop_all(owner)
        self.moves.drop_all(owner)
        self._computing.withdraw_all(owner)
        for ticket in self._leases.tickets_of(owner):
            self.release(owner, ticket)
        self._leases.release_owner(owner)
        self._handovers.release_owner(owner)
        self._retains.release_owner(owner)

    def reserve_turns(
        self,
        owner: Owner,
        layout: Layout,
        names: ChunkNames,
        shard: int,
        *,
        groups: bytes | None = None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
    ) -> Turns[Grant]:
        store_options = self.reencodings.within_budget(names.namespace, store_options)
        grant = yield from self._leases.reserve_turns(
            owner, layout, names, shard, groups=groups, store_options=store_options
        )
        self.reencodings.learn(names.namespace, layout, store_options)
        self.tags.learn(names.namespace, store_options.tags)
        return grant

    def commit_turns(
        self, owner: Owner, reservation: int, chunks: Sequence[int], checksums: bytes | None = None
    ) -> Turns[int]:
        yield from self._leases.commit_turns(owner, reservation, chunks, checksums)
        return self.mark

    def abandon_turns(self, owner: Owner, reservation: int) -> Turns[None]:
        return self._leases.abandon_turns(owner, reservation)

    def place_near(self, owner: Owner, numa_node: int | None) -> None:
        self._leases.place_near(owner, numa_node)

    lookup = in_one_turn(lookup_turns)
    spans = in_one_turn(spans_turns)
    refresh = in_one_turn(refresh_turns)
    claim = in_one_turn(claim_turns)
    prefetch = in_one_turn(prefetch_turns)
    retain = in_one_turn(retain_turns)
    demote = in_one_turn(demote_turns)
    reserve = in_one_turn(reserve_turns)
    commit = in_one_turn(commit_turns)
    abandon = in_one_turn(abandon_turns)

    def damaged(self, owner: Owner, lease: int, offsets: Sequence[int]) -> None:
        self._leases.damaged(owner, lease, offsets)

    def remove_damaged(self, entries: Iterable[Entry], found_by: str) -> None:
        self._leases.remove_damaged(entries, found_by)

    def holdings(self) -> HeldStatus:
        return self._leases.holdings()

    def held_by(self, owner: Owner) -> Held:
        return self._leases.held_by(owner)

    def touches_memory(self, owner: Owner) -> bool:
        return self._leases.touches_memory(owner)

    def give_up(self, owner: Owner) -> None:
        self._computing.withdraw_all(owner)
        self._handovers.release_owner(owner)
        self._retains.release_owner(owner)
        self._leases.give_up(owner)

    def clear(self, namespace: bytes | None, *, at_ns: int = 0, tier: str = "") -> int:
        """Return the number of removed chunks in RAM. namespace: with its spans; None: all

        at_ns: time of another host's clear, repeated unless there was one since; 0: own clear
        tier:  clear only it, or only `ram`; empty: all

        Raises ConfigError, ProtocolError.
        """
        if namespace is not None and len(namespace) != NAMESPACE_BYTES:
            raise ProtocolError(
                f"the namespace to clear has {len(namespace)} bytes; it needs {NAMESPACE_BYTES}"
            )
        if at_ns and (namespace is None or at_ns <= self.cleared_ns(namespace)):
            return 0
        removed = 0
        prefixes = (b"",) if namespace is None else (namespace, spans_of(namespace))
        for prefix in dict.fromkeys(prefixes):
            if tier:
                removed += self.tier_clears.begin(tier, prefix)
                continue
            self._clear_times.note(prefix, int(self.ram.now() * 1e9), at_ns)
            removed += self._clear(prefix, learned=False)
        return removed

    def clear_prompt_turns(self, clear: PromptClear) -> Turns[int]:
        return self.prompt_clears.clear_turns(self.layout(clear.query.layout), clear)

    clear_prompt = in_one_turn(clear_prompt_turns)

    def cleared_ns(self, namespace: bytes) -> int:
        """0: none. Clears learned from a shared tier do not count."""
        return self._clear_times.of(namespace)

    def cleared_elsewhere(self, prefix: bytes) -> None:
        self._clear(prefix, learned=True)

    def reencode(self, owner: Owner, request: ReencodeRequest) -> int:
        """Raises ConfigError, LayoutError, ProtocolError."""
        if request.query is not None:
            check_query(self.layout(request.query.layout), request.query)
        number = next(self._numbers)
        self.reencodings.begin(number, owner, request, self._layouts)
        return number

    def copy(self, owner: Owner, request: CopyRequest) -> int:
        """Raises ConfigError, LayoutError, ProtocolError."""
        if request.query is not None:
            layout = self.layout(request.query.layout)
            num_keys = check_query(layout, request.query)
        else:
            layout, num_keys = self.reencodings.known_layout(request.namespace), self.ram.num_chunks
        number = next(self._numbers)
        self.moves.begin(number, owner, request, layout, num_keys)
        return number

    @property
    def write_behind_bytes(self) -> int:
        return self._writes.limit_bytes

    @write_behind_bytes.setter
    def write_behind_bytes(self, limit_bytes: int) -> None:
        self._writes.limit_bytes = limit_bytes

    def limit_memory(self, limits: MemoryLimits) -> None:
        """Evict down to the limits. Chunks in use stay."""
        self.ram.limits = limits
        self._chores.add(self.ram.shrink())

    def run(self, turns: Turns[None], num_keys: int) -> None:
        self._chores.run(turns, num_keys)

    def step(self, units: int | None = None) -> bool:
        return self._chores.step(self.turn_units if units is None else units, self.turn_s)

    @property
    def has_chores(self) -> bool:
        return len(self._chores) > 0

    def snapshot(self) -> tuple[int, Iterator[list[Entry]]]:
        """The last event's number, and RAM's entries; later changes are in later events."""
        return self._changes.log.last, self.ram.parts()

    def watch_chunks(self, tell: Callable[[str, Entry], None]) -> None:
        """tell: called with the reason of each change"""
        self._changes.watchers.append(tell)

    def watch_computing(self, tell: Callable[[bytes, bool], None]) -> None:
        """tell: called when a prompt for another engine, named by its last chunk, begins or ends"""
        self._computing.tell_peers = tell

    def layout_of(self, key: bytes) -> Layout | None:
        """Any thread."""
        return self.reencodings.layout_of(key[:NAMESPACE_BYTES])

    def hold_for_peer(self, keys: Sequence[bytes]) -> list[tuple[Entry, Layout] | None]:
        """`ram.unpin_all` ends the hold. The chunks do not count as used."""
        held: list[tuple[Entry, Layout] | None] = []
        for key in keys:
            entry, layout = self.ram.find(key), self.layout_of(key)
            if entry is None or layout is None:
                held.append(None)
            else:
                self.ram.hold(entry)
                self._handovers.sent(key)
                held.append((entry, layout))
        return held

    def events(self, after: int) -> EventBatch:
        return self._changes.log.after(after)

    @property
    def mark(self) -> int:
        return self._writes.mark

    def all_done(self, mark: int) -> bool:
        """Every write up to `mark` and every clear has ended."""
        is_clearing = self._clears or self.prompt_clears or self.tier_clears
        return not is_clearing and self._writes.all_done(mark)

    def status(self) -> StateStatus:
        self._expire_kept()
        return {
            "arena_bytes": self.ram.capacity_bytes,
            "used_bytes": self.ram.used_bytes,
            "chunks": self.ram.num_chunks,
            "pinned_chunks": self.ram.num_pinned,
            "clearing_chunks": self.ram.num_clearing,
            "arriving_chunks": self._searches.num_arriving,
            "announced_chunks": self._computing.num_chunks,
            "handover_chunks": self._handovers.num_chunks,
            "retained_chunks": self._retains.num_chunks,
            "reencodings": len(self.reencodings),
            "write_behind": {"chunks": len(self._writes), "bytes": self._writes.queued_bytes},
            "namespaces": {one.hex(): n for one, n in self.ram.used_by_namespace.items()},
            "busiest_namespaces": self._counts.busiest_namespaces(),
            "busiest_tenants": self._counts.busiest_tenants(),
            "held": self.holdings(),
            "counters": self.metrics.as_dict(),
        }

    def keep_tags(self) -> None:
        """From now on, with a command for each new namespace."""
        self.tags.tell = lambda *tags: self._give_command(KeepTagsCommand(*tags))

    def take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def probed(
        self,
        number: int,
        places: dict[bytes, TierPlace],
        *,
        silent: Reason | None = None,
        unknown: dict[bytes, Reason] | None = None,
    ) -> None:
        self._searches.probed(number, places, silent=silent, unknown=unknown)

    def written(self, number: int) -> None:
        self._writes.done(number)

    def given_up(self, entry: Entry) -> None:
        self._searches.given_up(entry)

    def let_go(self, entry: Entry) -> None:
        self._searches.let_go(entry)

    def reencode_progressed(self, number: int, progress: ReencodeProgress) -> None:
        self.reencodings.progressed(number, progress)

    def fetched(
        self,
        entry: Entry,
        ok: bool,
        expires_at: int = 0,
        *,
        why: Reason = TIER_DOWN,
        origin: Origin | None = None,
    ) -> None:
        if not ok and why not in PASSING:
            self._evictions.add(entry.key, why)
        self._searches.fetched(entry, ok, expires_at=expires_at, why=why, origin=origin)

    def cleared(self, prefix: bytes, asked_s: float | None = None) -> None:
        self._clears -= 1
        self._searches.cleared(prefix)
        self.when_cleared(prefix, asked_s)

    def _clear_memory(self, prefix: bytes) -> int:
        removed = self.ram.clear(prefix)
        self._chores.add(self.ram.sweep())
        self._handovers.clear(prefix)
        self._retains.clear(prefix)
        self.step()
        return removed

    def _clear(self, prefix: bytes, *, learned: bool) -> int:
        removed = self._clear_memory(prefix)
        if self._has_tiers:
            self._searches.clear(prefix)
            self._clears += 1
            self._give_command(ClearCommand(prefix, learned, self.ram.now()))
        else:
            self.when_cleared(prefix, self.ram.now())
        return removed

    def _note_change(self, what: str, entry: Entry) -> None:
        self._changes.note(what, entry)
        if what == ADMITTED:
            entry.slot = self.held.slot()
            self.held.add(entry.key, entry.slot, entry.taken_bytes)
            self._computing.stored(entry.key)
            self._handovers.stored(entry)
            self._retains.stored(entry)
            self._demotions.stored(entry)
        else:
            self.held.add(entry.key, entry.slot, -entry.taken_bytes)
            self._handovers.removed(entry)
            self._retains.removed(entry)

    def _expire_kept(self) -> None:
        self._handovers.expire()
        self._retains.expire()

    def _give_command(self, command: Command) -> None:
        append(self._commands, command)
