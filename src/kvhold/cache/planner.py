"""Decides how much of a prompt's KV to load, and remembers why.

Tiers' costs are measured (`transfer/speeds.py`). No I/O.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvhold.cache.compute_speeds import ComputeSpeeds
from kvhold.cache.counts import count_blend
from kvhold.cache.index.hits import needed_chunks
from kvhold.cache.index.presence import Extent
from kvhold.cache.transfer.speeds import TierSpeed
from kvhold.core.estimates import Estimate
from kvhold.core.keys import HASH_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.planning import (
    Alternative,
    BlendReport,
    ComputeCost,
    Decision,
    LoadedChunks,
    LoadOptions,
    alternative,
    choose,
    total_s,
)

_REMEMBERED = 512
_SAMPLE_S = 10.0
_SHOWN = 20
_MOST_SPANS = 32
_SURELY = 1.05  # required gain to end a wait early
_LATE = 1.5  # a probe is late when it takes this many times its estimate
_TRY_S = 30.0  # between samples of a slow tier
IN_RAM = -1


@dataclass(frozen=True)
class ChunkPlaces:
    """here:    the hit in memory alone
    nbytes:  `[chunk]`, over all groups and shards
    below:   `{tier: [chunk]}` bytes to read; 1 for a read in progress
    sources: `{"ram" or a tier's name: tokens}`
    """

    query: Query
    here: Extent
    extent: Extent
    nbytes: Sequence[int]
    below: Mapping[int, Sequence[int]]
    sources: Mapping[str, int]


@dataclass(frozen=True)
class LoadPlan:
    """wait_s:     until all planned chunks have arrived
    more_bytes: `{tier: bytes}` to request later
    """

    num_tokens: int
    chunks: int
    wait_s: float
    more_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Marks:
    by_tier: dict[int, int] = field(default_factory=dict)
    plan: LoadPlan | None = None


class Planner:
    def __init__(
        self,
        metrics: Metrics,
        names: Callable[[], Sequence[str]],
        num_tiers: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.speeds = [TierSpeed() for _ in range(num_tiers)]
        self._shown_costs: dict[int, tuple[float, float]] = {}
        self._metrics = metrics
        self._names = names
        self._probes = Estimate(1)
        self._decisions: OrderedDict[int, Decision] = OrderedDict()
        self._earlier: deque[Decision] = deque(maxlen=_REMEMBERED)
        self.compute_speeds = ComputeSpeeds()
        self._tried_s = -np.inf
        self._blends = count(1)

    @property
    def names(self) -> Sequence[str]:
        return self._names()

    def is_worth_loading(
        self, cost: ComputeCost, query: Query, layout: Layout, num_tokens: int
    ) -> bool:
        tokens = np.array([0, num_tokens])
        nbytes = np.array([0, _load_bytes(layout, query.num_shards, cost, num_tokens)])
        return choose(cost, LoadOptions(tokens, nbytes, np.zeros(2))) == 1

    def pays(self, cost: ComputeCost, query: Query, layout: Layout, here: Extent) -> bool:
        """False: a probe cannot pay."""
        if not cost.is_known or not all(speed.is_known for speed in self.speeds):
            return True
        options = self._options_here(cost, query, layout, here.num_tokens)
        size, last = layout.tokens_per_chunk, len(query.hashes) // HASH_BYTES
        chunks = np.arange(here.whole + 1, last + 1 + bool(query.tail_lengths))
        tokens = np.minimum(chunks * size, last * size + max(query.tail_lengths, default=0))
        a_chunk = (
            sum(
                layout.chunk_bytes(g, size)
                for g, group in enumerate(layout.groups)
                if group.attention == "full"
            )
            * query.num_shards
        )
        first = cost.computed_tokens // size
        more = [
            LoadOptions(
                tokens,
                np.maximum(chunks - first, 0) * a_chunk,
                self._probe_s + speed.wait_s((chunks - here.whole) * a_chunk + 1),
            )
            for speed in self.speeds
        ]
        return any(choose(cost, _joined(options, one)) >= len(options.tokens) for one in more)

    def is_to_try(self) -> bool:
        now_s = self.clock()
        if now_s - self._tried_s < _TRY_S or not any(
            speed.is_stale(now_s) for speed in self.speeds
        ):
            return False
        self._tried_s = now_s
        return True

    def probed(self, seconds: float) -> None:
        self._probes.measured((1.0,), seconds)

    @property
    def _probe_s(self) -> float:
        costs = self._probes.costs
        return costs[0] if costs is not None else 0.0

    def plan(self, number: int, cost: ComputeCost, layout: Layout, found: ChunkPlaces) -> LoadPlan:
        """First requests are limited by the largest read so far."""
        options = self._options_here(cost, found.query, layout, found.here.num_tokens)
        first, waits = (
            len(options.tokens),
            {tier: np.array(nbytes, np.int64) for tier, nbytes in found.below.items()},
        )
        options = _joined(options, self._options_below(cost, layout, found, waits))
        chosen = choose(cost, options)
        self._decide(number, cost, options, chosen, found.sources, memory=first - 1)
        if chosen < first:
            return LoadPlan(int(options.tokens[chosen]), 0, 0.0)
        num_tokens = int(options.tokens[chosen])
        chunks = wanted = -(-num_tokens // layout.tokens_per_chunk)
        for tier, nbytes in waits.items():
            missing = np.flatnonzero(nbytes)
            if len(missing):
                reach = int(
                    np.searchsorted(
                        np.cumsum(nbytes), max(1, self.speeds[tier].most_bytes), side="right"
                    )
                )
                chunks = min(chunks, max(int(missing[0]) + 1, reach))
        more_bytes = (
            {tier: int(nbytes[chunks:wanted].sum()) for tier, nbytes in waits.items()}
            if chunks < wanted
            else {}
        )
        return LoadPlan(num_tokens, chunks, float(options.wait_s[chosen]), more_bytes)

    def requested(self, tier: int, nbytes: int) -> int:
        self.speeds[tier].requested(nbytes, self.clock())
        return self.speeds[tier].requested_bytes

    def ended(self, tier: int, nbytes: int, *, ok: bool) -> None:
        speed = self.speeds[tier]
        speed.ended(nbytes, self.clock(), ok=ok)
        costs = speed.costs
        if costs is not None and costs != self._shown_costs.get(tier):
            self._shown_costs[tier] = costs
            name = self.names[tier]
            self._metrics.set("kvhold_tier_call_seconds", costs[0], tier=name)
            self._metrics.set("kvhold_tier_gib_seconds", costs[1] * (1 << 30), tier=name)

    def is_too_slow(
        self,
        number: int,
        cost: ComputeCost,
        query: Query,
        layout: Layout,
        here: int,
        *,
        waited_s: float,
        probing: bool,
        marks: Marks,
    ) -> bool:
        if not cost.is_known:
            return False
        now_s = self.clock()
        goal = here
        more_bytes = marks.plan.more_bytes if marks.plan is not None else {}
        left = [
            self.speeds[tier].left_s(mark, now_s, more_bytes=more_bytes.get(tier, 0))
            for tier, mark in marks.by_tier.items()
        ]
        left_s = max(left, default=0.0)
        if probing:
            goal = len(query.hashes) // HASH_BYTES * layout.tokens_per_chunk
            left_s = waited_s if waited_s > _LATE * self._probe_s else 0.0
        elif marks.plan is not None:
            goal = max(here, marks.plan.num_tokens)
            # other searches' reads may end while this search's hang
            left_s = max(left_s, waited_s - 2 * marks.plan.wait_s)
        then = LoadOptions(
            np.array([goal]),
            np.array([_load_bytes(layout, query.num_shards, cost, goal)]),
            np.array([left_s]),
        )
        now = self._options_here(cost, query, layout, here)
        if float(total_s(cost, then)[0]) <= _SURELY * float(total_s(cost, now).min()):
            return False
        self._metrics.add("kvhold_plans_cut_short")
        if number not in self._decisions:
            self._decide(
                number,
                cost,
                now,
                choose(cost, now),
                {"ram": here} if here else {},
                memory=len(now.tokens) - 1,
            )
        self._change(
            number,
            why="the reads took longer than computing, so the rest was not waited for",
        )
        return True

    def decided_here(
        self,
        number: int,
        cost: ComputeCost,
        query: Query,
        layout: Layout,
        num_tokens: int,
        *,
        worth: bool,
        declined: bool,
    ) -> None:
        options = self._options_here(cost, query, layout, num_tokens)
        last = len(options.tokens) - 1
        self._decide(
            number,
            cost,
            options,
            last if worth else 0,
            {"ram": num_tokens} if num_tokens else {},
            memory=last,
        )
        self._change(number, hit_tokens=num_tokens if worth else 0)
        if declined:
            self._metrics.add("kvhold_plans_unasked")
            why = self._decisions[number].why
            self._change(
                number,
                why="tiers were not asked: computing is faster, even if they have everything; "
                f"from memory: {why}",
            )

    def decided_to_wait(
        self,
        number: int,
        cost: ComputeCost,
        query: Query,
        layout: Layout,
        *,
        hit_tokens: int,
        end_tokens: int,
        wait_s: float,
        is_plan: bool,
    ) -> None:
        here = self._options_here(cost, query, layout, hit_tokens)
        nbytes = _load_bytes(layout, query.num_shards, cost, end_tokens)
        options = _joined(
            here, LoadOptions(np.array([end_tokens]), np.array([nbytes]), np.array([wait_s]))
        )
        last = len(options.tokens) - 1
        sources = {"ram": hit_tokens} if hit_tokens else {}
        sources |= {"computing": end_tokens - hit_tokens}
        self._decide(number, cost, options, last, sources, memory=last - 1, is_counted=is_plan)
        shown, alone = (
            self._decisions[number].alternatives,
            _shown(float(total_s(cost, here).min())),
        )
        self._change(
            number,
            why=f"another engine computes the next {end_tokens - hit_tokens} tokens: with them the "
            f"first token takes {_shown(shown['chosen'].total_s)}, without them {alone}",
        )

    def finished(self, number: int, story: Decision) -> None:
        if number not in self._decisions:
            self._remember(number, story)
            return
        self._change(
            number,
            client=story.client,
            tenant=story.tenant,
            session=story.session,
            namespace=story.namespace,
            reason=story.reason,
        )

    def settled(
        self,
        number: int,
        num_tokens: int,
        *,
        waited_s: float,
        loaded: Sequence[LoadedChunks] = (),
    ) -> None:
        self._change(number, waited_s=waited_s, hit_tokens=num_tokens, loaded=list(loaded))

    def missed(self, number: int, why: str) -> None:
        self._change(number, missing=why)

    def report_timing(self, request: str, *, load_s: float | None, compute_s: float | None) -> None:
        for number, decision in reversed(self._decisions.items()):
            if decision.request == request:
                self._change(number, load_s=load_s, compute_s=compute_s)
                if compute_s is not None:
                    present = max(decision.hit_tokens or 0, decision.computed_tokens)
                    self.compute_speeds.measured(
                        decision.namespace, decision.num_tokens - present, compute_s
                    )
                return

    def report_blend(self, report: BlendReport) -> None:
        count_blend(self._metrics, report)
        report = replace(report, spans=report.spans[:_MOST_SPANS])
        for number, decision in reversed(self._decisions.items()):
            if report.request and decision.request == report.request:
                self._change(number, blend=report)
                return
        found: dict[str, int] = {}
        for span in report.spans:
            for place, num_tokens in span.sources.items():
                found[place] = found.get(place, 0) + num_tokens
        hit_tokens = report.exact_tokens + report.reused_tokens
        self._remember(
            -next(self._blends),
            Decision(
                report.request,
                time.time(),
                report.num_tokens,
                0,
                found,
                {},
                hit_tokens,
                _why_blended(report),
                hit_tokens=hit_tokens,
                blend=report,
            ),
        )

    def explain(self, request: str, tenant: str = "") -> list[Decision]:
        """Newest first. request: part of a name. tenant: only its own. Empty: all"""
        decisions = [
            decision
            for decision in chain(reversed(self._decisions.values()), reversed(self._earlier))
            if not tenant or decision.tenant == tenant
        ]
        exact = [decision for decision in decisions if request and decision.request == request]
        return (exact or [decision for decision in decisions if request in decision.request])[
            :_SHOWN
        ]

    def _decide(
        self,
        number: int,
        cost: ComputeCost,
        options: LoadOptions,
        chosen: int,
        sources: Mapping[str, int],
        *,
        memory: int,
        is_counted: bool = True,
    ) -> None:
        shown = {"compute": 0, "memory": memory, "all": len(options.tokens) - 1, "chosen": chosen}
        alternatives = {name: alternative(cost, options, at) for name, at in shown.items()}
        choice = _choice(cost, alternatives)
        before = self._decisions.pop(number, None)
        if before is None and is_counted:
            self._metrics.add("kvhold_plans", choice=choice)
        decision = Decision(
            request=cost.request,
            at_s=before.at_s if before is not None else time.time(),
            num_tokens=cost.num_tokens,
            computed_tokens=cost.computed_tokens,
            found=dict(sources),
            alternatives=alternatives,
            chosen_tokens=alternatives["chosen"].num_tokens,
            why=_why(cost, alternatives, choice),
        )
        self._remember(number, decision)

    def _remember(self, number: int, decision: Decision) -> None:
        self._decisions[number] = decision
        while len(self._decisions) > _REMEMBERED:
            _, oldest = self._decisions.popitem(last=False)
            if not self._earlier or oldest.at_s - self._earlier[-1].at_s >= _SAMPLE_S:
                self._earlier.append(oldest)

    def _change(self, number: int, **changes: Any) -> None:
        if number in self._decisions:
            self._decisions[number] = replace(self._decisions[number], **changes)

    def _options_here(
        self, cost: ComputeCost, query: Query, layout: Layout, num_tokens: int
    ) -> LoadOptions:
        ends = [0, num_tokens] if num_tokens else [0]
        nbytes = [_load_bytes(layout, query.num_shards, cost, end) for end in ends]
        return LoadOptions(np.array(ends), np.array(nbytes), np.zeros(len(ends)))

    def _options_below(
        self,
        cost: ComputeCost,
        layout: Layout,
        found: ChunkPlaces,
        waits: Mapping[int, "np.ndarray[Any, Any]"],
    ) -> LoadOptions:
        """Per chunk end beyond the hit in memory, or only the whole hit."""
        size, count = layout.tokens_per_chunk, found.extent.chunks
        ends = np.arange(1, count + 1) * size
        if count:
            ends[-1] = found.extent.num_tokens
        is_copied = np.arange(count) >= cost.computed_tokens // size
        copied = np.cumsum(np.where(is_copied, np.array(found.nbytes, np.int64), 0)).astype(
            np.int64
        )
        wait_s = np.zeros(count)
        for tier, nbytes in waits.items():
            wait_s = np.maximum(wait_s, self.speeds[tier].wait_s(np.cumsum(nbytes)))
        beyond = ends > found.here.num_tokens
        if any(group.attention != "full" for group in layout.groups):
            beyond &= ends == found.extent.num_tokens
        return LoadOptions(ends[beyond], copied[beyond], wait_s[beyond])


def _load_bytes(layout: Layout, shards: int, cost: ComputeCost, num_tokens: int) -> int:
    """A tail counts as a whole chunk."""
    first = cost.computed_tokens // layout.tokens_per_chunk
    counts = [
        len(range(max(first, needed.start), needed.stop)) for needed in _needed(layout, num_tokens)
    ]
    return shards * sum(
        count * layout.chunk_bytes(g, layout.tokens_per_chunk) for g, count in enumerate(counts)
    )


def _needed(layout: Layout, num_tokens: int) -> Iterable[range]:
    return [
        needed_chunks(layout, group, num_tokens) if num_tokens else range(0)
        for group in range(len(layout.groups))
    ]


def _joined(one: LoadOptions, other: LoadOptions) -> LoadOptions:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("tokens", "nbytes", "wait_s")]
    return LoadOptions(*(np.concatenate(pair) for pair in pairs))


def _choice(cost: ComputeCost, alternatives: Mapping[str, Alternative]) -> str:
    """The share to load: all, part or none. has: the engine has the hit"""
    chosen, everything = alternatives["chosen"].num_tokens, alternatives["all"].num_tokens
    if not everything:
        return "nothing"
    if not cost.is_known:
        return "unknown"
    if everything <= cost.computed_tokens:
        return "has"
    return "all" if chosen == everything else "part" if chosen > cost.computed_tokens else "none"


def _why(cost: ComputeCost, alternatives: Mapping[str, Alternative], choice: str) -> str:
    loaded, everything, computed = (
        _shown(alternatives[name].total_s) for name in ("chosen", "all", "compute")
    )
    match choice:
        case "nothing":
            return "nothing was found"
        case "unknown":
            return "the engine's compute speed is not known yet, so the whole hit is loaded"
        case "has":
            return "the engine already has the whole hit"
        case "all":
            return f"loading all of it takes {loaded}, computing it {computed}"
        case "part":
            return f"loading a part takes {loaded}, all of it {everything}, computing it {computed}"
        case _:
            return f"computing it takes {computed}, loading all of it {everything}"


def _why_blended(report: BlendReport) -> str:
    if report.result == "refused":
        return report.note
    if report.result == "canary":
        return f"a canary, computed in full: {report.note}"
    num_alone = sum(span.is_alone for span in report.spans)
    alone = f", {num_alone} of {len(report.spans)} spans were computed alone" if num_alone else ""
    return (
        f"blended by {report.selector}: {report.exact_tokens} exact, {report.reused_tokens} "
        f"reused, {report.recomputed_tokens} recomputed{alone}"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
