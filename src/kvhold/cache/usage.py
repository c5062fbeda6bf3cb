import time
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from kvhold.cache.busiest import Decay
from kvhold.cache.caller_shares import CallerShares
from kvhold.cache.chores import Turns
from kvhold.cache.counts import LookupCounts
from kvhold.cache.planner import Planner
from kvhold.cache.prompt_worths import PromptWorths
from kvhold.core.api import Found, Uses
from kvhold.core.keys import Query, is_span
from kvhold.core.layout import Layout
from kvhold.core.planning import Decision, LoadedChunks, RequestInfo
from kvhold.core.store_options import MAX_TENANT
from kvhold.core.usage import PromptWorth
from kvhold.tiers.ram import RamTier

_UNKNOWN = RequestInfo()


class FinishedLookup(Protocol):
    @property
    def owner(self) -> Hashable: ...

    @property
    def query(self) -> Query: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def info(self) -> RequestInfo | None: ...

    @property
    def uses(self) -> Uses: ...


class LookupUsage:
    """Counts finished lookups, at a fixed cost."""

    def __init__(self, ram: RamTier, counts: LookupCounts, planner: Planner) -> None:
        self._counts = counts
        self._planner = planner
        decay = Decay(lambda: planner.clock())
        self.shares = CallerShares(decay)
        self.prompts = PromptWorths(ram, decay)

    def worths_turns(
        self, tenant_of: Callable[[bytes], str | None], tenant: str = ""
    ) -> Turns[list[PromptWorth]]:
        """tenant: only its own; empty: all"""
        token_s = self._planner.compute_speeds.token_s
        return self.prompts.worths_turns(token_s, tenant_of, tenant)

    def count(
        self,
        number: int,
        lookup: FinishedLookup,
        answer: Found,
        asked_tokens: int,
        *,
        waited_s: float = 0.0,
        loaded: Sequence[LoadedChunks] = (),
    ) -> None:
        self._counts.add(lookup.query.namespace, answer, asked_tokens)
        if is_span(lookup.query.namespace):
            return
        info, tenant = lookup.info or _UNKNOWN, lookup.query.tenant[:MAX_TENANT]
        client = getattr(lookup.owner, "label", "")
        hit_tokens = answer.num_tokens
        self.shares.count(tenant, client, info.session, asked_tokens, hit_tokens)
        if lookup.uses == "none":  # repeated, or an operator's
            return
        if hit_tokens:
            saved_tokens = max(0, hit_tokens - info.computed_tokens)
            self.prompts.count(lookup.query, lookup.layout, info.session, hit_tokens, saved_tokens)
        story = Decision(
            request=info.request,
            at_s=time.time() - waited_s,
            num_tokens=max(info.num_tokens, asked_tokens),
            computed_tokens=info.computed_tokens,
            found=answer.sources,
            alternatives={},
            chosen_tokens=hit_tokens,
            why="",
            waited_s=waited_s,
            hit_tokens=hit_tokens,
            loaded=list(loaded),
            client=client,
            tenant=tenant,
            session=info.session,
            namespace=lookup.query.namespace.hex(),
            reason=answer.reason or "",
        )
        self._planner.finished(number, story)
