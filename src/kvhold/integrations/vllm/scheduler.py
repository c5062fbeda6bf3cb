"""The scheduler's process and thread. Only `reset` waits for the node."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvhold.core.api import Hit, Uses
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, KVHoldError, LayoutError
from kvhold.core.keys import ChunkNames, Namespace
from kvhold.integrations.vllm.blending.requests import BlendRequests
from kvhold.integrations.vllm.costs import Costs
from kvhold.integrations.vllm.descriptions import Descriptions
from kvhold.integrations.vllm.drafts import DraftLimit, Undrafted
from kvhold.integrations.vllm.events import Announcer, Describer
from kvhold.integrations.vllm.geometry import Geometry
from kvhold.integrations.vllm.handovers import answer
from kvhold.integrations.vllm.hints import HintedRequests
from kvhold.integrations.vllm.hosts import NodePlace, hosts_of, named_by_hosts, place_of
from kvhold.integrations.vllm.lookups import RequestLookups, has_content
from kvhold.integrations.vllm.media import Media
from kvhold.integrations.vllm.namespace import join, rules_of, usual
from kvhold.integrations.vllm.naming.adapters import Adapters, AdapterUse
from kvhold.integrations.vllm.naming.loads import can_observe
from kvhold.integrations.vllm.prompt_ends import PromptEnds
from kvhold.integrations.vllm.request_state import RequestState, Scheduled
from kvhold.integrations.vllm.stats import Tally
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.tracing import request_tracer
from kvhold.memory.placement import place_own_threads, place_this_thread
from kvhold.node.span import HostSpan, OtherHosts, OwnHost, SpanHit

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


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
        make_describer: Callable[[], Describer],
        announces: bool = False,
        layerwise: bool = False,
        step_tokens: int = 1 << 40,
        media: Media | None = None,
        draft_limit: DraftLimit | None = None,
        num_hosts: int = 1,
    ) -> None:
        """num_hosts: of the workers by the settings; several need `use_hosts`
        loads: hits may be loaded; vLLM protects freed blocks from running passes only for loads
            that it knows
        stores_plain: KV without an adapter can be trusted
        """
        self._config = config
        self._may_store = stores
        self._stores_plain = stores_plain
        self._layerwise = layerwise
        self._undrafted = (
            Undrafted(geometry.parts, draft_limit) if draft_limit is not None else None
        )
        self._geometry = geometry
        self._configured = namespace
        self._others: OtherHosts | None = None
        self._host_of_rank: tuple[int, ...] = ()
        self._storers: tuple[int, ...] | None = None
        self._cache = join(config, namespace, name="vllm-scheduler")
        self._lookup_thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="kvhold-lookup",
            initializer=place_this_thread,
            initargs=(config.client.cores,),
        )
        place_own_threads(config.client.cores)
        self._announcer = (
            Announcer(self._cache, self._lookup_thread, make_describer()) if announces else None
        )
        self._descriptions = Descriptions(self._cache, self._lookup_thread, make_describer)
        self._adapters = Adapters(can_observe)
        self._request_states: dict[str, RequestState] = {}
        self.tally = Tally()
        self._tracer = request_tracer(config.otel, self.tally)
        self._loads: list[Load] = []
        self._inside: list[str] = []
        self._last_stores: list[Store] = []
        self._ends = PromptEnds(
            geometry,
            is_layerwise=layerwise,
            drafts=draft_limit is not None,
            keep_s=config.client.handover_timeout_s,
        )
        self.lookups = RequestLookups(
            config,
            namespace,
            geometry,
            self._cache,
            self._lookup_thread,
            loads=loads,
            costs=Costs(step_tokens),
            adapters=self._adapters,
            media=media or Media(),
            announcer=self._announcer,
            descriptions=self._descriptions,
            tally=self.tally,
            awaits_hosts=num_hosts > 1,
            hands_ends=self._ends.are_handed,
        )
        self.hints = HintedRequests(config, self._cache, self._lookup_thread, self.tally)
        self.blends = BlendRequests(
            config, lambda: self._namespace, self._cache, self._lookup_thread, loads=loads
        )
        self._log_start()

    def _log_start(self) -> None:
        log.info(
            "kvhold: %d tokens a chunk (%s), %d shards, node on %s",
            self._namespace.layout.tokens_per_chunk,
            ", ".join(
                f"{len(part.layer_names)} layers of {part.group.attention} attention"
                for part in self._geometry.parts
            ),
            self._geometry.shards,
            self._cache.path,
        )

    @property
    def _namespace(self) -> Namespace:
        return self.lookups.namespace

    @property
    def _costs(self) -> Costs:
        return self.lookups.costs

    @property
    def socket(self) -> Path:
        return self._cache.path

    def use_hosts(self, places: Mapping[tuple[int, int], NodePlace]) -> None:
        """places: by (stage, rank). Raises LayoutError, ConfigError."""
        hosts = hosts_of(place_of(self.socket), places, self._geometry)
        if all(host.is_own for host in hosts):
            return
        self._refuse_several_hosts()
        namespace = named_by_hosts(self._configured, hosts, self._geometry)
        self._configured = self.lookups.namespace = namespace
        self._cache.register(usual(self._config, namespace))
        asked = sorted(hosts, key=lambda host: host.is_own)
        self._others = OtherHosts(
            [host.relay_place(self._geometry) for host in asked if not host.is_own],
            self._config.span,
            cores=self._config.client.cores,
        )
        if faults := self._others.wait_until_tried(self._config.client.connect_timeout_s):
            self._others.close()
            raise LayoutError(
                "kvhold does not serve this engine, because its scheduler cannot ask the nodes of "
                f"all hosts of its workers: {'; '.join(faults)}. Correct span.listen, or the "
                "firewalls between the hosts"
            )
        own = [OwnHost(self._cache, host.shards(self._geometry)) for host in asked if host.is_own]
        numbers = {rank: number for number, host in enumerate(asked) for rank in host.ranks}
        self._host_of_rank = tuple(numbers[rank] for rank in range(len(numbers)))
        self._storers = tuple(
            sorted(rank for host in hosts for rank in host.storers(self._geometry))
        )
        self.lookups.use_span(HostSpan([*self._others.hosts, *own]))
        self.hints.refusal = "the engine's workers are on several hosts"
        log.info(
            "kvhold: the workers are on %d hosts; a hit is what the nodes of all hosts have",
            len(hosts),
        )

    def _refuse_several_hosts(self) -> None:
        rules = self._config.rules
        reasons = {
            "it publishes KV cache events (kv_events_config)": self._announcer is not None,
            "rules.plan is set": rules.plan,
            "rules.wait_for_computing is set": rules.wait_for_computing,
        }
        if found := [reason for reason, applies in reasons.items() if applies]:
            raise LayoutError(
                "kvhold does not serve this engine whose workers are on several hosts: "
                f"{'; '.join(found)}"
            )

    def arrived(self, request: "Request") -> None:
        try:
            rules = rules_of(
                request, self._config, is_coded=any(part.is_coded for part in self._geometry.parts)
            )
        except ConfigError as error:
            log.warning("kvhold: request %s is not cached: %s", request.request_id, error)
            self.tally.add("refused_requests", 1)
            self.lookups.note(request)
            self.hints.arrived(request, None, stores=False)
            return
        # an earlier request with this id: a session that continues its prompt
        if (before := self._request_states.pop(request.request_id, None)) is not None:
            self._let_go(before)
            self.lookups.withdraw(before)
            if before.trace is not None:
                before.trace.end(status="continued")
        if rules.store or rules.load:
            naming = self.lookups.submit_name(request, rules)
            part = self.lookups.handovers.part_of(request)
            trace = self._tracer.begin(request) if self._tracer is not None else None
            state = RequestState(request, rules, part, naming, trace=trace)
            self._request_states[request.request_id] = state
            stores = self._stores_for(state)
            self.hints.arrived(request, naming, stores=stores)
            state.blend = self.blends.arrived(request, rules, part, stores=stores)
        else:
            self.lookups.note(request)
            self.hints.arrived(request, None, stores=False)

    def matched(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens to load after `computed_tokens` (None: ask again), and whether outside the
        passes.
        """
        request_state = self._request_states.get(request.request_id)
        if request_state is None:
            return 0, False
        if request_state.is_private:
            return self.blends.matched(request_state, request, computed_tokens) or (0, False)
        if request_state.tried != request.num_preemptions:
            if request.request_id in self._inside:  # it has lost its load's blocks
                request_state.loading = False
                self._inside.remove(request.request_id)
            self.lookups.let_go(request_state)
            self.lookups.withdraw(request_state)
            self.lookups.look_up(
                request_state,
                request,
                computed_tokens,
                self._uses_of(request_state),
                stores=self._stores_for(request_state),
            )
        if not self.lookups.would_load(request_state, computed_tokens):
            # with the answer, the first pass stores the KV that the other engine awaits
            if request_state.part.produces and request_state.lookup is not None:
                self.lookups.resolve(request_state, self.lookups.patience_s)
            return 0, False
        if request_state.lookup is not None and not self.lookups.resolve(
            request_state, self.lookups.patience_s
        ):
            return None, False
        if (blended := self._blended(request_state, request, computed_tokens)) is not None:
            return blended
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

    def _blended(
        self, request_state: RequestState, request: "Request", computed_tokens: int
    ) -> tuple[int | None, bool] | None:
        answer = self.blends.matched(request_state, request, computed_tokens)
        if request_state.is_private:
            request_state.tracker = None
            self.lookups.withdraw(request_state)
            self._costs.forget(request.request_id)
        return answer

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Plan a load into `blocks`; without one, release the hit."""
        request_state = self._request_states.get(request.request_id)
        if request_state is None or (request_state.loading and not external_tokens):
            return
        if request_state.is_private:
            if external_tokens:
                table = blocks.get_block_ids()[self._geometry.parts[0].table]
                self.blends.allocated(request_state, request, table)
                request_state.loading = True
            return
        if not external_tokens or request_state.hit is None:
            if request_state.lookup is None:  # a pending answer decides which chunks are stored
                self.lookups.let_go(request_state)
            return
        first_chunk = request_state.first_token // self._namespace.layout.tokens_per_chunk
        first = first_chunk * self._namespace.layout.tokens_per_chunk
        last = request_state.first_token + external_tokens
        tables = blocks.get_block_ids()
        ids = [
            part.blocks(
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
                tickets=self._tickets_of(request_state.hit),
                trace=request_state.trace_context,
            )
        )
        if not self._layerwise:
            self._costs.load_begins(request.request_id, self._load_bytes(ids))
        request_state.loading = True

    def plan(self, output: "SchedulerOutput") -> Steps:
        self.loaded(self._inside)  # layerwise is synchronous
        self._costs.planned(output)
        if self._undrafted is not None:
            self._undrafted.planned(output)
        stores, self._last_stores = self._last_stores, []
        self._ends.begin_pass()
        for new in output.scheduled_new_reqs:
            self._run(stores, output, new.req_id, new.num_computed_tokens, starts=True)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            self._run(stores, output, request_id, cached.num_computed_tokens[at], starts=resumed)
        loads, self._loads = self._loads, []
        self._inside = [load.request_id for load in loads if load.inside]
        computes = output.total_num_scheduled_tokens > 0
        states = self._request_states.values()
        self.lookups.begin_pass(idle=not computes and not any(one.loading for one in states))
        return Steps(
            loads, stores, computes, self._storers, self.blends.take(), self._ends.take_zeroed()
        )

    def loaded(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_state := self._request_states.get(request_id):
                request_state.loading = False
                self._let_go(request_state)

    def step_over(self) -> None:
        self.lookups.submit_timings()

    def finished(
        self, request: "Request", tables: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """True: keep the blocks until the last tokens are stored. The second value is for the
        engine that decodes, or None.
        """
        request_state = self._request_states.pop(request.request_id, None)
        if request_state is None:
            return False, None
        complete = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        keeps_blocks = self._finish(request_state, request, tables, complete=complete)
        if request_state.trace is not None:
            request_state.trace.end(status=request.status.name.lower())
        tracker = request_state.tracker
        if not complete or tracker is None or not self._stores_for(request_state):
            return keeps_blocks, None
        return keeps_blocks, answer(request_state.part, request.request_id, tracker)

    def stored(self, request_ids: Iterable[str]) -> None:
        """The last chunks of ended requests are being copied."""
        for request_id in request_ids:
            self.lookups.withdraw_late(request_id)

    def _finish(
        self,
        request_state: RequestState,
        request: "Request",
        tables: tuple[list[int], ...],
        *,
        complete: bool,
    ) -> bool:
        late = (
            complete
            and bool(request_state.pending_steps)
            and self._catch_up(request_state, self.lookups.patience_s, last=True)
        )
        self._let_go(request_state)
        keeps_blocks = complete and self._store_last(request_state, request, tables, late=late)
        self.lookups.withdraw(request_state, is_stored_late=keeps_blocks)
        self._costs.forget(request.request_id)
        if request_state.naming is not None and not has_content(request):
            request_state.naming.cancel()
        return keeps_blocks

    def _store_last(
        self,
        request_state: RequestState,
        request: "Request",
        tables: tuple[list[int], ...],
        *,
        late: bool,
    ) -> bool:
        """Plan the last store of a complete request. late: some of its steps were just counted"""
        if request_state.tracker is None or not self._stores_for(request_state):
            return False
        if not late and not self.lookups.saves_decode(request_state):
            return False
        reached = min(
            len(tables[part.table]) * part.group.block_tokens for part in self._geometry.parts
        )
        taken = request_state.tracker.finish(request.all_token_ids, reached // self._block)
        stores = self._stores(request_state, taken, lambda: tables, last=True)
        self._last_stores += stores
        return bool(stores)

    def reset(self) -> bool:
        """Invalidate all stored KV, and drop current stores. vLLM calls this after weights have
        changed in place.
        """
        before = self._namespace
        self.lookups.namespace = self._configured.narrowed(tags=(("reset", token_hex(8)),))
        for request_state in self._request_states.values():
            self._let_go(request_state)
            self.lookups.withdraw(request_state)
            request_state.naming = request_state.tracker = None
            request_state.pending_steps.clear()
            request_state.tried = None
        if self._announcer is not None:
            self._announcer.reset()
        try:
            self._cache.clear(before.digest)
            if self.lookups.span is not None:
                self.lookups.span.repeat_clear(
                    before.digest,
                    self._cache.cleared_ns(before.digest),
                    deadline_s=self._config.client.call_timeout_s,
                )
        except KVHoldError as error:
            log.warning(
                "kvhold: KV from before the reset is not used any more, but still takes memory: %s",
                error,
            )
        return True

    def take_events(self) -> "list[KVCacheEvent]":
        return self._announcer.take() if self._announcer is not None else []

    def close(self) -> None:
        self._lookup_thread.shutdown(wait=True, cancel_futures=True)
        self.hints.close()
        if self._others is not None:
            self._others.close()
        self._cache.close()
        if self._tracer is not None:
            self._tracer.close()

    @property
    def _block(self) -> int:
        """Tokens of a block, or of a chunk without tails."""
        return self._namespace.layout.tail_tokens or self._namespace.layout.tokens_per_chunk

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
        if request_state is None or request_state.is_private:
            return
        step = Scheduled(output.num_scheduled_tokens[request_id], computed_tokens, starts)
        request_state.pending_steps.append(step)
        block_ids_of = output.kv_connector_block_state.get_block_ids
        self._ends.scheduled(request_state, step, block_ids_of)
        if (
            not self._catch_up(request_state, 0.0)
            or request_state.tracker is None
            or not self._stores_for(request_state)
        ):
            return
        taken = request_state.tracker.take(
            request_state.request.all_token_ids if self.lookups.saves_decode(request_state) else ()
        )
        stores += self._stores(request_state, taken, partial(block_ids_of, request_id))

    def _catch_up(
        self, request_state: RequestState, patience_s: float, *, last: bool = False
    ) -> bool:
        """False: no answer yet."""
        if request_state.lookup is not None:
            if not self.lookups.resolve(request_state, patience_s, last=last):
                return False
            self.lookups.let_go(request_state)
        pending_steps, request_state.pending_steps = request_state.pending_steps, []
        if request_state.tracker is not None:
            for step in pending_steps:
                if step.starts:
                    request_state.tracker.start(step.computed_tokens)
                request_state.tracker.advance(step.num_tokens, step.computed_tokens)
        return True

    def _stores(
        self,
        request_state: RequestState,
        taken: ChunkNames | None,
        tables_of: Callable[[], Sequence[list[int]]],
        *,
        last: bool = False,
    ) -> list[Store]:
        """Of the taken chunks, and of the prompt's end. tables_of: by part"""
        end = self._ends.take(request_state)
        if (taken or end) is None or not self.lookups.is_certain(request_state.request):
            return []
        tables = tables_of()
        planned = [
            self._store(request_state, names, tables, last=last)
            for names in (taken, end)
            if names is not None
        ]
        return [store for store in planned if store is not None]

    def _store(
        self,
        request_state: RequestState,
        names: ChunkNames,
        tables: Sequence[list[int]],
        *,
        last: bool = False,
    ) -> Store | None:
        """None: a block lacks the drafter's KV."""
        end = names.first_token + int(names.num_tokens(self._namespace.layout).sum())
        ids = [
            part.blocks(tables[part.table], names.first_token, end) for part in self._geometry.parts
        ]
        if self._undrafted is not None and self._undrafted.are_among(ids):
            return None
        if not names.tail_tokens % self._block:
            if self._announcer is not None:
                self._announcer.stored(request_state.request, names)
            self._descriptions.stored(request_state.request, names)
        return Store(
            request_state.request.request_id,
            names,
            ids,
            self._ends.options_of(names, request_state.rules.store_options),
            last,
            self._adapter_of(request_state),
            request_state.trace_context,
        )

    def _let_go(self, request_state: RequestState) -> None:
        self.lookups.let_go(request_state)
        self.blends.let_go(request_state)

    def _tickets_of(self, hit: Hit) -> tuple[int, ...]:
        if not isinstance(hit, SpanHit):
            return ()
        return tuple(hit.tickets[host] for host in self._host_of_rank)

    def _load_bytes(self, block_ids: list[list[int]]) -> int:
        groups = [part.group for part in self._geometry.parts]
        blocks = [len(ids) - ids.count(-1) for ids in block_ids]
        return self._geometry.shards * sum(
            n * group.layers * group.block_bytes for n, group in zip(blocks, groups, strict=True)
        )

    def _stores_for(self, request_state: RequestState) -> bool:
        trusted = self._stores_plain or request_state.request.lora_request is not None
        return self._may_store and request_state.rules.store and trusted

    def _uses_of(self, request_state: RequestState) -> Uses:
        if request_state.request.num_preemptions:
            return "none"
        return "all" if self._stores_for(request_state) else "known"

    def _adapter_of(self, request_state: RequestState) -> AdapterUse | None:
        adapter = request_state.request.lora_request
        return self._adapters.use_of(adapter) if adapter is not None else None
