"""`vllm_config_of` undoes limits of vLLM's CPU kernels."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)

from kvhold_lab.mini_engine.arithmetic import snap_weight

_ARITHMETIC = 1  # increase when the KV changes
_SEED = 20_261
_GAIN, _QUERY_GAIN, _LOGIT_GAIN = (
    1.2,
    1.6,
    3.0,
)


@dataclass(frozen=True)
class ModelShape:
    """latent: elements of MLA's latent; 0: no MLA

    rope:   with a latent, additional rotated elements
    layers: a letter each: "f" full attention, "s" sliding window
    """

    architecture: str
    model_type: str
    layers: str = "fff"
    vocab: int = 200
    hidden: int = 64
    intermediate: int = 128
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    rope: int = 0
    latent: int = 0
    window: int = 0

    @property
    def layer_names(self) -> list[str]:
        return [f"model.layers.{number}.self_attn.attn" for number in range(len(self.layers))]


SHAPES = {
    "llama": ModelShape("LlamaForCausalLM", "llama"),
    "mla": ModelShape("DeepseekV2ForCausalLM", "deepseek_v2", kv_heads=1, rope=8, latent=32),
    "sliding": ModelShape("Gemma3ForCausalLM", "gemma3_text", layers="sfsf", window=48),
}


@dataclass(frozen=True)
class MiniEngineOptions:
    """budget:        tokens of one pass
    max_tokens:    of a request and its answer
    asynchronous:  schedule a step before the previous one is computed
    second_runner: see `calls.py`; None: vLLM chooses
    zero_blocks:   as vLLM does for states
    """

    shape: ModelShape
    block_tokens: int = 16
    num_blocks: int = 64
    budget: int = 128
    max_running: int = 16
    max_tokens: int = 512
    prefix_caching: bool = True
    asynchronous: bool = False
    second_runner: bool | None = None
    zero_blocks: bool = False
    dtype: str = "float32"
    kv_layout: str = "LBHNC"
    scheduling: dict[str, Any] = field(default_factory=dict)


def write_model(shape: ModelShape, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_settings(shape), indent=1))
    generator = torch.Generator().manual_seed(_SEED)
    weights = {
        name: snap_weight(
            torch.randn(size, generator=generator)
            * _gain(name)
            / math.sqrt(size[-1] if name != "embed" else 1)
        ).float()
        for name, size in _weight_sizes(shape).items()
    }
    save_file(weights, folder / "model.safetensors")


def read_weights(folder: Path, device: str) -> dict[str, torch.Tensor]:
    return {
        name: weight.to(device, torch.float64)
        for name, weight in load_file(folder / "model.safetensors").items()
    }


def vllm_config_of(
    options: MiniEngineOptions,
    folder: Path,
    connector: dict[str, Any] | None,
    role: str = "kv_both",
) -> VllmConfig:
    model = ModelConfig(
        model=str(folder),
        dtype=options.dtype,
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=options.max_tokens,
        enforce_eager=True,
    )
    cache = CacheConfig(
        block_size=options.block_tokens,
        enable_prefix_caching=options.prefix_caching,
        cache_dtype="auto",
    )
    cache.num_gpu_blocks_override = options.num_blocks
    scheduling = {"max_num_seqs": options.max_running, "max_num_batched_tokens": options.budget}
    transfer = None
    if connector is not None:
        transfer = KVTransferConfig(
            kv_connector="KVHoldConnector",
            kv_connector_module_path="kvhold.integrations.vllm",
            kv_role=role,
            # kvhold refuses vLLM's MLA on CPUs; this engine's is exact
            kv_connector_extra_config={"allow_unproven": True} | connector,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            **(scheduling | options.scheduling),
            max_model_len=options.max_tokens,
            async_scheduling=options.asynchronous,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=transfer,
    )
    config.scheduler_config.async_scheduling = options.asynchronous
    if options.shape.latent:
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = options.budget
        config.cache_config.enable_prefix_caching = options.prefix_caching
        if config.cache_config.block_size != options.block_tokens:
            raise ValueError(
                f"vLLM takes blocks of {config.cache_config.block_size} tokens for MLA "
                f"here, not of {options.block_tokens}"
            )
    config.cache_config.kv_cache_layout = options.kv_layout
    if options.second_runner is not None:
        _override(config, use_v2_model_runner=options.second_runner)
    return config


def kv_cache_config_of(options: MiniEngineOptions, config: VllmConfig) -> KVCacheConfig:
    specs = {
        name: _spec(options, kind, config)
        for name, kind in zip(options.shape.layer_names, options.shape.layers, strict=True)
    }
    (found,) = get_kv_cache_configs(config, [specs], [1 << 40])
    found.kv_cache_layout = config.cache_config.kv_cache_layout
    config.cache_config.num_gpu_blocks = found.num_blocks
    if options.zero_blocks:
        _override(found, needs_kv_cache_zeroing=True)
    return found


def allocate(kv_config: KVCacheConfig, config: VllmConfig, device: str) -> dict[str, torch.Tensor]:
    """Views of one allocation by layer: `[blocks, heads, tokens, elements]`."""
    (size,) = {tensor.size for tensor in kv_config.kv_cache_tensors}
    memory = torch.zeros(size, dtype=torch.int8, device=device)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    specs = {
        name: group.kv_cache_spec
        for group in kv_config.kv_cache_groups
        for name in group.layer_names
    }
    caches: dict[str, torch.Tensor] = {}
    for tensor in kv_config.kv_cache_tensors:
        views = create_kv_cache_views(
            memory, specs[tensor.layers[0]], kv_config.num_blocks, layout, tensor
        )
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def _spec(options: MiniEngineOptions, kind: str, config: VllmConfig) -> Any:
    shape = options.shape
    common = {"block_size": config.cache_config.block_size, "dtype": getattr(torch, options.dtype)}
    if shape.latent:
        return MLAAttentionSpec(
            **common,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=shape.latent + shape.rope,
            cache_dtype_str="auto",
        )
    heads = {"num_kv_heads": shape.kv_heads, "head_size": shape.head}
    return (
        SlidingWindowSpec(**common, **heads, sliding_window=shape.window)
        if kind == "s"
        else FullAttentionSpec(**common, **heads)
    )


def _override(config: Any, **properties: bool) -> None:
    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **properties})


def _gain(name: str) -> float:
    leaf = name.rpartition(".")[2]
    return {"embed": 1.0, "logits": _LOGIT_GAIN, "query": _QUERY_GAIN, "key": _QUERY_GAIN}.get(
        leaf, _GAIN
    )


def _weight_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (shape.vocab, shape.hidden),
        "logits": (shape.vocab, shape.hidden),
    }
    for number in range(len(shape.layers)):
        if shape.latent:
            layer: dict[str, tuple[int, ...]] = {
                "query": (shape.heads * (shape.head + shape.rope), shape.hidden),
                "latent": (shape.latent + shape.rope, shape.hidden),
                "key_up": (shape.heads, shape.latent, shape.head),
                "value_up": (shape.heads, shape.head, shape.latent),
            }
        else:
            layer = {
                "query": (shape.heads * shape.head, shape.hidden),
                "key": (shape.kv_heads * shape.head, shape.hidden),
                "value": (shape.kv_heads * shape.head, shape.hidden),
            }
        layer["output"] = (shape.hidden, shape.heads * shape.head)
        layer |= {
            "gate": (shape.intermediate, shape.hidden),
            "up": (shape.intermediate, shape.hidden),
        }
        layer["down"] = (shape.hidden, shape.intermediate)
        sizes |= {f"layers.{number}.{name}": size for name, size in layer.items()}
    return sizes


def _settings(shape: ModelShape) -> dict[str, Any]:
    settings = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads if shape.latent else shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": 1 << 16,
        "torch_dtype": "float32",
        "mini_engine_arithmetic": _ARITHMETIC,
    }
    if shape.latent:
        settings |= {
            "kv_lora_rank": shape.latent,
            "q_lora_rank": None,
            "qk_rope_head_dim": shape.rope,
            "qk_nope_head_dim": shape.head,
        }
        settings |= {"v_head_dim": shape.head, "first_k_dense_replace": len(shape.layers)}
    if shape.window:
        kinds = {"s": "sliding_attention", "f": "full_attention"}
        settings |= {
            "sliding_window": shape.window,
            "layer_types": [kinds[kind] for kind in shape.layers],
        }
    return settings
