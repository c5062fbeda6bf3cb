from dataclasses import replace
from itertools import islice

from kvhold.cache.chores import Turns
from kvhold.cache.computing import Computing
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.cache.index.missing import ExpectedChunk, describe
from kvhold.cache.index.presence import Extent, Gap, Prefix, Presence
from kvhold.cache.leases import Owner
from kvhold.cache.planner import Planner
from kvhold.cache.transfer.search import Search
from kvhold.cache.transfer.searches import sources_turns
from kvhold.core.api import Found
from kvhold.core.keys import is_span
from kvhold.core.reasons import (
    BEING_COMPUTED,
    BEING_WRITTEN,
    CLEARED,
    DEADLINE,
    INCOMPLETE,
    NEVER_STORED,
    NOT_NEEDED,
    SLOWER,
    WHOLE,
    Reason,
)
from kvhold.tiers.ram import Entry, RamTier

_MOST_SIBLINGS = 256  # missing keys looked up for the reason


class Answers:
    def __init__(
        self,
        ram: RamTier,
        planner: Planner,
        computing: Computing,
        evictions: EvictionHistory,
        *,
        has_tiers: bool,
    ) -> None:
        self._ram = ram
        self._planner = planner
        self._computing = computing
        self._evictions = evictions
        self._has_tiers = has_tiers

    def answer(
        self,
        number: int,
        owner: Owner,
        presence: Presence[Entry],
        extent: Extent,
        search: Search | None = None,
        sources: dict[str, int] | None = None,
    ) -> Found:
        reason = self._reason(owner, presence, extent, search)
        if not extent.num_tokens:
            return Found(0, 0, reason=reason)
        return Found(
            number, extent.num_tokens, sources=sources or {"ram": extent.num_tokens}, reason=reason
        )

    def answer_turns(self, number: int, search: Search, prefix: Prefix[Entry]) -> Turns[Found]:
        sources = (
            (yield from sources_turns(prefix, search, self._planner.names))
            if len(search.sources)
            else None
        )
        answer = self.answer(number, search.owner, search.here, prefix.extent, search, sources)
        if answer.ticket and is_span(search.query.namespace):
            return replace(answer, loaded=search.origins.loaded())
        return answer

    def _reason(
        self, owner: Owner, presence: Presence[Entry], extent: Extent, search: Search | None
    ) -> Reason:
        gap = presence.gap(extent)
        if search is not None and gap is not None and search.declines(gap.key):
            return SLOWER
        if search is not None and gap is not None and search.idle and gap.key in search.places:
            return NOT_NEEDED
        if search is not None:
            gap = self.gap_anywhere(presence, extent, search)
        if gap is None:
            return WHOLE
        if search is not None and (fault := search.faults.get(gap.key)):
            return fault
        if search is not None and (search.probing or gap.key in search.awaited):
            return DEADLINE
        if self._ram.holds(gap.key):
            return BEING_WRITTEN
        is_marked = search is not None and search.mark in search.places
        if is_marked or self._computing.is_computed(gap.key, owner):
            return BEING_COMPUTED
        if search is not None and (why := search.unknown.get(gap.key) or search.silent):
            return why
        if self._has_tiers and search is None:
            return CLEARED
        places = search.places if search is not None else ()
        siblings = islice(gap.siblings(), _MOST_SIBLINGS)
        partly = any(key in places or self._ram.find(key) is not None for key in siblings)
        return self._evictions.why(gap.key) or (INCOMPLETE if partly else NEVER_STORED)

    def gap_anywhere(self, presence: Presence[Entry], extent: Extent, search: Search) -> Gap | None:
        return search.would_have(self._ram.find).gap(extent) or presence.gap(extent)

    def describe(
        self, reason: Reason | None, gap: Gap | None, missing: ExpectedChunk | None
    ) -> str:
        if reason is None or gap is None:
            return ""
        return describe(reason, gap.key, self._evictions.ago_s(gap.key), missing)

    def expected_back(self, gap: Gap | None) -> ExpectedChunk | None:
        ago_s = None if gap is None else self._evictions.ago_s(gap.key)
        if gap is None or ago_s is None:
            return None
        expected_s = self._ram.policy.expected_back_s(gap.key, ago_s)
        return None if expected_s is None else ExpectedChunk(gap.key, expected_s)
