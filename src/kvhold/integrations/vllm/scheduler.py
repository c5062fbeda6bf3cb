"""Look up prompts and plan loads and stores, in the scheduler's process.

The lookup thread hashes a prompt on arrival, and looks it up when the scheduler asks. So a queued
request pins nothing.

A scheduling pass waits `_PATIENCE_S` for all its lookups together. A late or failed lookup is a
miss. If the node is lost, a lookup waits for the next one, but no longer than computing takes.
Chunks from lower tiers are waited for at most `client.arrival_timeout_s`.

All methods run on the scheduler's thread. Only `reset` waits for the node there.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.request import RequestStatus

from kvhold.core.api import Hit
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, KVHoldError, NodeLost
from kvhold.core.keys import ChunkNames, Namespace, Prompt
from kvhold.core.planning import MOST_NAME
from kvhold.core.reasons import SLOWER, WHOLE
from kvhold.core.rules import RequestRules
from kvhold.integrations.vllm.costs import Costs, Took
from kvhold.integrations.vllm.drafts import DraftLimit, Undrafted
from kvhold.integrations.vllm.events import Announcer, Describer
from kvhold.integrations.vllm.geometry import Geometry, Part
from kvhold.integrations.vllm.media import Media
from kvhold.integrations.vllm.naming.adapters import Adapters, AdapterUse
from kvhold.integrations.vllm.naming.loads import can_observe
from kvhold.integrations.vllm.space import join, prompt_of, rules_of
from kvhold.integrations.vllm.stats import BELOW_MINIMUM, NO_ANSWER, NOT_AWAITED, NOT_NAMED, Tally
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.tracker import RequestTracker
from kvhold.memory.placement import place_own_threads, place_this_thread

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_NULL_BLOCK = 0  # vLLM's number for "no block"
_MOST_CAUSES = 100
_START_S = 1.0  # a killed node is usually back within this time
_PATIENCE_S = 0.003  # a pass waits so long; RAM answers faster


@dataclass
class _RequestState:
    """A request from its arrival to its end.

    naming: its result is None if the request is not cached
    arriving: the hit that `lookup` refreshes
    patience_s: the longest wait for an answer
    asked_s, since_s: the last and the first call to the cache for this hit
    tried: `num_preemptions` at the last lookup. Each start tries one load, so a failing load ends
        in computing
    pending_steps: steps that the tracker does not know yet
    no_hit: the miss reason, if the cache gave none
    """

    request: "Request"
    rules: RequestRules
    naming: "Future[Prompt | None] | None" = None
    tracker: RequestTracker | None = None
    lookup: "Future[Hit | None] | None" = None
    arriving: Hit | None = None
    patience_s: float = 0.0
    asked_s: float = 0.0
    since_s: float = 0.0
    hit: Hit | None = None
    first_token: int = 0
    loading: bool = False
    tried: int = -1
    pending_steps: "list[_Scheduled]" = field(default_factory=list)
    ask: "Callable[[], Hit | None] | None" = None
    is_lost: bool = False
    computed_tokens: int = 0
    compute_s: float = 0.0
    no_hit: str = NO_ANSWER


@dataclass(frozen=True)
class _Scheduled:
    num_tokens: int
    computed_tokens: int
    starts: bool


class SchedulerSide:
    def __init__(
        self,
        config: Config,
        namespace: Namespace,
        geometry: Geometry,
        *,
        loads: bool = True,
        stores: bool = True,
        stores_plain: bool = True,
        describer: Describer | None = None,
        layerwise: bool = False,
        step_tokens: int = 1 << 40,
        media: Media | None = None,
        draft_limit: DraftLimit | None = None,
    ) -> None:
        """Join the node and start the lookup thread.

        loads: vLLM protects freed blocks from passes under way only for loads that it knows
        stores_plain: whether KV without an adapter can be trusted
        """
        self._config = config
        self._may_load = loads
        self._may_store = stores
        self._stores_plain = stores_plain
        self._layerwise = layerwise
        self._undrafted = (
            Undrafted(geometry.parts, draft_limit) if draft_limit is not None else None
        )
        self._geometry = geometry
        self._configured = namespace
        self._namespace = namespace
        self._cache = join(config, namespace, name="vllm-scheduler")
        self._lookups = ThreadPoolExecutor(
            1,
            thread_name_prefix="kvhold-lookup",
            initializer=place_this_thread,
            initargs=(config.client.cores,),
        )
        # threads that the engine's thread has started
        place_own_threads(config.client.cores)
        self._announcer = (
            Announcer(self._cache, self._lookups, describer) if describer is not None else None
        )
        self._adapters = Adapters(can_observe)  # used on the lookup thread
        self._not_named: set[str] = set()
        self._request_states: dict[str, _RequestState] = {}
        self.tally = Tally()
        self._costs = Costs(step_tokens)
        self._media = media or Media()  # used on the lookup thread
        self._loads: list[Load] = []
        self._inside: list[str] = []
        self._last_stores: list[Store] = []
        self._patience_s = _PATIENCE_S
        log.info(
            "kvhold: %d tokens a chunk (%s), %d shards, node on %s",
            namespace.layout.tokens_per_chunk,
            ", ".join(
                f"{len(part.layer_names)} layers of {part.group.attention} attention"
                for part in geometry.parts
            ),
            geometry.shards,
            self._cache.path,
        )

    @property
    def socket(self) -> Path:
        return self._cache.path

    def arrived(self, request: "Request") -> None:
        try:
            rules = rules_of(
                request, self._config, is_coded=any(part.is_coded for part in self._geometry.parts)
            )
        except ConfigError as error:
            log.warning("kvhold: request %s is not cached: %s", request.request_id, error)
            self.tally.add("refused_requests", 1)
            return
        # a session that continues its prompt
        if (before := self._request_states.pop(request.request_id, None)) is not None:
            self._let_go(before)
        if rules.store or rules.load:
            self._request_states[request.request_id] = _RequestState(
                request, rules, naming=self._lookups.submit(self._name, request, rules)
            )

    def matched(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load beyond `computed_tokens`, and whether outside the passes.

        None: ask again.
        """
        request_state = self._request_states.get(request.request_id)
        if request_state is None:
            return 0, False
        if request_state.tried != request.num_preemptions:
            self._let_go(request_state)
            self._look_up(request_state, request, computed_tokens)
        if not self._would_load(request_state, computed_tokens):
            return 0, False
        if request_state.lookup is not None and not self._resolve(request_state, self._patience_s):
            return None, False
        found = request_state.hit.num_tokens if request_state.hit is not None else 0
        # the pass must not write where a layer is being loaded
        if self._layerwise:
            found = min(found, (request.num_tokens - 1) // self._block * self._block)
        if self._geometry.looks_ahead:
            found = max(0, found // self._block - 1) * self._block
        if found <= computed_tokens or request.skip_reading_prefix_cache:
            return 0, False  # the engine may evict its own blocks before it allocates
        request_state.first_token = computed_tokens
        return found - computed_tokens, not self._layerwise

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Plan a load into `blocks`; without a load, release the hit."""
        request_state = self._request_states.get(request.request_id)
        if request_state is None or request_state.loading:
            return
        if not external_tokens or request_state.hit is None:
            if (
                request_state.lookup is None
            ):  # a pending answer still decides which chunks are stored
                self._let_go(request_state)
            return
        first_chunk = request_state.first_token // self._namespace.layout.tokens_per_chunk
        first = first_chunk * self._namespace.layout.tokens_per_chunk
        last = request_state.first_token + external_tokens
        tables = blocks.get_block_ids()
        ids = [
            _blocks(
                part,
                tables[part.table],
                first,
                last,
                unused=request_state.hit.num_tokens,
                skipped=request_state.first_token,
            )
            for part in self._geometry.parts
        ]
        if self._undrafted is not None:
            self._undrafted.loaded(ids)
        self._loads.append(
            Load(
                request.request_id,
                request_state.hit.ticket,
                first_chunk,
                ids,
                inside=self._layerwise,
                patience_s=request_state.patience_s,
                adapter=self._adapter_of(request_state),
            )
        )
        if not self._layerwise:
            self._costs.load_begins(request.request_id, self._load_bytes(ids))
        request_state.loading = True

    def plan(self, output: "SchedulerOutput") -> Steps:
        self.loaded(self._inside)  # that pass is over: layerwise is synchronous
        self._costs.planned(output)
        if self._undrafted is not None:
            self._undrafted.planned(output)
        stores, self._last_stores = self._last_stores, []
        for new in output.scheduled_new_reqs:
            self._run(stores, output, new.req_id, new.num_computed_tokens, starts=True)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            self._run(stores, output, request_id, cached.num_computed_tokens[at], starts=resumed)
        loads, self._loads = self._loads, []
        self._inside = [load.request_id for load in loads if load.inside]
        self._patience_s = _PATIENCE_S
        return Steps(loads, stores, output.total_num_scheduled_tokens > 0)

    def loaded(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_state := self._request_states.get(request_id):
                request_state.loading = False
                self._let_go(request_state)

    def step_over(self) -> None:
        for took in self._costs.over():
            self._lookups.submit(self._tell, took)
            self._lookups.submit(self._costs.prepare)

    def finished(self, request: "Request", tables: tuple[list[int], ...]) -> bool:
        """Forget an ended request. True: keep its blocks until its last tokens are stored."""
        request_state = self._request_states.pop(request.request_id, None)
        if request_state is None:
            return False
        complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        late = (
            complete
            and bool(request_state.pending_steps)
            and self._catch_up(request_state, self._patience_s, last=True)
        )
        self._let_go(request_state)
        self._costs.forget(request.request_id)
        if request_state.naming is not None:
            request_state.naming.cancel()
        if not complete or request_state.tracker is None or not self._stores_for(request_state):
            return False
        if not late and not self._saves_decode(request_state):
            return False
        reached = min(
            len(tables[part.table]) * part.group.block_tokens for part in self._geometry.parts
        )
        taken = request_state.tracker.finish(request.all_token_ids, reached // self._block)
        if taken is None or not self._adapter_stays(request_state):
            return False
        store = self._store(request_state, taken, tables, last=True)
        if store is None:
            return False
        self._last_stores.append(store)
        return True

    def reset(self) -> bool:
        """Invalidate all stored KV and drop the stores under way.

        vLLM calls this after weights have changed in place. A random tag in the namespace separates
        KV of old and new weights.
        """
        before, self._namespace = (
            self._namespace,
            self._configured.narrowed(tags=(("reset", token_hex(8)),)),
        )
        for request_state in self._request_states.values():
            self._let_go(request_state)
            request_state.naming = request_state.tracker = None
            request_state.pending_steps.clear()
            request_state.tried = -1
        if self._announcer is not None:
            self._announcer.reset()
        try:
            self._cache.clear(before.digest)
        except KVHoldError as error:
            log.warning(
                "kvhold: what was cached before the reset is not used any more, but still "
                "takes memory: %s",
                error,
            )
        return True

    def take_events(self) -> "list[KVCacheEvent]":
        return self._announcer.take() if self._announcer is not None else []

    def close(self) -> None:
        self._lookups.shutdown(wait=True, cancel_futures=True)
        self._cache.close()

    @property
    def _block(self) -> int:
        """Tokens in a block; in a chunk, if there are no tails."""
        return self._namespace.layout.tail_tokens or self._namespace.layout.tokens_per_chunk

    def _would_load(self, request_state: _RequestState, computed_tokens: int) -> bool:
        """Whether a load is allowed and useful.

        A load takes longer than computing one missing block.
        """
        least_block = min(part.group.block_tokens for part in self._geometry.parts)
        return self._loads_for(request_state) and (
            not computed_tokens or request_state.request.num_tokens - computed_tokens > least_block
        )

    def _run(
        self,
        stores: list[Store],
        output: "SchedulerOutput",
        request_id: str,
        computed_tokens: int,
        *,
        starts: bool,
    ) -> None:
        request_state = self._request_states.get(request_id)
        if request_state is None:
            return
        request_state.pending_steps.append(
            _Scheduled(output.num_scheduled_tokens[request_id], computed_tokens, starts)
        )
        if (
            not self._catch_up(request_state, 0.0)
            or request_state.tracker is None
            or not self._stores_for(request_state)
        ):
            return
        taken = request_state.tracker.take(
            request_state.request.all_token_ids if self._saves_decode(request_state) else ()
        )
        if taken is not None and self._adapter_stays(request_state):
            store = self._store(
                request_state, taken, output.kv_connector_block_state.get_block_ids(request_id)
            )
            if store is not None:
                stores.append(store)

    def _catch_up(
        self, request_state: _RequestState, patience_s: float, *, last: bool = False
    ) -> bool:
        """Pass the steps to the tracker. False: the lookup has no answer yet."""
        if request_state.lookup is not None:
            if not self._resolve(request_state, patience_s, last=last):
                return False
            self._let_go(request_state)
        pending_steps, request_state.pending_steps = request_state.pending_steps, []
        if request_state.tracker is not None:
            for step in pending_steps:
                if step.starts:
                    request_state.tracker.start(step.computed_tokens)
                request_state.tracker.advance(step.num_tokens, step.computed_tokens)
        return True

    def _store(
        self,
        request_state: _RequestState,
        names: ChunkNames,
        tables: Sequence[list[int]],
        *,
        last: bool = False,
    ) -> Store | None:
        """Build the store of these chunks; None if a block lacks the drafter's KV."""
        end = names.first_token + int(names.num_tokens(self._namespace.layout).sum())
        ids = [
            _blocks(part, tables[part.table], names.first_token, end)
            for part in self._geometry.parts
        ]
        if self._undrafted is not None and self._undrafted.are_among(ids):
            return None
        if self._announcer is not None:
            self._announcer.stored(request_state.request, names)
        return Store(
            request_state.request.request_id,
            names,
            ids,
            request_state.rules.store_options,
            last,
            self._adapter_of(request_state),
        )

    def _load_bytes(self, block_ids: list[list[int]]) -> int:
        groups = [part.group for part in self._geometry.parts]
        blocks = [len(ids) - ids.count(-1) for ids in block_ids]
        return self._geometry.shards * sum(
            n * group.layers * group.block_bytes for n, group in zip(blocks, groups, strict=True)
        )

    def _look_up(
        self, request_state: _RequestState, request: "Request", computed_tokens: int
    ) -> None:
        if request_state.naming is None:
            request_state.naming = self._lookups.submit(self._name, request, request_state.rules)
        if request.num_preemptions and self._saves_decode(request_state):
            request_state.naming = self._lookups.submit(
                self._name_on, request_state.naming, request, request.num_tokens
            )
        request_state.tried = request.num_preemptions
        request_state.pending_steps.clear()
        request_state.asked_s = request_state.since_s = time.monotonic()
        plans = request_state.rules.plan and self._loads_for(request_state)
        asking = (
            (request.request_id[:MOST_NAME], request.num_tokens, computed_tokens) if plans else None
        )
        would_load = self._would_load(request_state, computed_tokens)
        have_tokens = computed_tokens if would_load else request.num_tokens
        if plans and not would_load:
            self._costs.follow(request.request_id, request.num_tokens)
        request_state.patience_s = self._config.client.arrival_timeout_s
        request_state.no_hit, request_state.computed_tokens = NO_ANSWER, computed_tokens
        request_state.ask = partial(
            self._ask, request_state, request_state.naming, asking, have_tokens, computed_tokens
        )
        request_state.lookup = self._lookups.submit(request_state.ask)

    def _name(self, request: "Request", rules: RequestRules) -> Prompt | None:
        """Hash the prompt. Never raises, because the scheduler would raise it again."""
        try:
            prompt, cause = prompt_of(self._namespace, request, rules, self._adapters, self._media)
            if prompt is None:
                self._say_once(request, cause)
            else:
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
                "kvhold: request %s is not cached, nor are others like it: %s",
                request.request_id,
                cause,
            )

    def _name_on(
        self, naming: "Future[Prompt | None]", request: "Request", num_tokens: int
    ) -> Prompt | None:
        prompt = naming.result()
        end = num_tokens - self._config.skip_last_n_tokens
        if prompt is not None and end > prompt.num_tokens:
            try:
                return prompt.followed_by(request.all_token_ids[prompt.num_tokens : end])
            except Exception:
                log.exception(
                    "kvhold: what request %s has generated is not looked up", request.request_id
                )
        return prompt

    def _patience(self, num_tokens: int, computed_tokens: int) -> float:
        client = self._config.client
        compute_s = self._costs.compute_s(num_tokens, computed_tokens)
        return max(client.call_timeout_s, min(compute_s, client.arrival_timeout_s))

    def _ask(
        self,
        request_state: _RequestState,
        naming: "Future[Prompt | None]",
        asking: tuple[str, int, int] | None,
        have_tokens: int,
        computed_tokens: int,
    ) -> Hit | None:
        prompt = None if naming.cancelled() else naming.result()
        request_state.is_lost = False
        try:
            patience_s = request_state.patience_s = self._patience(
                request_state.request.num_tokens, computed_tokens
            )
            cost = self._costs.cost(*asking) if asking is not None else None
            if prompt is not None:
                return self._cache.lookup(
                    self._asked(prompt).query(),
                    cost=cost,
                    have_tokens=have_tokens,
                    wait_s=0,
                    deadline_s=patience_s,
                )
        except NodeLost as error:
            log.debug("kvhold: lookup: %s", error)
            self._note_loss(request_state)
        except KVHoldError as error:
            log.debug("kvhold: lookup: %s", error)
        except Exception:
            log.exception("kvhold: lookup")
        return None

    def _look_again(self, request_state: _RequestState, hit: Hit, settle: bool) -> Hit | None:
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

    def _note_loss(self, request_state: _RequestState) -> None:
        compute_s = self._costs.compute_s(
            request_state.request.num_tokens, request_state.computed_tokens
        )
        request_state.compute_s = min(compute_s, request_state.patience_s)
        request_state.is_lost = True

    def _asked(self, prompt: Prompt) -> Prompt:
        """Leave out the prompt's last token, if the model does not allow it in a hit."""
        if (
            self._geometry.whole_prompt_fits
            or self._config.skip_last_n_tokens
            or not prompt.num_tokens
        ):
            return prompt
        return prompt.until(prompt.num_tokens - 1)

    def _tell(self, took: Took) -> None:
        try:
            self._cache.report_timing(
                took.request_id[:MOST_NAME], load_s=took.load_s, compute_s=took.compute_s
            )
        except KVHoldError as error:
            log.debug("kvhold: %s", error)

    def _resolve(
        self, request_state: _RequestState, patience_s: float, *, last: bool = False
    ) -> bool:
        """Take the lookup's answer if it is there in time and final.

        last: take any answer; a late one is a miss
        """
        assert request_state.lookup is not None
        assert request_state.naming is not None
        began_s, hit, lookup = time.monotonic(), None, request_state.lookup
        try:
            # no pass waits for arrivals
            hit = lookup.result(timeout=0 if request_state.arriving else patience_s)
            request_state.lookup = None
        except FutureTimeout:
            if not last and began_s - request_state.asked_s < request_state.patience_s:
                return False
            self._let_go(request_state)
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        if (
            hit is None
            and request_state.is_lost
            and not last
            and self._waits(request_state, began_s)
        ):
            request_state.lookup = request_state.lookup or lookup
            return False
        if hit is not None and hit.arriving and not last:
            settle = (
                bool(request_state.pending_steps)
                or began_s - request_state.since_s >= self._config.client.arrival_timeout_s
            )
            request_state.lookup, request_state.arriving = (
                self._lookups.submit(self._look_again, request_state, hit, settle),
                hit,
            )
            request_state.asked_s = began_s
            return False
        request_state.hit, request_state.arriving = hit, None
        prompt = request_state.naming.result() if request_state.naming.done() else None
        self._count(request_state, prompt, hit)
        if (
            hit is not None
            and not request_state.pending_steps
            and request_state.rules.plan
            and (hit.num_tokens or hit.reason == SLOWER)
        ):
            self._costs.follow(request_state.request.request_id, request_state.request.num_tokens)
        if prompt is not None:
            request_state.tracker = RequestTracker(
                prompt,
                save_decode=self._saves_decode(request_state),
                store_tails=self._config.store_tails,
                skip_last_n_tokens=self._config.skip_last_n_tokens,
            )
            request_state.tracker.found(hit.num_tokens if hit is not None else 0)
            if self._announcer is not None and hit is not None:
                self._announcer.found(request_state.request, prompt, hit.num_tokens)
        return True

    def _waits(self, request_state: _RequestState, now_s: float) -> bool:
        """Whether a lookup waits for the next node: at most as long as computing takes."""
        waited_s = now_s - request_state.asked_s
        request_state.arriving = None
        if self._cache.connected:
            if request_state.ask is not None and waited_s < request_state.patience_s:
                request_state.lookup = self._lookups.submit(request_state.ask)
            return request_state.lookup is not None
        if not self._cache.is_rejoining:
            return False
        away_s = now_s - self._cache.lost_at_s
        if waited_s < request_state.compute_s and away_s < max(_START_S, request_state.compute_s):
            return True
        request_state.no_hit = NOT_AWAITED
        return False

    def _count(self, request_state: _RequestState, prompt: Prompt | None, hit: Hit | None) -> None:
        request = request_state.request
        num_tokens = max(request.num_prompt_tokens, prompt.num_tokens if prompt is not None else 0)
        if hit is None:
            reason = request_state.no_hit if prompt is not None else NOT_NAMED
            self.tally.looked_up(num_tokens, sources={}, reason=reason)
        else:
            reason = hit.reason if hit.reason and hit.reason != WHOLE else BELOW_MINIMUM
            self.tally.looked_up(num_tokens, sources=hit.sources, reason=reason)

    def _stores_for(self, request_state: _RequestState) -> bool:
        trusted = self._stores_plain or request_state.request.lora_request is not None
        return self._may_store and request_state.rules.store and trusted

    def _adapter_of(self, request_state: _RequestState) -> AdapterUse | None:
        adapter = request_state.request.lora_request
        return self._adapters.use_of(adapter) if adapter is not None else None

    def _adapter_stays(self, request_state: _RequestState) -> bool:
        adapter = request_state.request.lora_request
        return adapter is None or self._adapters.is_unchanged(adapter)

    def _saves_decode(self, request_state: _RequestState) -> bool:
        """Whether generated tokens are stored.

        Not for a resumable session, whose later prompts may contain more than tokens.
        """
        return self._config.save_decode and not request_state.request.resumable

    def _loads_for(self, request_state: _RequestState) -> bool:
        return self._may_load and request_state.rules.load

    def _let_go(self, request_state: _RequestState) -> None:
        if request_state.lookup is not None and not request_state.lookup.cancel():
            self._lookups.submit(_close_late_hit, request_state.lookup)
        request_state.lookup = None
        hit, request_state.hit, request_state.arriving = (
            request_state.arriving or request_state.hit,
            None,
            None,
        )
        if hit is not None and hit.ticket:
            self._lookups.submit(hit.close)


def _blocks(
    part: Part, table: list[int], first: int, last: int, *, skipped: int = 0, unused: int = 0
) -> list[int]:
    """Return the blocks of the tokens from `first` to before `last`, padded with -1.

    -1: not written, because it ends before `skipped`, begins after `last`, or left the window.
    """
    size = part.group.block_tokens
    begin, end = max(first, skipped) // size, -(-last // size)
    there = np.array(table[begin:end], dtype=np.int64)
    there[there == _NULL_BLOCK] = -1
    ids: list[int] = there.tolist()
    if part.group.attention == "state":
        ids += [-1] * (end - begin - len(ids))  # no state for later blocks yet
    return [-1] * (begin - first // size) + ids + [-1] * (-(-unused // size) - end)


def _close_late_hit(lookup: "Future[Hit | None]") -> None:
    hit = lookup.result()
    if hit is not None:
        hit.close()
