"""The connector in the scheduler's process: asks the cache what it holds, and tells the workers what to load and store.

A request's prompt is hashed on a thread of its own as soon as it arrives, and looked up there when the scheduler first asks, so that what
waits in a long queue pins nothing and finds what was stored meanwhile. One scheduling pass waits for a few milliseconds at most, however
many lookups are under way, and is told "ask again" after that; a lookup that comes too late or fails is a miss. While chunks come from
lower tiers the request waits in the queue, for `client.arrival_timeout_s` at most; then it makes do with what has come. The hit stays
pinned from the lookup until the request is loaded, runs without it, or is gone. All methods run on the scheduler's thread, and none but
`reset` waits for the node there.
"""

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING

from kvhold.core.api import Hit
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, KVHoldError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.rules import Rules
from kvhold.integrations.vllm.space import join, prompt_of, rules_of
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.integrations.vllm.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_PATIENCE_S = 0.003  # of one scheduling pass for all its lookups; RAM answers in less


@dataclass
class _Followed:
    """A request from its arrival to its end.

    rules: what the request may do; nothing, where they are not understood
    arriving: the hit that `lookup` asks about again
    asked_s: when the cache was asked last; since_s: when it was asked first for this hit
    tried: how often it had been preempted when it was last looked up; a load is tried once for each time it starts anew, so that one
    that keeps failing ends in computing, not in a circle
    """

    rules: Rules
    naming: "Future[Prompt | None] | None" = None
    tracker: RequestTracker | None = None
    lookup: "Future[Hit | None] | None" = None
    arriving: Hit | None = None
    asked_s: float = 0.0
    since_s: float = 0.0
    hit: Hit | None = None
    first_token: int = 0  # where the load begins
    loading: bool = False
    tried: int = -1


class SchedulerSide:
    """One engine's lookups."""

    def __init__(self, config: Config, namespace: Namespace, *, loads: bool = True, stores: bool = True) -> None:
        """loads, stores: whether this engine may. vLLM keeps passes under way from writing to freed blocks only where it knows of loads."""
        self._config = config
        self._may_load = loads
        self._may_store = stores
        self._configured = namespace
        self._namespace = namespace
        self._cache = join(config, namespace, name="vllm-scheduler")
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="kvhold-lookup")
        self._adapters: dict[tuple[int, str, str], str] = {}  # the lookup thread's
        self._followed: dict[str, _Followed] = {}
        self._loads: list[Load] = []
        self._patience_s = _PATIENCE_S  # what is left of it in this pass
        block = namespace.layout.tail_tokens
        log.info(
            "kvhold: %d tokens a chunk (%d blocks of %d), node on %s",
            namespace.layout.tokens_per_chunk,
            namespace.layout.tokens_per_chunk // block,
            block,
            self._cache.path,
        )

    def arrived(self, request: "Request") -> None:
        """A new request: its prompt is hashed now."""
        try:
            rules = rules_of(request, self._config.rules)
        except ConfigError as error:
            log.warning("kvhold: request %s is not cached: %s", request.request_id, error)
            return
        if rules.store or rules.load:
            self._followed[request.request_id] = _Followed(rules, naming=self._lookups.submit(self._name, request, rules))

    def matched(self, request: "Request", computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; None: ask again."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            return 0
        if followed.hit is None and followed.lookup is None:
            if followed.tried == request.num_preemptions:
                return 0
            self._look_up(followed, request)
        if followed.lookup is not None and not self._resolve(followed):
            return None
        found = followed.hit.num_tokens if followed.hit is not None else 0
        if found <= computed_tokens or request.skip_reading_prefix_cache or not self._loads_for(followed):
            return 0  # the hit stays until there are blocks: by then the engine may have evicted what it has now
        followed.first_token = computed_tokens
        return found - computed_tokens

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """Blocks are there for the tokens to load; or nothing is to be loaded after all."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.loading:
            return
        if not external_tokens or followed.hit is None:
            self._let_go(followed)
            return
        layout = self._namespace.layout
        block = layout.tail_tokens
        first_chunk = followed.first_token // layout.tokens_per_chunk
        first_block, last_block = followed.first_token // block, -(-(followed.first_token + external_tokens) // block)
        skipped = first_block - first_chunk * layout.tokens_per_chunk // block
        ids = blocks.get_block_ids()[0][first_block:last_block]
        unused = -(-followed.hit.num_tokens // block) - last_block
        self._loads.append(Load(request.request_id, followed.hit.ticket, first_chunk, [-1] * skipped + list(ids) + [-1] * unused))
        followed.loading = True

    def plan(self, output: "SchedulerOutput") -> Steps:
        """What the workers do in the step that was just scheduled."""
        stores: list[Store] = []
        for new in output.scheduled_new_reqs:
            self._run(stores, output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            resumed = request_id in cached.resumed_req_ids
            self._run(stores, output, request_id, cached.num_computed_tokens[at] if resumed else None)
        loads, self._loads = self._loads, []
        self._patience_s = _PATIENCE_S
        return Steps(loads, stores)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """The workers have finished with these loads, well or not."""
        for request_id in request_ids:
            if followed := self._followed.get(request_id):
                followed.loading = False
                self._let_go(followed)

    def finished(self, request_id: str) -> None:
        """The request has ended, one way or another."""
        if followed := self._followed.pop(request_id, None):
            self._let_go(followed)
            if followed.naming is not None:
                followed.naming.cancel()

    def reset(self) -> bool:
        """Load nothing that was stored before, and store nothing that is being computed now.

        vLLM asks for this when the weights have changed in place. Then neither adapters' and tenants' KV of before may be found, nor may
        other engines, or this one once it has started anew, find KV of the new weights: the namespace gets a part that is new.
        """
        before, self._namespace = self._namespace, self._configured.narrowed(tags=(("reset", token_hex(8)),))
        for followed in self._followed.values():
            self._let_go(followed)
            followed.naming = followed.tracker = None
            followed.tried = -1
        try:
            self._cache.clear(before.digest)
        except KVHoldError as error:
            log.warning("kvhold: what was cached before the reset is not used any more, but still takes memory: %s", error)
        return True

    def close(self) -> None:
        """Leave the node."""
        self._lookups.shutdown(wait=True, cancel_futures=True)
        self._cache.close()

    def _run(self, stores: list[Store], output: "SchedulerOutput", request_id: str, started_at: int | None) -> None:
        """Count a scheduled request's tokens, and store what becomes whole. started_at: computed tokens, where it starts (again)."""
        followed = self._followed.get(request_id)
        if followed is None or followed.tracker is None or not self._may_store or not followed.rules.store:
            return
        if started_at is not None:
            followed.tracker.start(started_at)
        followed.tracker.advance(output.num_scheduled_tokens[request_id])
        taken = followed.tracker.take()
        if taken is None:
            return
        names, blocks = taken
        table = output.kv_connector_block_state.get_block_ids(request_id)
        stores.append(Store(request_id, names, list(table[0][blocks.start : blocks.stop]), followed.rules.ttl_s))

    def _look_up(self, followed: _Followed, request: "Request") -> None:
        if followed.naming is None:
            followed.naming = self._lookups.submit(self._name, request, followed.rules)
        followed.tried = request.num_preemptions
        followed.asked_s = followed.since_s = time.monotonic()
        followed.lookup = self._lookups.submit(self._ask, followed.naming)

    def _name(self, request: "Request", rules: Rules) -> Prompt | None:
        """On the lookup thread: hash the prompt. Never raises, because the scheduler would with it; what cannot be named is not cached."""
        try:
            prompt = prompt_of(self._namespace, request, rules, self._adapters)
            if prompt is not None:
                prompt.query()
        except KVHoldError as error:
            log.debug("kvhold: request %s is not cached: %s", request.request_id, error)
        except Exception:
            log.exception("kvhold: request %s is not cached", request.request_id)
        else:
            return prompt
        return None

    def _ask(self, naming: "Future[Prompt | None]") -> Hit | None:
        """On the lookup thread, after the naming: ask the cache. Never raises."""
        prompt = None if naming.cancelled() else naming.result()
        try:
            return self._cache.lookup(prompt.query(), wait_s=0) if prompt is not None else None
        except KVHoldError as error:
            log.debug("kvhold: lookup: %s", error)
        except Exception:
            log.exception("kvhold: lookup")
        return None

    def _resolve(self, followed: _Followed) -> bool:
        """Take the lookup's answer if it is there in time and final. False: not yet. Too late is a miss; the hit is let go."""
        assert followed.lookup is not None
        assert followed.naming is not None
        began_s, hit = time.monotonic(), None
        try:
            hit = followed.lookup.result(timeout=0 if followed.arriving else self._patience_s)  # what takes long anyway holds up no pass
            followed.lookup = None
        except FutureTimeout:
            if began_s - followed.asked_s < self._config.client.call_timeout_s:
                return False
            self._let_go(followed)
        finally:
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        if hit is not None and hit.arriving:
            settle = not self._loads_for(followed) or began_s - followed.since_s >= self._config.client.arrival_timeout_s
            followed.lookup, followed.arriving = self._lookups.submit(_look_again, hit, settle), hit
            followed.asked_s = began_s
            return False
        followed.hit, followed.arriving = hit, None
        prompt = followed.naming.result() if followed.naming.done() else None
        if prompt is not None:
            followed.tracker = RequestTracker(prompt)
            followed.tracker.found(hit.num_tokens if hit is not None else 0)
        return True

    def _loads_for(self, followed: _Followed) -> bool:
        return self._may_load and followed.rules.load

    def _let_go(self, followed: _Followed) -> None:
        if followed.lookup is not None and not followed.lookup.cancel():
            self._lookups.submit(_close_late_hit, followed.lookup)  # that thread has answered it by then
        followed.lookup = None
        hit, followed.hit, followed.arriving = followed.arriving or followed.hit, None, None
        if hit is not None and hit.ticket:
            self._lookups.submit(hit.close)


def _look_again(hit: Hit, settle: bool) -> Hit | None:
    """On the lookup thread: how far has it come? Never raises."""
    try:
        if settle:
            hit.settle()
        else:
            hit.refresh()
    except KVHoldError as error:
        log.debug("kvhold: lookup: %s", error)
        hit.close()
        return None
    except Exception:
        log.exception("kvhold: lookup")
        hit.close()
        return None
    return hit


def _close_late_hit(lookup: "Future[Hit | None]") -> None:
    hit = lookup.result()
    if hit is not None:
        hit.close()
