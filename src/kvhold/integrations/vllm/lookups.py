"""The lookup thread hashes a prompt on arrival, and looks it up when the scheduler asks: a queued
request pins nothing. A scheduling pass waits `_PATIENCE_S` for all its lookups together. A late or
failed lookup is a miss. Without a node, a lookup waits for the next one, at most as long as
computing takes. While the engine has nothing else to do, a pass waits `_IDLE_S` for arrivals: vLLM
would ask again at once, and take a core from the engine that computes them.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from kvhold.core.api import Hit, Uses
from kvhold.core.config import Config
from kvhold.core.errors import KVHoldError, NodeLost
from kvhold.core.hints import session_of
from kvhold.core.holdings import Holding
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.planning import MOST_NAME, ComputeIntent, RequestInfo
from kvhold.core.reasons import SLOWER, WHOLE
from kvhold.core.rules import RequestRules
from kvhold.integrations.vllm.costs import Costs, Took
from kvhold.integrations.vllm.descriptions import Descriptions
from kvhold.integrations.vllm.events import Announcer
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.handovers import Handovers
from kvhold.integrations.vllm.media import Media
from kvhold.integrations.vllm.namespace import prompt_of
from kvhold.integrations.vllm.naming.adapters import Adapters
from kvhold.integrations.vllm.request_state import RequestState
from kvhold.integrations.vllm.stats import BELOW_MINIMUM, NO_ANSWER, NOT_AWAITED, NOT_NAMED, Tally
from kvhold.integrations.vllm.tracker import RequestTracker
from kvhold.node import NodeClient
from kvhold.node.span import HostSpan

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_MOST_CAUSES = 100
_START_S = 1.0  # a killed node is usually back within this time
_PATIENCE_S = 0.003  # RAM answers faster
_IDLE_S = 0.005
_TIMED_EVERY_S = 0.1
_PAUSE, _LEAST_PAUSE_S = 0.01, 0.002  # part of a wait between checks of another engine


class RequestLookups:
    """Hashing and calls to the cache run on the lookup thread, all else on the scheduler's."""

    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        geometry: Geometry,
        cache: NodeClient,
        thread: ThreadPoolExecutor,
        *,
        loads: bool,
        costs: Costs,
        adapters: Adapters,
        media: Media,
        announcer: Announcer | None,
        descriptions: Descriptions,
        tally: Tally,
        awaits_hosts: bool = False,
        hands_ends: bool = False,
    ) -> None:
        self.namespace = namespace
        self.costs = costs
        self.patience_s = _PATIENCE_S
        self._idle_s = 0.0
        self._config = config
        self._geometry = geometry
        self._cache = cache
        self._thread = thread
        self._may_load = loads
        self._adapters = adapters
        self._media = media
        self.handovers = Handovers(config.client)
        self._timed_s = -inf
        self._late_announcements: dict[str, Holding] = {}
        self._announcer = announcer
        self._descriptions = descriptions
        self._tally = tally
        self._not_named: set[str] = set()
        self.span: HostSpan | None = None
        """The hosts of the workers, if they are on several."""
        self._awaits_hosts = awaits_hosts
        self._hands_ends = hands_ends

    def use_span(self, span: HostSpan) -> None:
        self.span, self._awaits_hosts = span, False

    def begin_pass(self, *, idle: bool) -> None:
        """idle: the last one computed and loaded nothing"""
        self.patience_s = _PATIENCE_S
        self._idle_s = _IDLE_S if idle else 0.0

    def submit_name(self, request: "Request", rules: RequestRules) -> "Future[Prompt | None]":
        self._media.announce(request)
        return self._thread.submit(self._hash_prompt, request, rules)

    def note(self, request: "Request") -> None:
        if has_content(request):
            self.submit_name(request, RequestRules())

    def is_certain(self, request: "Request") -> bool:
        """vLLM has computed the request with the named content."""
        adapter = request.lora_request
        return self._media.is_certain(request) and (
            adapter is None
            or self._adapters.is_unchanged(adapter, has_media=bool(request.mm_features))
        )

    def submit_timings(self) -> None:
        for took in self.costs.over():
            self._thread.submit(self._report_timing, took)
            self._thread.submit(self.costs.prepare)

    def would_load(self, request_state: RequestState, computed_tokens: int) -> bool:
        """A load is allowed, and faster than computing. A single block is computed."""
        least_block = min(part.group.block_tokens for part in self._geometry.parts)
        return self._loads_for(request_state) and (
            not computed_tokens or request_state.request.num_tokens - computed_tokens > least_block
        )

    def look_up(
        self,
        request_state: RequestState,
        request: "Request",
        computed_tokens: int,
        uses: Uses,
        *,
        stores: bool,
    ) -> None:
        if request_state.naming is None:
            request_state.naming = self.submit_name(request, request_state.rules)
        if request.num_preemptions and self.saves_decode(request_state):
            request_state.naming = self._thread.submit(
                self._hash_generated, request_state.naming, request, request.num_tokens
            )
        request_state.tried = request.num_preemptions
        request_state.pending_steps.clear()
        request_state.asked_s = request_state.since_s = time.monotonic()
        request_state.first_asked_s = request_state.since_s
        request_state.ask_again_s = 0.0
        # a node knows only its own host's costs and engines
        is_alone = self.span is None
        plans = is_alone and request_state.rules.plan and self._loads_for(request_state)
        info = RequestInfo(
            request.request_id[:MOST_NAME],
            session_of(request.kv_transfer_params, getattr(request, "session_id", None)),
            request.num_tokens,
            computed_tokens,
        )
        would_load = self.would_load(request_state, computed_tokens)
        have_tokens = computed_tokens if would_load else request.num_tokens
        shares = is_alone and request_state.rules.wait_for_computing and (stores or would_load)
        produces = is_alone and request_state.part.produces and stores
        awaits = is_alone and request_state.part.awaits and would_load
        if (plans or shares) and not would_load:
            self.costs.follow(request.request_id, request.num_tokens)
        request_state.patience_s = self._config.client.arrival_timeout_s
        request_state.no_hit, request_state.computed_tokens = NO_ANSWER, computed_tokens
        request_state.ask = partial(
            self._lookup,
            request_state,
            request_state.naming,
            info,
            have_tokens,
            uses,
            plans=plans,
            waits=shares and would_load,
            announces=(shares and stores) or produces,
            produces=produces,
            awaits=awaits and not request.num_preemptions,
        )
        if request_state.trace is not None:
            request_state.trace.begin_lookup(self.namespace, request.num_tokens, computed_tokens)
        request_state.lookup = self._thread.submit(request_state.ask)

    def _hash_prompt(self, request: "Request", rules: RequestRules) -> Prompt | None:
        """The scheduler would raise an error again."""
        try:
            prompt = prompt_of(self.namespace, request, rules, self._adapters, self._media)
            if isinstance(prompt, str):
                self._say_once(request, cause=prompt)
                return None
            prompt = prompt.until(max(0, prompt.num_tokens - self._config.skip_last_n_tokens))
            prompt.query()
        except KVHoldError as error:
            log.debug("kvhold: request %s is not cached: %s", request.request_id, error)
        except Exception:
            log.exception("kvhold: request %s is not cached", request.request_id)
        else:
            return prompt
        return None

    def _say_once(self, request: "Request", cause: str) -> None:
        if cause not in self._not_named and len(self._not_named) < _MOST_CAUSES:
            self._not_named.add(cause)
            log.warning(
                "kvhold: request %s and others like it are not cached: %s",
                request.request_id,
                cause,
            )

    def _hash_generated(
        self, naming: "Future[Prompt | None]", request: "Request", num_tokens: int
    ) -> Prompt | None:
        prompt = naming.result()
        end = num_tokens - self._config.skip_last_n_tokens
        if prompt is not None and end > prompt.num_tokens:
            try:
                return prompt.followed_by(request.all_token_ids[prompt.num_tokens : end])
            except Exception:
                log.exception(
                    "kvhold: tokens that request %s generated are not looked up", request.request_id
                )
        return prompt

    def _patience(self, num_tokens: int, computed_tokens: int) -> float:
        client = self._config.client
        compute_s = self.costs.compute_s(num_tokens, computed_tokens)
        return max(client.call_timeout_s, min(compute_s, client.arrival_timeout_s))

    def _lookup(
        self,
        request_state: RequestState,
        naming: "Future[Prompt | None]",
        info: RequestInfo,
        have_tokens: int,
        uses: Uses,
        *,
        plans: bool,
        waits: bool,
        announces: bool,
        produces: bool,
        awaits: bool,
    ) -> Hit | None:
        """produces: for a decode engine
        awaits:   a prefill engine's KV
        """
        prompt = None if naming.cancelled() or self._awaits_hosts else naming.result()
        trace = request_state.trace
        request_state.is_lost = False
        try:
            patience_s = request_state.patience_s = self._patience(
                request_state.request.num_tokens, info.computed_tokens
            )
            handover = (
                self.handovers.wait_for(request_state.part, prompt)
                if awaits and prompt is not None
                else None
            )
            has_intent = waits or announces or handover is not None
            cost = (
                self.costs.cost(info.request, info.num_tokens, info.computed_tokens)
                if plans or has_intent
                else None
            )
            intent = (
                ComputeIntent(
                    cost,
                    waits=waits,
                    announces=announces,
                    handover=handover,
                    keep_s=self._config.client.handover_timeout_s if produces else 0.0,
                    announces_tail=produces and self._config.store_tails,
                )
                if cost is not None and has_intent
                else None
            )
            if prompt is not None and self.span is not None:
                return self.span.lookup(
                    self._trim_prompt(prompt),
                    have_tokens=have_tokens,
                    uses=uses,
                    deadline_s=patience_s,
                )
            if prompt is not None:
                return self._cache.lookup(
                    self._trim_prompt(prompt).query(
                        to_end=self._hands_ends and (produces or awaits)
                    ),
                    cost=cost if plans else None,
                    have_tokens=have_tokens,
                    uses=uses,
                    intent=intent,
                    info=info,
                    wait_s=0,
                    deadline_s=patience_s,
                    trace=trace.lookup_context if trace is not None else "",
                )
        except NodeLost as error:
            log.debug("kvhold: lookup: %s", error)
            self._note_loss(request_state)
        except KVHoldError as error:
            log.debug("kvhold: lookup: %s", error)
        except Exception:
            log.exception("kvhold: lookup")
        return None

    def _look_again(self, request_state: RequestState, hit: Hit, settle: bool) -> Hit | None:
        try:
            if settle:
                hit.settle()
            else:
                hit.refresh()
            return hit
        except NodeLost as error:
            log.debug("kvhold: lookup: %s", error)
            self._note_loss(request_state)
        except KVHoldError as error:
            log.debug("kvhold: lookup: %s", error)
        except Exception:
            log.exception("kvhold: lookup")
        hit.close()
        return None

    def _note_loss(self, request_state: RequestState) -> None:
        compute_s = self.costs.compute_s(
            request_state.request.num_tokens, request_state.computed_tokens
        )
        request_state.compute_s = min(compute_s, request_state.patience_s)
        request_state.is_lost = True

    def _trim_prompt(self, prompt: Prompt) -> Prompt:
        if (
            self._geometry.whole_prompt_fits
            or self._config.skip_last_n_tokens
            or not prompt.num_tokens
        ):
            return prompt
        return prompt.until(prompt.num_tokens - 1)

    def _report_timing(self, took: Took) -> None:
        try:
            self._cache.report_timing(
                took.request_id[:MOST_NAME], load_s=took.load_s, compute_s=took.compute_s
            )
        except KVHoldError as error:
            log.debug("kvhold: %s", error)

    def resolve(
        self, request_state: RequestState, patience_s: float, *, last: bool = False
    ) -> bool:
        """last: take any answer; a late one is a miss"""
        assert request_state.lookup is not None
        assert request_state.naming is not None
        began_s, hit, lookup = time.monotonic(), None, request_state.lookup
        try:
            # no pass that computes waits for arrivals
            hit = lookup.result(timeout=self._idle_s if request_state.arriving else patience_s)
            request_state.lookup = None
        except FutureTimeout:
            if not last and began_s - request_state.asked_s < request_state.patience_s:
                return False
            self.let_go(request_state)
        finally:
            waited_s = time.monotonic() - began_s
            self.patience_s = max(0.0, self.patience_s - waited_s)
            self._idle_s = max(0.0, self._idle_s - waited_s)
        if (
            hit is None
            and request_state.is_lost
            and not last
            and self._waits(request_state, began_s)
        ):
            request_state.lookup = request_state.lookup or lookup
            return False
        if hit is not None and hit.arriving and not last:
            if request_state.trace is not None:
                request_state.trace.note_arriving(hit)
            settle = bool(request_state.pending_steps) or (
                not hit.waits
                and began_s - request_state.since_s >= self._config.client.arrival_timeout_s
            )
            if hit.waits:
                request_state.since_s = began_s  # tiers are asked after the wait
                if not settle and began_s < request_state.ask_again_s:
                    request_state.lookup, request_state.arriving = lookup, hit
                    pause_s = min(self._idle_s, request_state.ask_again_s - began_s)
                    self._idle_s -= pause_s
                    time.sleep(pause_s)
                    return False
                waited_s = began_s - request_state.first_asked_s
                request_state.ask_again_s = began_s + max(_LEAST_PAUSE_S, _PAUSE * waited_s)
            request_state.lookup, request_state.arriving = (
                self._thread.submit(self._look_again, request_state, hit, settle),
                hit,
            )
            request_state.asked_s = began_s
            return False
        request_state.hit, request_state.arriving = hit, None
        if hit is not None:
            request_state.announcement = hit.take_announcement()
        prompt = request_state.naming.result() if request_state.naming.done() else None
        self._count(request_state, prompt, hit)
        if (
            hit is not None
            and not request_state.pending_steps
            and self._is_timed(request_state.rules, hit, began_s)
        ):
            self.costs.follow(request_state.request.request_id, request_state.request.num_tokens)
        if prompt is not None:
            request_state.tracker = RequestTracker(
                prompt,
                save_decode=self.saves_decode(request_state),
                store_tails=self._config.store_tails,
                skip_last_n_tokens=self._config.skip_last_n_tokens,
            )
            request_state.tracker.found(hit.num_tokens if hit is not None else 0)
            if hit is not None:
                if self._announcer is not None:
                    self._announcer.found(request_state.request, prompt, hit.num_tokens)
                self._descriptions.found(request_state.request, prompt, hit.num_tokens)
        return True

    def _is_timed(self, rules: RequestRules, hit: Hit, now_s: float) -> bool:
        """Without a planner, only samples: each timing is a call."""
        if rules.plan or rules.wait_for_computing:
            return bool(hit.num_tokens) or hit.reason == SLOWER
        if now_s - self._timed_s < _TIMED_EVERY_S:
            return False
        self._timed_s = now_s
        return True

    def _waits(self, request_state: RequestState, now_s: float) -> bool:
        waited_s = now_s - request_state.asked_s
        request_state.arriving = None
        if self._cache.connected:
            if request_state.ask is not None and waited_s < request_state.patience_s:
                request_state.lookup = self._thread.submit(request_state.ask)
            return request_state.lookup is not None
        if not self._cache.is_rejoining:
            return False
        lost_at_s = self._cache.lost_at_s
        away_s = now_s - lost_at_s if lost_at_s is not None else inf
        if waited_s < request_state.compute_s and away_s < max(_START_S, request_state.compute_s):
            return True
        request_state.no_hit = NOT_AWAITED
        return False

    def _count(self, request_state: RequestState, prompt: Prompt | None, hit: Hit | None) -> None:
        request = request_state.request
        num_tokens = max(request.num_prompt_tokens, prompt.num_tokens if prompt is not None else 0)
        if hit is None:
            reason = request_state.no_hit if prompt is not None else NOT_NAMED
            self._tally.looked_up(num_tokens, sources={}, reason=reason)
        else:
            reason = hit.reason if hit.reason and hit.reason != WHOLE else BELOW_MINIMUM
            self._tally.looked_up(num_tokens, sources=hit.sources, reason=reason)
        if request_state.trace is not None:
            request_state.trace.end_lookup(hit, reason=reason)

    def saves_decode(self, request_state: RequestState) -> bool:
        """A resumable session's later prompts may contain more than tokens."""
        return self._config.save_decode and not request_state.request.resumable

    def _loads_for(self, request_state: RequestState) -> bool:
        return self._may_load and request_state.rules.load

    def let_go(self, request_state: RequestState) -> None:
        if request_state.lookup is not None and not request_state.lookup.cancel():
            self._thread.submit(_close_late_hit, request_state.lookup)
        request_state.lookup = None
        hit, request_state.hit, request_state.arriving = (
            request_state.arriving or request_state.hit,
            None,
            None,
        )
        if hit is not None and hit.ticket:
            self._thread.submit(hit.close)

    def withdraw(self, request_state: RequestState, *, is_stored_late: bool = False) -> None:
        """End the announcement, but for chunks that are being stored.

        is_stored_late: the next step stores them, and ends it
        """
        announcement, request_state.announcement = request_state.announcement, None
        if announcement is None:
            return
        if is_stored_late and request_state.part.produces:
            self.withdraw_late(request_state.request.request_id)  # an earlier one of the same id
            self._late_announcements[request_state.request.request_id] = announcement
        else:
            self._thread.submit(announcement.close)

    def withdraw_late(self, request_id: str) -> None:
        if (announcement := self._late_announcements.pop(request_id, None)) is not None:
            self._thread.submit(announcement.close)


def has_content(request: "Request") -> bool:
    return bool(request.mm_features) or request.lora_request is not None


def _close_late_hit(lookup: "Future[Hit | None]") -> None:
    hit = lookup.result()
    if hit is not None:
        hit.close()
