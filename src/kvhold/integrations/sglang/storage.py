"""Wrong arguments raise ValueError before any copy. A fault of the cache is a miss or an unstored
page.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvhold.integrations.sglang.names import PagePart, check_keys, engine_of, namespace_of
from kvhold.integrations.sglang.page_store import Copy, PageStore
from kvhold.integrations.sglang.pools import Pages, host_pages
from kvhold.integrations.sglang.settings import storage_settings
from kvhold.integrations.versions import warn_if_untested

log = logging.getLogger(__name__)

_KV = str(PoolName.KV)
_SHARDED = frozenset({str(PoolName.MAMBA)})  # differs even between ranks with equal KV


class KVHoldStorage(HiCacheStorage):  # type: ignore[misc, unused-ignore]
    """One rank's pages. Before `register_mem_pool_host`, every page is a miss."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Raises ConfigError, LayoutError, NodeError or CapacityError."""
        warn_if_untested("SGLang", sglang.__version__)
        self._storage_config = storage_config
        settings = storage_settings(storage_config.extra_config)
        self._config = settings.config
        self._engine = engine_of(settings)
        self._threads = settings.config.copy_threads or 2
        self._pools: dict[str, tuple[PageStore, Pages]] = {}
        self.registered_pools: dict[str, Any] = {}
        self._cache = settings.open("sglang")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Serve the KV pool. Raises LayoutError: its pages may not come back exactly."""
        self.mem_pool_host = mem_pool_host
        self._learn(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        self.registered_pools[host_pool_name] = host_pool
        self._learn(host_pool, str(host_pool_name))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        check_keys(keys)
        known = self._pools.get(_KV)
        return known[0].count(keys) if known else 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv_pages = self.batch_exists(keys, extra_info)
        found: dict[str, int] = {_KV: kv_pages} if kv_pages else {}
        lengths = frozenset(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not lengths:
                continue  # groups of blocks never shorten a hit
            allowed = self._lengths(transfer, keys[:kv_pages])
            if allowed:
                found[transfer.name] = max(allowed)
            lengths &= allowed
        return PoolTransferResult(max(lengths, default=0), found, sorted(lengths))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._load(_KV, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._store(_KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        self._check(transfers)
        return {t.name: self._load(str(t.name), t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        self._check(transfers)
        return {
            t.name: self._store(str(t.name), t.keys or [], t.host_indices, extra_info)
            for t in transfers
        }

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Flat pages. None: a miss, or a wrong target."""
        check_keys(keys)
        if target_locations is not None and len(target_locations) != len(keys):
            raise ValueError(f"target_locations: {len(target_locations)} for {len(keys)} keys")
        known = self._pools.get(_KV)
        if known is None:
            return [None] * len(keys)
        page_store, pages = known
        flat = (
            [pages.new_flat() for _ in keys] if target_locations is None else list(target_locations)
        )
        good = [number for number, page in enumerate(flat) if pages.takes_flat(page)]
        kept = [flat[number] for number in good]
        arrived = page_store.load(
            [keys[number] for number in good], _part_of(pages.scatter_flat, kept)
        )
        answer: list[torch.Tensor | None] = [None] * len(keys)
        for number, page, whole in zip(good, kept, arrived, strict=True):
            answer[number] = page if whole else None
        return answer

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """True: all pages are present now."""
        check_keys(keys)
        values = [] if values is None else values
        if len(values) != len(keys):
            raise ValueError(f"values: {len(values)} for {len(keys)} keys")
        known = self._pools.get(_KV)
        if known is None:
            return not keys
        page_store, pages = known
        good = [number for number, page in enumerate(values) if pages.takes_flat(page)]
        kept = [values[number] for number in good]
        stored = page_store.store(
            [keys[number] for number in good], None, _part_of(pages.gather_flat, kept)
        )
        return len(good) == len(keys) and all(stored)

    def clear(self) -> None:
        for page_store, _ in list(self._pools.values()):
            page_store.clear()

    def get_stats(self) -> Any:
        if not self._storage_config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for page_store, _ in list(self._pools.values()):
            for tally, pages, rates in (
                (page_store.loaded, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
                (page_store.stored, metrics.backup_pgs, metrics.backup_bandwidth),
            ):
                for num_pages, rate in tally.take():
                    pages.append(num_pages)
                    rates.append(rate)
        return metrics

    def close(self) -> None:
        self._pools.clear()
        self._cache.close()

    def _learn(self, pool: Any, name: str) -> None:
        pages = host_pages(pool, kv_dtype=self._engine.kv_dtype, threads=self._threads)
        config = self._storage_config
        part = PagePart(
            tp=(config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            dcp=(config.dcp_rank, config.dcp_size),
        )
        replicated = config.is_mla_model and name not in _SHARDED
        salt = " ".join(
            text
            for text in (pages.identity, getattr(pool, "storage_format_tag", None) or "")
            if text
        )
        namespace = namespace_of(
            self._engine, pages.layout, part, pool=name, replicated=replicated, salt=salt
        )
        page_store = PageStore(self._cache, namespace, self._config)
        page_store.register()
        self._pools[name] = page_store, pages
        log.info(
            "kvhold: pool %s, pages of %d tokens, namespace %s",
            name,
            pages.layout.tokens_per_chunk,
            namespace.digest.hex(),
        )

    def _lengths(self, transfer: PoolTransfer, keys: Sequence[str]) -> frozenset[int]:
        known = self._pools.get(str(transfer.name))
        if known is None:
            return frozenset()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return frozenset(range(1, known[0].count(keys) + 1))
        there = known[0].present(keys)
        window = max(1, len(transfer.keys or ()))
        return frozenset(
            end for end in range(1, len(keys) + 1) if all(there[max(0, end - window) : end])
        )

    def _check(self, transfers: Sequence[PoolTransfer]) -> None:
        for transfer in transfers:
            keys = transfer.keys or []
            check_keys(keys)
            known = self._pools.get(str(transfer.name))
            if known and keys:
                if transfer.host_indices is None:
                    raise ValueError(f"{transfer.name}: no host_indices for {len(keys)} keys")
                known[1].ids(transfer.host_indices, len(keys))

    def _load(
        self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None
    ) -> list[bool]:
        check_keys(keys)
        known = self._pools.get(pool)
        if known is None or not keys or host_indices is None:
            return [False] * len(keys)
        page_store, pages = known
        return page_store.load(keys, _part_of(pages.scatter, pages.ids(host_indices, len(keys))))

    def _store(
        self,
        pool: str,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        check_keys(keys)
        known = self._pools.get(pool)
        if known is None or not keys or host_indices is None:
            return [False] * len(keys)
        page_store, pages = known
        prefix_keys = extra_info.prefix_keys if extra_info else None
        return page_store.store(
            keys, prefix_keys, _part_of(pages.gather, pages.ids(host_indices, len(keys)))
        )


def _part_of(copy: Callable[..., None], pages: Any) -> Copy:
    return lambda first, buffer, places: copy(
        pages[first : first + len(places[0].offsets)], buffer, places
    )
