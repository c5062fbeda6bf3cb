"""Pages between SGLang's device pools and the cache, a layer at a time.

    match_prefix   -> lookup      pins the hit for `_PINNED_S`
    init_load_back -> load        queues a load
    before a pass  -> start_layer_wise_loading
    in the pass    -> layer_done_counter.wait_until(layer)
    after it       -> finish_layer_wise_loading
    insert         -> offload

SGLang aborts a request whose load fails, so a single rank accepts a load only if its pages are
pinned; several ranks, which must agree, accept all. SGLang's scheduler thread calls.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from queue import SimpleQueue
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvhold.core.api import Hit
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.integrations.sglang.names import PagePart, check_keys, engine_of, namespace_of
from kvhold.integrations.sglang.page_store import PageStore
from kvhold.integrations.sglang.pools import Int64s, device_pages
from kvhold.integrations.sglang.settings import linker_settings
from kvhold.integrations.versions import warn_if_untested
from kvhold.memory.copier import Copier, Mark, Piece, wait_for
from kvhold.memory.device import COPY_THREADS, proven_copier_for
from kvhold.memory.placement import place_own_threads, place_this_thread

log = logging.getLogger(__name__)

_PINNED_S = 30.0
_AGAIN_S = 30.0  # SGLang repeats lookups in each pass
_MOST_REQUESTS = 1 << 12


@dataclass(frozen=True)
class _Found:
    keys: tuple[str, ...]
    hit: Hit
    until_s: float


@dataclass(frozen=True)
class _Load:
    rid: str
    keys: tuple[str, ...]
    ids: Int64s
    found: _Found | None


class KVHoldLinker(UnifiedCacheLinker):  # type: ignore[misc, unused-ignore]
    """One rank's device pages."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Sequence[ComponentType] | set[ComponentType],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises ConfigError, NodeError, CapacityError, LayoutError: an unsupported engine."""
        warn_if_untested("SGLang", sglang.__version__)
        settings = linker_settings(extra_config)
        self.forward_stream = forward_stream
        if set(components) != {ComponentType.FULL}:
            raise LayoutError(
                "the linker serves models with full attention only, not "
                f"{sorted(c.name for c in components)}"
            )
        if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
            raise LayoutError(
                "the linker does not serve draft models' KV; switch speculative decoding "
                "off, or use the storage"
            )
        engine, pool = engine_of(settings), params.token_to_kv_pool_allocator.get_kvcache()
        threads = settings.config.copy_threads or COPY_THREADS
        self._pages = device_pages(
            pool, page_size=params.page_size, kv_dtype=engine.kv_dtype, threads=threads
        )
        self.pools = {PoolName.KV: pool}
        part, self._one_rank = _part(params)
        replicated = len(self._pages.views) == 1 and self._pages.views[0].planes == 1
        self._stores = not replicated or part.tp[0] == 0
        namespace = namespace_of(
            engine,
            self._pages.layout,
            part,
            pool=str(PoolName.KV),
            replicated=replicated,
            salt=self._pages.identity,
        )
        self.layer_done_counter = LayerWiseLoadCounter(self._pages.views[0].layers)
        self._cache = settings.open("sglang")
        device = self._pages.views[0].device
        self._copier: Copier = proven_copier_for(
            device,
            threads=settings.config.copy_threads,
            cache=self._cache,
            allow_unproven=settings.config.allow_unproven,
        )
        self._page_store = PageStore(self._cache, namespace, settings.config)
        self._page_store.register()
        self._copier.prepare()
        self._found: dict[str, _Found] = {}
        self._asked_s: dict[str, float] = {}
        self._queued: dict[str, _Load] = {}
        self._under_way = 0
        self._idle = threading.Condition()
        self._offloaded: SimpleQueue[bool] = SimpleQueue()
        placed: dict[str, Any] = {
            "initializer": place_this_thread,
            "initargs": (settings.config.client.cores,),
        }
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvhold-load", **placed)
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvhold-store", **placed)
        place_own_threads(settings.config.client.cores)
        log.info(
            "kvhold: linker, pages of %d tokens, namespace %s",
            params.page_size,
            namespace.digest.hex(),
        )

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The restorable prefix lengths, in pages."""
        keys = _kv(transfers).keys or []
        check_keys(keys)
        self._forget(rid)
        self._forget_late()
        hit = self._page_store.find(keys, again=self._is_again(rid))
        if hit is None:
            return []
        num_pages = hit.num_tokens // self._pages.layout.tokens_per_chunk
        self._found[rid] = _Found(tuple(keys[:num_pages]), hit, time.monotonic() + _PINNED_S)
        return list(range(1, num_pages + 1))

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load. False: its pages are not pinned (a single rank only).

        Raises ValueError: a second load, or missing keys or indices.
        """
        transfer = _kv(transfers)
        keys = tuple(transfer.keys or ())
        if rid in self._queued:
            raise ValueError(f"a load for request {rid} is queued already")
        if not keys or transfer.device_indices is None:
            raise ValueError(f"a load for request {rid} needs keys and device_indices")
        ids = self._pages.ids(transfer.device_indices, len(keys))
        found = self._found.pop(rid, None)
        if found is None or found.keys[: len(keys)] != keys:
            if found is not None:
                found.hit.close()
            hit = self._page_store.find(keys, again=True)
            if hit is not None and hit.num_tokens < len(keys) * self._pages.layout.tokens_per_chunk:
                hit.close()
                hit = None
            found = None if hit is None else _Found(keys, hit, 0.0)
        if found is None and self._one_rank:
            return False
        self._queued[rid] = _Load(rid, keys, ids, found)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        self._forget(rid)
        queued = self._queued.pop(rid, None)
        if queued is not None and queued.found is not None:
            queued.found.hit.close()
        return queued is not None

    def start_layer_wise_loading(self) -> int:
        """Return the index to wait with; -1: none is queued."""
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        mark = self._copier.mark()
        self._begin(self._loader, lambda: self._load_layers(index, loads, mark))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch has stopped writing. True: all pages arrived."""
        return bool(self.layer_done_counter.finish(counter_index))

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """All or none."""
        transfer = _kv(transfers)
        keys = list(transfer.keys or [])
        if not keys or transfer.device_indices is None:
            return False
        check_keys(keys)
        ids = self._pages.ids(transfer.device_indices, len(keys))
        if not self._stores:  # rank 0 stores the same KV
            self._offloaded.put(True)
            return True
        events = self.record_offload_ready()
        self._begin(self._storer, lambda: self._offload(keys, ids, events))
        return True

    def num_completed_offloads(self) -> int:
        self._forget_late()
        return self._offloaded.qsize()

    def pop_completed_offload(self) -> bool:
        """The oldest completed one. True: all its pages are cached."""
        return self._offloaded.get_nowait()

    def reset(self) -> None:
        for rid in [*self._queued]:
            self.cancel_queued_load(rid)
        for rid in [*self._found]:
            self._forget(rid)
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way)
        while not self._offloaded.empty():
            self._offloaded.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        self._copier.close()
        self._cache.close()

    def _begin(self, thread: ThreadPoolExecutor, work: Callable[[], None]) -> None:
        with self._idle:
            self._under_way += 1
        thread.submit(work).add_done_callback(lambda _: self._ended())

    def _ended(self) -> None:
        with self._idle:
            self._under_way -= 1
            self._idle.notify_all()

    def _load_layers(self, index: int, loads: list[_Load], mark: Mark | None) -> None:
        try:
            with ExitStack() as held:
                pieces = [piece for load in loads for piece in self._claimed(load, held)]
                for layer in range(self._pages.views[0].layers):
                    wait_for(
                        [self._copier.scatter(pieces, after=mark, layers=range(layer, layer + 1))]
                    )
                    self.layer_done_counter.complete(index, layer)
        # the engine must not wait for these layers
        except BaseException as error:
            if not isinstance(error, KVHoldError):
                log.exception("kvhold: loading for requests %s", [load.rid for load in loads])
            else:
                log.warning(
                    "kvhold: the KV of requests %s did not arrive: %s",
                    [load.rid for load in loads],
                    error,
                )
            self.layer_done_counter.fail(index, error)
        finally:
            for load in loads:
                if load.found is not None:
                    load.found.hit.close()

    def _claimed(self, load: _Load, held: ExitStack) -> list[Piece]:
        lease = None if load.found is None else self._cache.claim(load.found.hit.ticket)
        if lease is None:
            raise KVHoldError("its pages have left the cache")
        held.enter_context(lease)
        return self._pages.pieces_of(lease, load.ids)

    def _offload(self, keys: list[str], ids: Int64s, events: list[Any]) -> None:
        stored = False
        try:
            for event in events:
                event.synchronize()
            stored = all(
                self._page_store.store(
                    keys, None, lambda _, buffer, places: self._gather(ids, buffer, places)
                )
            )
        except Exception:
            log.exception("kvhold: could not store pages")
        finally:
            self._offloaded.put(stored)

    def _gather(self, ids: Int64s, buffer: Any, places: Any) -> None:
        wait_for([self._copier.gather(self._pages.pieces(ids, buffer, places), after=None)])

    def _forget(self, rid: str) -> None:
        found = self._found.pop(rid, None)
        if found is not None:
            found.hit.close()

    def _is_again(self, rid: str) -> bool:
        now = time.monotonic()
        is_again = now - self._asked_s.pop(rid, -inf) < _AGAIN_S
        self._asked_s[rid] = now
        if len(self._asked_s) > _MOST_REQUESTS:
            del self._asked_s[next(iter(self._asked_s))]
        return is_again

    def _forget_late(self) -> None:
        now = time.monotonic()
        for rid in [rid for rid, found in self._found.items() if found.until_s < now]:
            self._forget(rid)


def _kv(transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    for transfer in transfers:
        if transfer.name == PoolName.KV:
            return transfer
    raise ValueError(
        f"no transfer of pool {PoolName.KV} among {[str(transfer.name) for transfer in transfers]}"
    )


def _part(params: Any) -> tuple[PagePart, bool]:
    tp = (0, 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        tp = (
            torch.distributed.get_rank(group=group),
            torch.distributed.get_world_size(group=group),
        )
    part = PagePart(
        tp=tp, pp=(params.pp_rank, params.pp_size), cp=(params.attn_cp_rank, params.attn_cp_size)
    )
    return part, tp[1] == params.pp_size == params.attn_cp_size == 1
