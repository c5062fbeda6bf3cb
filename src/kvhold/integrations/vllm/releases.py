"""Differences of earlier served releases of vLLM. `make compat` runs each."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

from kvhold.core.naming import Table
from kvhold.integrations.vllm.naming.tables import CACHING, ELSEWHERE, PLACES, SCHEDULING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

EARLIER_FIELDS: Mapping[str, Table] = {
    "CacheConfig": Table.of(
        "enable_mamba_fine_grained_prefix_cache",
        {ELSEWHERE: "user_specified_mamba_block_size"},
    ),
    "ECTransferConfig": Table.of("ec_parallel_size", {PLACES: "ec_rank"}),
    "KVTransferConfig": Table.of(
        "", {PLACES: "kv_ip kv_rank", CACHING: "kv_buffer_size kv_parallel_size"}
    ),
    "ModelConfig": Table.of("enable_return_routed_experts"),
    "ParallelConfig": Table.of("sd_worker_cls"),
    "PassConfig": Table.of("enable_sp fuse_gemm_comms sp_min_token_num"),
}
"""Fields by class name, as in naming/tables.py."""

EARLIER_ENVIRONMENT = Table.of(
    "VLLM_KIMI_K3_GEMM_RS VLLM_PLE_CPU_OFFLOAD VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4"
    " VLLM_XPU_ENABLE_XPU_GRAPH",
    {SCHEDULING: "VLLM_ENGINE_ITERATION_TIMEOUT_S"},
)


def event_extra_keys(keys: Sequence[tuple[Any, ...] | None]) -> list[tuple[Any, ...] | None] | None:
    """Blocks' extra keys as events have them. vLLM 0.30 has no tags to remove."""
    untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return untag(keys) if untag is not None else list(keys) or None


def tp_replicas(kv_cache: "KVCacheConfig") -> int:
    """Tensor parallel workers with the same KV; with vLLM 0.30, which does not tell, 1."""
    return int(getattr(kv_cache, "kv_tp_replicas", 1))
