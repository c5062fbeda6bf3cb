"""vLLM's descriptions of KV, for tests of what kvhold makes of them."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvhold.core.config import Config
from kvhold.integrations.vllm.geometry import Geometry, geometry_of

BLOCKS = 12


def full(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32} | changes)
    )


def sliding(window: int = 40, **changes: Any) -> SlidingWindowSpec:
    fields = {
        "block_size": 16,
        "num_kv_heads": 4,
        "head_size": 32,
        "dtype": torch.float32,
        "sliding_window": window,
    } | changes
    return SlidingWindowSpec(**fields)


def latent() -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=96, dtype=torch.float32, max_tp_shards=1
    )


def state(kind: MambaAttentionBackendEnum) -> MambaSpec:
    return MambaSpec(
        block_size=64,
        shapes=((3, 5),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        mamba_type=kind,
    )


def layer(backend: str) -> AttentionLayerBase:
    class Layer(AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: backend)

        def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
            return None

    return Layer()


def groups(*specs: Any, copies: int = 1) -> KVCacheConfig:
    made = [
        KVCacheGroupSpec([f"layers.{number}.{i}" for i in range(2)], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=made, kv_tp_replicas=copies
    )


def of_width(
    config: VllmConfig, width: int, kv: KVCacheConfig, *, stages: int = 1, **settings: Any
) -> Geometry:
    config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = (
        width,
        stages,
    )
    return geometry_of(config, kv, Config(**settings))
