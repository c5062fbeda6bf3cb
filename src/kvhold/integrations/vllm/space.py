"""The names and shapes of this engine's KV: vLLM's configuration to a Namespace and a Layout, or a refusal that says why.

What is not proven to come back exactly is refused here, at start-up, never guessed. Proven so far: models with one group of full-attention
layers on vLLM's CPU backend, whole blocks at a time (that backend packs K transposed inside a block, and differently on other
instruction sets, so a block's bytes are opaque and the packing's name is part of the namespace).
"""

import json
import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvhold.core.config import Config, RulesConfig
from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.rules import Rules, request_rules
from kvhold.integrations.vllm.weights import model_identity
from kvhold.node import NodeClient, connect

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_NOT_KV = ("_name_or_path", "transformers_version")  # of a model's settings: where the folder lies, and who wrote it down


def namespace_of(config: "VllmConfig", kv_cache: "KVCacheConfig", settings: Config) -> Namespace:
    """The namespace of this engine. Raises LayoutError for a set-up whose KV is not proven to come back exactly.

    settings.tokens_per_chunk is rounded up to whole blocks.
    """
    _refuse_unproven(config, kv_cache)
    if config.model_config.model_weights and not settings.model_id:
        raise LayoutError(f"cannot tell the weights at {config.model_config.model_weights} by their content; set model_id")
    group = kv_cache.kv_cache_groups[0]
    spec = group.kv_cache_spec
    block = spec.block_size
    model = config.model_config
    isa = _get_attn_isa(model.dtype, block, spec.head_size, config.cache_config.cache_dtype)
    geometry = Group(
        layers=len(group.layer_names),
        planes=2,
        heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        packing=f"vllm-{'.'.join(vllm.__version__.split('.')[:2])}-cpu_attn-{isa}",
        block_tokens=block,
        block_bytes=spec.page_size_bytes,
    )
    layout = Layout((geometry,), tokens_per_chunk=-(-settings.tokens_per_chunk // block) * block, tail_tokens=block)
    return Namespace(
        model=settings.model_id or model_identity(model.model, model.revision),
        layout=layout,
        revision=f"{_config_digest(model.hf_config, model.max_model_len)} {config.load_config.load_format}",
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        shards=config.parallel_config.tensor_parallel_size,
    )


def join(config: Config, namespace: Namespace, *, name: str) -> NodeClient:
    """This host's node, told of the namespace. Raises NodeError when none can be had; one that is lost right after that is looked for."""
    client = connect(config, name=name)
    try:
        client.register(namespace)
    except KVHoldError as error:
        log.warning("kvhold: %s; starting without the node", error)
    return client


def rules_of(request: "Request", settings: RulesConfig) -> Rules:
    """What the request may do with the cache: `kv_transfer_params: {"kvhold": {...}}`. Raises ConfigError for what is not understood."""
    return request_rules((request.kv_transfer_params or {}).get("kvhold"), settings)


def prompt_of(namespace: Namespace, request: "Request", rules: Rules, adapters: dict[tuple[int, str, str], str]) -> Prompt | None:
    """The request's prompt, by name; None when its KV depends on more than its tokens, adapter and salt, or its adapter cannot be told.

    adapters: the names of those seen so far, by vLLM's number, name and path; it is filled here. An engine keeps the adapter it has
    loaded, whatever becomes of its files.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None or request.prompt_is_token_ids is not None:
        return None
    if request.mm_features or request.pooling_params:
        return None
    lora = ""
    if (adapter := request.lora_request) is not None:
        known_as = (adapter.lora_int_id, adapter.lora_name, adapter.lora_path)
        if known_as not in adapters or adapter.load_inplace:
            try:
                adapters[known_as] = f"{adapter.lora_name}={model_identity(adapter.lora_path, None)}"
            except LayoutError as error:
                log.debug("kvhold: %s", error)
                return None
        lora = adapters[known_as]
    tokens = np.array(request.prompt_token_ids, dtype=np.int32)
    return namespace.narrowed(lora=lora, cache_salt=request.cache_salt or "", tags=rules.tags).prompt(tokens)


def _config_digest(hf_config: Any, max_model_len: int) -> str:
    """The model's settings with whatever was overridden at start (rotary scaling, for one): they shape the KV as the weights do."""
    settings = _without_places(hf_config.to_dict())
    text = json.dumps(settings, sort_keys=True, default=str)
    if "longrope" in text:
        text += f" {max_model_len}"  # vLLM chooses between the long and the short factors by it
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _without_places(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {name: _without_places(value) for name, value in settings.items() if name not in _NOT_KV}
    return settings


def _refuse_unproven(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    groups = kv_cache.kv_cache_groups
    parallel = config.parallel_config
    spec = groups[0].kv_cache_spec if groups else None
    reasons = {
        "the model has no KV cache": not groups,
        f"the model has {len(groups)} KV cache groups; one is supported": len(groups) > 1,
        f"its layers are {type(spec).__name__}; FullAttentionSpec is supported": type(spec) is not FullAttentionSpec,
        "its attention is windowed or chunked": bool(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)),
        "its attention looks ahead": bool(getattr(spec, "non_causal", False)),
        f"the platform is {current_platform.device_name}; cpu is supported": not current_platform.is_cpu(),
        f"kv_cache_dtype is {config.cache_config.cache_dtype}; auto is supported": config.cache_config.cache_dtype != "auto",
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "tensor_parallel_size > 1": parallel.tensor_parallel_size > 1,
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "speculative decoding is on": config.speculative_config is not None,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise LayoutError(f"kvhold does not serve this set-up yet, because its KV is not proven to come back exactly: {'; '.join(found)}")
