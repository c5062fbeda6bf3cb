"""SGLang's own callers on the CPU: its cache controller over host pools, its radix tree over device
pools, on KV of our making.
"""

import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.sglang.pools import PAGE, PAGES

WITHIN_S = 120.0  # until something that must come has come; only a hang takes so long
ONE_RANK = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_dcp_size": 1,
    "attn_dcp_rank": 0,
}


class Controller:
    """SGLang's HiCacheController, its four storage threads included, with our storage attached as a
    user would attach it.
    """

    def __init__(
        self, host: Any, device: Any, section: dict[str, Any], *, interface_v1: int = 1
    ) -> None:
        allocator = PagedTokenToKVPoolAllocator(
            PAGES * PAGE, PAGE, torch.bfloat16, "cpu", device, False
        )
        extra: dict[str, Any] = {
            "backend_name": "kvhold",
            "module_path": "kvhold.integrations.sglang",
            "class_name": "KVHoldStorage",
        }
        extra |= {"interface_v1": interface_v1, "kvhold": section}
        self.host = host
        self._held = ExitStack()
        self._held.enter_context(get_parallel().override(**ONE_RANK))
        self.sglang = HiCacheController(
            allocator,
            host,
            PAGE,
            None,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="served",
            storage_backend_extra_config=extra,
        )

    @property
    def storage(self) -> Any:
        return self.sglang.storage_backend

    def backup(self, tokens: Sequence[int], slots: Any) -> int:
        """How many tokens SGLang counts as stored."""
        hashes = get_storage_hash_str(array("q", tokens), None, page_size=PAGE)
        self.sglang.write_storage(slots, array("q", tokens), hashes)
        return int(self.sglang.ack_backup_queue.get(timeout=WITHIN_S).completed_tokens)

    def prefetch(self, tokens: Sequence[int]) -> Any:
        """The slots that SGLang has filled for a prompt, from its first token on."""
        operation = self.sglang.prefetch("request", array("q", tokens))
        hit = self.sglang.prefetch_hit_queue.get(timeout=WITHIN_S)
        operation.host_indices = self.host.alloc(hit.storage_hit_count)
        self.sglang.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := self.sglang.ack_prefetch_queue.get(timeout=WITHIN_S)).completed_req:
            completed = max(completed, int(ack.completed_tokens or 0))
        return operation.host_indices[:completed]

    def close(self) -> None:
        self.sglang.detach_storage_backend()
        self._held.close()


class Tree:
    """SGLang's UnifiedRadixCache (its own tree core) with our linker, made by SGLang's factory."""

    def __init__(self, device: Any, section: dict[str, Any], *, page: int = PAGE) -> None:
        self.device, self._page = device, page
        self.allocator = PagedTokenToKVPoolAllocator(
            PAGES * page, page, device.dtype, "cpu", device, False
        )
        self.params = params_of(self.allocator, page)
        self.sglang = UnifiedRadixCache(self.params)
        config = {
            "linker": "KVHoldLinker",
            "linker_module_path": "kvhold.integrations.sglang",
            "linker_extra_config": section,
        }
        self.linker = create_unified_cache_linker(
            None,
            self.params,
            backend="dynamic",
            config=config,
            components=set(self.sglang.components),
        )
        self.sglang.init_cache_linker(self.linker)
        device.register_layer_transfer_counter(self.linker.layer_done_counter)

    def insert(self, tokens: Sequence[int]) -> Any:
        """As after a request: its pages become the tree's, and are offloaded.

        The slots they have.
        """
        slots = self.allocator.alloc(len(tokens))
        self.sglang.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
        return slots

    def settle(self) -> None:
        """Until every offload has ended."""
        until = time.monotonic() + WITHIN_S
        while self.sglang.linker.pending_offloads:
            self.sglang.check_hicache_events()
            assert time.monotonic() < until
            time.sleep(0.005)

    def forget(self) -> None:
        """Have the tree evict all it can."""
        self.sglang.evict(EvictParams(num_tokens=PAGES * self._page))

    def match(self, tokens: Sequence[int], rid: str) -> tuple[Any, int]:
        """The request, and how many of its tokens can be loaded beyond those on the device."""
        request = Req(rid, "", list(tokens), SamplingParams(max_new_tokens=1))
        found = self.sglang.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", tokens)), req=request)
        )
        request.last_node, request.host_hit_length = found.last_device_node, found.host_hit_length
        request.best_match_node = found.best_match_node
        return request, int(found.host_hit_length)

    def admit(self, request: Any) -> int:
        """As when the scheduler takes it into a batch: how many tokens will be loaded."""
        params = InitLoadBackParams(
            best_match_node=request.best_match_node,
            host_hit_length=request.host_hit_length,
            req=request,
        )
        return int(self.sglang.init_load_back(params)[0])

    def run(self, *requests: Any) -> tuple[list[Any], list[Any]]:
        """A pass that reads every layer, waiting for each: what the loaded slots held then (K and V
        of each layer), and who failed.
        """
        slots = [self.sglang.linker.private_load_indices[request.rid] for request in requests]
        self.linker.layer_done_counter.set_consumer(self.sglang.ready_to_load_host_cache())
        seen = []
        for layer in range(self.device.layer_num):
            buffers = self.device.get_kv_buffer(layer)
            seen += [buffer[torch.cat(slots)].clone() for buffer in buffers] if slots else []
        return seen, self.sglang.finish_external_linker_loads(list(requests))

    def kv(self, slots: Any) -> list[Any]:
        """K and V of each layer, as `run` gives them."""
        return [
            buffer[slots].clone()
            for layer in range(self.device.layer_num)
            for buffer in self.device.get_kv_buffer(layer)
        ]


def params_of(allocator: Any, page: int = PAGE) -> CacheInitParams:
    rows = ReqToTokenPool(size=4, max_context_len=256, device="cpu", enable_memory_saver=False)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page,
        tree_components=(ComponentType.FULL,),
    )
