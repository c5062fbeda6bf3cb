"""The names and shapes of this engine's KV: vLLM's configuration to a Namespace and a Layout, or a refusal that says why.

What is not proven to come back exactly is refused here, at start-up, never guessed. Proven so far: models with one group of full-attention
layers on vLLM's CPU backend, whole blocks at a time (that backend packs K transposed inside a block, and differently on other
instruction sets, so a block's bytes are opaque and the packing's name is part of the namespace).
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvhold.core.encoding import canonical
from kvhold.core.errors import LayoutError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_SAMPLES = 32  # pieces of each weight file that are read for its fingerprint
_SAMPLE_BYTES = 4096


def namespace_of(config: "VllmConfig", kv_cache: "KVCacheConfig", tokens_per_chunk: int) -> Namespace:
    """The namespace of this engine. Raises LayoutError for a set-up whose KV is not proven to come back exactly.

    tokens_per_chunk: rounded up to whole blocks
    """
    _refuse_unproven(config, kv_cache)
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
    layout = Layout((geometry,), tokens_per_chunk=-(-tokens_per_chunk // block) * block, tail_tokens=block)
    return Namespace(
        model=model_identity(model.model, model.revision),
        layout=layout,
        revision=_config_digest(model.hf_config),
        dtype=str(model.dtype),
        quantization=str(model.quantization or ""),
        shards=config.parallel_config.tensor_parallel_size,
    )


def prompt_of(namespace: Namespace, request: "Request") -> Prompt | None:
    """The request's prompt, by name; None when its KV depends on more than its tokens, adapter and salt."""
    if request.prompt_token_ids is None or request.prompt_is_token_ids is not None or request.mm_features or request.pooling_params:
        return None
    lora = ""
    if request.lora_request is not None:
        adapter = request.lora_request
        lora = f"{adapter.lora_name}={model_identity(adapter.lora_path, None)}"
    tokens = np.array(request.prompt_token_ids, dtype=np.int32)
    return namespace.narrowed(lora=lora, cache_salt=request.cache_salt or "").prompt(tokens)


def model_identity(model: str, revision: str | None) -> str:
    """What the weights are, the same on every host: a local folder by its files' contents (sizes and samples), a hub name by its commit."""
    folder = Path(model)
    if folder.is_dir():
        return f"content:{_content_digest(folder)}"
    return f"hub:{model}@{_hub_commit(model, revision)}"


def _content_digest(folder: Path) -> str:
    digest = blake2b(digest_size=16)
    weights = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".json") and p.is_file())
    if not weights:
        raise LayoutError(f"the model folder {folder} holds no weights or settings to tell it by")
    for path in weights:
        size = path.stat().st_size
        digest.update(canonical([path.name, size]))
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _hub_commit(model: str, revision: str | None) -> str:
    """The commit of the local copy of a hub model; where there is none to be told (other loaders), the revision's name."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision or "main"


def _config_digest(hf_config: Any) -> str:
    """The model's settings with whatever was overridden at start (rotary scaling, for one): they shape the KV as the weights do."""
    text = json.dumps(hf_config.to_dict(), sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _refuse_unproven(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    groups = kv_cache.kv_cache_groups
    parallel = config.parallel_config
    spec = groups[0].kv_cache_spec if groups else None
    reasons = {
        "the model has no KV cache": not groups,
        f"the model has {len(groups)} KV cache groups; one is supported": len(groups) > 1,
        f"its layers are {type(spec).__name__}; FullAttentionSpec is supported": type(spec) is not FullAttentionSpec,
        "its attention is windowed or chunked": bool(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)),
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
