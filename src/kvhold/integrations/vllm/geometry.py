"""What vLLM keeps of each token, as groups of ours: which layers, how large a block of each is, and which worker has which part.

    geometry = geometry_of(vllm_config, kv_cache_config, settings)       # the same in the scheduler and in every worker
    geometry.parts[0].group, geometry.parts[0].table                     # a group, and whose block table it uses
    geometry.held_by(rank)                                               # the shards whose heads that worker has

A *part* is one of vLLM's KV cache groups: all its layers have one kind of attention, one block size and one block table. Blocks are moved
as opaque bytes, since backends arrange them as they like (the CPU's keeps K transposed, and otherwise on other instruction sets); what
arranges them is in the packing's name. What is not proven to come back exactly is refused here, at start-up, never guessed.

Workers: each tensor parallel worker has some of the heads, and each pipeline stage some of the layers. A shard is what one worker holds,
or a part of its heads where `head_shards` divides them further, so that engines of other widths hold the same shards. Workers that hold
equal KV (MLA's latent, or fewer heads than workers) share a shard: one stores it, all load it.
"""

from dataclasses import dataclass
from hashlib import blake2b
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvhold.core.config import Config
from kvhold.core.errors import LayoutError
from kvhold.core.layout import Group, Layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KNOWN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
_WITHOUT_DRAFT_LAYERS = ("ngram", "suffix")  # speculation that leaves no KV of its own


@dataclass(frozen=True)
class Part:
    """One of vLLM's KV cache groups, as one of ours. table: its number with vLLM; group: what one shard holds of it."""

    table: int
    layer_names: tuple[str, ...]
    group: Group


@dataclass(frozen=True)
class Geometry:
    """All of a model's KV, and how it is divided.

    shards:  in how many parts it is stored; per_worker: how many of these one worker holds
    copies:  how many neighbouring tensor parallel workers hold the same; width: how many of these workers a stage has
    """

    parts: tuple[Part, ...]
    layout: Layout
    shards: int
    per_worker: int
    copies: int
    width: int

    @property
    def whole_prompt_fits(self) -> bool:
        """A hit may cover a whole prompt, whose last token is then computed again. Not where that token would be counted twice (a state),
        or needs one that has just left the window."""
        return all(part.group.attention == "full" for part in self.parts)

    def held_by(self, rank: int) -> range:
        """The shards that worker number `rank` of the engine has."""
        stage, place = divmod(rank, self.width)
        distinct = self.width // self.copies
        first = (stage * distinct + place // self.copies) * self.per_worker
        return range(first, first + self.per_worker)

    def stored_by(self, rank: int) -> range:
        """The shards that it stores: of those who hold the same, the first does."""
        return self.held_by(rank) if rank % self.width % self.copies == 0 else range(0)


def geometry_of(config: "VllmConfig", kv_cache: "KVCacheConfig", settings: Config) -> Geometry:
    """The geometry of this engine's KV. Raises LayoutError for a set-up whose KV is not proven to come back exactly.

    settings.tokens_per_chunk is rounded up to whole blocks, and is one block where a model keeps a state.
    """
    _refuse_unproven(config, kv_cache)
    parallel = config.parallel_config
    width, copies = parallel.tensor_parallel_size, kv_cache.kv_tp_replicas
    distinct = width // copies
    divided = max(settings.head_shards, distinct)
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    if any(isinstance(spec, MLAAttentionSpec | MambaSpec) for spec in specs):
        divided = distinct  # there are no heads to divide further
    if divided % distinct or any(_heads(spec) % (divided // distinct) for spec in specs):
        heads = ", ".join(str(_heads(spec)) for spec in specs)
        raise LayoutError(
            f"head_shards is {settings.head_shards}; {distinct} workers with {heads} heads each cannot be divided so. "
            f"Use a multiple of {distinct} that divides all heads, or 0"
        )
    per_worker = divided // distinct
    parts = tuple(
        Part(number, tuple(group.layer_names), _group(config, group.kv_cache_spec, len(group.layer_names), per_worker))
        for number, group in enumerate(kv_cache.kv_cache_groups)
    )
    return Geometry(
        parts=parts,
        layout=_layout(parts, settings.tokens_per_chunk),
        shards=parallel.pipeline_parallel_size * divided,
        per_worker=per_worker,
        copies=copies,
        width=width,
    )


def mixes_adapters(config: "VllmConfig") -> bool:
    """Whether a request without an adapter may be computed with another request's.

    vLLM's CPU build does so where both are in one batch: the KV of such a request is wrong, and nobody must find it under the model's name.
    """
    return config.lora_config is not None and current_platform.is_cpu()


def _layout(parts: tuple[Part, ...], tokens_per_chunk: int) -> Layout:
    block = lcm(*(part.group.block_tokens for part in parts))
    groups = tuple(part.group for part in parts)
    if any(group.attention == "state" for group in groups):
        return Layout(groups, tokens_per_chunk=block, tail_tokens=0)
    return Layout(groups, tokens_per_chunk=-(-tokens_per_chunk // block) * block, tail_tokens=block)


def _group(config: "VllmConfig", spec: Any, layers: int, per_worker: int) -> Group:
    if isinstance(spec, MambaSpec):
        nbytes = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
        return Group(
            layers=layers,
            planes=1,
            heads=1,
            head_dim=nbytes,
            dtype="int8",
            attention="state",
            packing=_packing(config, spec),
            block_tokens=spec.block_size,
            block_bytes=nbytes,
        )
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return Group(
        layers=layers,
        planes=1 if isinstance(spec, MLAAttentionSpec) else 2,
        heads=_heads(spec) // per_worker,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        attention="sliding" if window else "full",
        window=window,
        packing=_packing(config, spec),
        block_tokens=spec.block_size,
        block_bytes=spec.unpadded_page_size_bytes // per_worker,
    )


def _heads(spec: Any) -> int:
    return 1 if isinstance(spec, MambaSpec) else int(spec.num_heads)


def _packing(config: "VllmConfig", spec: Any) -> str:
    version = ".".join(vllm.__version__.split(".")[:2])
    if isinstance(spec, MambaSpec):
        return _fitting(f"vllm-{version}-state-{spec.mamba_type.name.lower()}")
    if isinstance(spec, MLAAttentionSpec):
        return f"vllm-{version}-mla-{'amx' if torch.cpu._is_amx_tile_supported() else 'cpu'}"
    isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
    return f"vllm-{version}-cpu_attn-{isa}"


def _fitting(name: str) -> str:
    """The name in the 32 characters that a packing may have; the end of a longer one is its digest."""
    return name if len(name) <= 32 else f"{name[:23]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


def _refuse_unproven(config: "VllmConfig", kv_cache: "KVCacheConfig") -> None:
    groups = kv_cache.kv_cache_groups
    parallel, cache, speculation = config.parallel_config, config.cache_config, config.speculative_config
    specs = [group.kv_cache_spec for group in groups]
    strange = sorted({type(spec).__name__ for spec in specs if type(spec) not in _KNOWN})
    known = ", ".join(kind.__name__ for kind in _KNOWN)
    stages = parallel.pipeline_parallel_size
    layers = config.model_config.get_total_num_hidden_layers() if stages > 1 else 0
    reasons = {
        "the model has no KV cache": not groups,
        f"its layers are {', '.join(strange)}; {known} are supported": bool(strange),
        "its attention is chunked": any(getattr(spec, "attention_chunk_size", None) for spec in specs),
        "its attention looks ahead": any(getattr(spec, "non_causal", False) for spec in specs),
        "some of its groups are not for transfer": not all(group.enable_kv_transfer for group in groups),
        "its states are kept at no block's end (mamba_cache_mode is none); enable prefix caching": any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs
        ),
        "vLLM turns chunked prefill off for its MLA here: it computes the rest of a prompt without what was loaded before": (
            any(isinstance(spec, MLAAttentionSpec) for spec in specs) and not config.scheduler_config.enable_chunked_prefill
        ),
        f"the platform is {current_platform.device_name}; cpu is supported": not current_platform.is_cpu(),
        f"kv_cache_dtype is {cache.cache_dtype}; auto, fp8, fp8_e4m3 and fp8_e5m2 are supported": cache.cache_dtype
        not in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        f"{layers} layers are not divided evenly among {stages} pipeline stages": bool(stages > 1 and layers % stages),
        f"its workers are on {parallel.nnodes_within_dp} hosts (nnodes), and each host has a node of its own": parallel.nnodes_within_dp
        > 1,
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        f"speculative decoding by {getattr(speculation, 'method', None)}; {' and '.join(_WITHOUT_DRAFT_LAYERS)} are supported": (
            speculation is not None and speculation.method not in _WITHOUT_DRAFT_LAYERS
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise LayoutError(f"kvhold does not serve this set-up yet, because its KV is not proven to come back exactly: {'; '.join(found)}")
