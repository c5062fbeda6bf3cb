"""Describe vLLM's KV: groups, and each worker's shards.

Blocks are opaque bytes; the packing's name identifies their arrangement. A shard is one worker's
KV, or with `head_shards` a part of the worker's heads. Workers with equal KV share a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvhold.core.config import Config
from kvhold.core.errors import LayoutError
from kvhold.core.layout import Group, Layout, packing_name
from kvhold.integrations.vllm.releases import tp_replicas
from kvhold.integrations.vllm.shown import device_of_kv, not_shown, sentence
from kvhold.memory.coding import ERROR_BOUND, coded_group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KNOWN = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
_COMPACT_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")  # a layer's block is one piece of memory
_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_WITHOUT_DRAFT_LAYERS = ("ngram", "suffix")  # speculation without KV
_SHOWN_DRAFTERS = ("draft_model", "eagle")
_DRAFTERS = (*_SHOWN_DRAFTERS, "eagle3", "mtp")
_NULL_BLOCK = 0  # vLLM's number for "no block"
_LOOK_AHEAD = ("eagle", "eagle3", "mtp")


@dataclass(frozen=True)
class Part:
    """group: one shard's part as cached
    engine_group: the same in the engine; differs with `memory_codec`
    """

    table: int
    layer_names: tuple[str, ...]
    group: Group
    engine_group: Group

    @property
    def is_coded(self) -> bool:
        return self.group != self.engine_group

    def blocks(
        self, table: list[int], first: int, last: int, *, skipped: int = 0, unused: int = 0
    ) -> list[int]:
        """Blocks of the tokens `first` to `last - 1`; -1: not written. The block ends before
        `skipped`, begins after `last`, or left the window.
        """
        size = self.group.block_tokens
        begin, end = max(first, skipped) // size, -(-last // size)
        there = np.array(table[begin:end], dtype=np.int64)
        there[there == _NULL_BLOCK] = -1
        ids: list[int] = there.tolist()
        if self.group.attention == "state":
            ids += [-1] * (end - begin - len(ids))
        return [-1] * (begin - first // size) + ids + [-1] * (-(-unused // size) - end)


@dataclass(frozen=True)
class Geometry:
    """copies: neighbouring workers with the same KV"""

    parts: tuple[Part, ...]
    layout: Layout
    shards: int
    per_worker: int
    copies: int
    width: int
    looks_ahead: bool = False

    @property
    def whole_prompt_fits(self) -> bool:
        """False with states or windows: a hit may not cover the prompt's last token, which is
        computed again.
        """
        return all(part.group.attention == "full" for part in self.parts)

    def held_by(self, rank: int) -> range:
        stage, place = divmod(rank, self.width)
        distinct = self.width // self.copies
        first = (stage * distinct + place // self.copies) * self.per_worker
        return range(first, first + self.per_worker)

    def stored_by(self, rank: int) -> range:
        return self.held_by(rank) if rank % self.width % self.copies == 0 else range(0)


def geometry_of(config: "VllmConfig", kv_cache: "KVCacheConfig", settings: Config) -> Geometry:
    """Raises LayoutError unless the KV is proven to come back exactly.

    tokens_per_chunk is rounded up to whole blocks; with a state it is one block.
    """
    _refuse_unproven(config, kv_cache, settings)
    parallel = config.parallel_config
    width, copies = parallel.tensor_parallel_size, tp_replicas(kv_cache)
    distinct = width // copies
    divided = max(settings.head_shards, distinct)
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    if any(isinstance(spec, MLAAttentionSpec | MambaSpec) for spec in specs):
        divided = distinct
    if divided % distinct or any(_heads(spec) % (divided // distinct) for spec in specs):
        heads = ", ".join(str(_heads(spec)) for spec in specs)
        raise LayoutError(
            f"head_shards is {settings.head_shards}, but {distinct} workers with {heads} heads "
            "each cannot be divided like that. "
            f"Use a multiple of {distinct} that divides all heads, or 0"
        )
    per_worker = divided // distinct
    parts = []
    for number, group in enumerate(kv_cache.kv_cache_groups):
        engine_group = _group(config, group.kv_cache_spec, len(group.layer_names), per_worker)
        parts.append(
            Part(
                number,
                tuple(group.layer_names),
                coded_group(engine_group, settings.memory_codec),
                engine_group,
            )
        )
    most = settings.rules.max_error
    if any(part.is_coded for part in parts) and most is not None and most < ERROR_BOUND:
        raise LayoutError(
            f"memory_codec is {settings.memory_codec}, which loses up to {ERROR_BOUND:.4f} "
            f"of the largest magnitude; rules.max_error allows {most:g}. Raise it, or set "
            "memory_codec to none"
        )
    return Geometry(
        parts=tuple(parts),
        layout=_layout(tuple(parts), settings.tokens_per_chunk),
        shards=parallel.pipeline_parallel_size * divided,
        per_worker=per_worker,
        copies=copies,
        width=width,
        looks_ahead=looks_ahead(config),
    )


def drafts(config: "VllmConfig") -> bool:
    return config.speculative_config is not None and config.speculative_config.method in _DRAFTERS


def looks_ahead(config: "VllmConfig") -> bool:
    """The drafter's KV of a token depends on the next one."""
    return config.speculative_config is not None and config.speculative_config.method in _LOOK_AHEAD


def preferred_layout(settings: Config) -> str | None:
    """None: any. With heads before tokens, a shard's part of a block is contiguous."""
    return "LBHNC" if settings.head_shards and device_of_kv() else None


def mixes_adapters(config: "VllmConfig") -> bool:
    """One request's adapter may be applied to others, as in vLLM's CPU build."""
    return config.lora_config is not None and current_platform.is_cpu()


def _layout(parts: tuple[Part, ...], tokens_per_chunk: int) -> Layout:
    block = lcm(*(part.group.block_tokens for part in parts))
    groups = tuple(part.group for part in parts)
    if any(group.attention == "state" for group in groups):
        return Layout(groups, tokens_per_chunk=block, tail_tokens=0)
    return Layout(groups, tokens_per_chunk=-(-tokens_per_chunk // block) * block, tail_tokens=block)


def _group(config: "VllmConfig", spec: Any, layers: int, per_worker: int) -> Group:
    if isinstance(spec, MambaSpec):
        nbytes = sum(
            prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
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
    device = device_of_kv()
    if isinstance(spec, MambaSpec):
        return packing_name(f"vllm-{version}-state-{spec.mamba_type.name.lower()}")
    if device:
        latent = "mla-" if isinstance(spec, MLAAttentionSpec) else ""
        return packing_name(
            f"vllm-{version}-{device}-{latent}{config.cache_config.kv_cache_layout}"
        )
    if isinstance(spec, MLAAttentionSpec):
        return f"vllm-{version}-mla-{'amx' if torch.cpu._is_amx_tile_supported() else 'cpu'}"
    isa = _get_attn_isa(
        config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype
    )
    return f"vllm-{version}-cpu_attn-{isa}"


def _keeps_states_between_blocks(config: "VllmConfig", kv_cache: "KVCacheConfig") -> bool:
    sizes = [
        spec.block_size
        for spec in (group.kv_cache_spec for group in kv_cache.kv_cache_groups)
        if isinstance(spec, MambaSpec) and spec.num_prefill_checkpoint_blocks
    ]
    return bool(sizes) and resolve_kv_cache_block_sizes(kv_cache, config)[1] < min(sizes)


def _reasons_of_drafts(
    config: "VllmConfig", specs: Sequence[Any], settings: Config
) -> dict[str, bool]:
    speculation, stages = config.speculative_config, config.parallel_config.pipeline_parallel_size
    method = getattr(speculation, "method", None)
    return {
        f"speculative decoding by {method}; {', '.join(_WITHOUT_DRAFT_LAYERS + _DRAFTERS)} "
        "are supported": (
            speculation is not None and method not in _WITHOUT_DRAFT_LAYERS + _DRAFTERS
        ),
        f"speculative decoding by {method} has not been shown to be exact (allow_unproven "
        "= true serves it)": (
            drafts(config) and method not in _SHOWN_DRAFTERS and not settings.allow_unproven
        ),
        "speculative decoding and several pipeline stages": speculation is not None and stages > 1,
        "a drafter with attention that is not full has not been shown to be exact "
        "(allow_unproven = true serves it)": (
            drafts(config)
            and not settings.allow_unproven
            and any(type(spec) is not FullAttentionSpec for spec in specs)
        ),
        "a drafter with another vocabulary (use_heterogeneous_vocab)": (
            drafts(config) and bool(getattr(speculation, "use_heterogeneous_vocab", False))
        ),
        "drafts that are taken without a check (rejection_sample_method is synthetic)": (
            drafts(config) and getattr(speculation, "rejection_sample_method", "") == "synthetic"
        ),
        "a drafter that does not draft in each pass (num_speculative_tokens_per_batch_size)": (
            drafts(config)
            and getattr(speculation, "num_speculative_tokens_per_batch_size", None) is not None
        ),
        f"speculative decoding by {method} with sliding windows or states": looks_ahead(config)
        and any(isinstance(spec, SlidingWindowSpec | MambaSpec) for spec in specs),
    }


def _refuse_unproven(config: "VllmConfig", kv_cache: "KVCacheConfig", settings: Config) -> None:
    groups, device = kv_cache.kv_cache_groups, device_of_kv()
    parallel, cache = config.parallel_config, config.cache_config
    specs = [group.kv_cache_spec for group in groups]
    unshown = not_shown(config, specs, settings)
    strange = sorted({type(spec).__name__ for spec in specs if type(spec) not in _KNOWN})
    known = ", ".join(kind.__name__ for kind in _KNOWN)
    stages = parallel.pipeline_parallel_size
    layers = config.model_config.get_total_num_hidden_layers() if stages > 1 else 0
    reasons = {
        "the model has no KV cache": not groups,
        f"its layers are {', '.join(strange)}; {known} are supported": bool(strange),
        "its attention is chunked": any(
            getattr(spec, "attention_chunk_size", None) for spec in specs
        ),
        "its attention looks ahead": any(getattr(spec, "non_causal", False) for spec in specs),
        "some of its groups are not for transfer": not all(
            group.enable_kv_transfer for group in groups
        ),
        "it keeps no states at blocks' ends (mamba_cache_mode is none); enable prefix caching": any(
            isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs
        ),
        "vLLM's MLA on CPUs gives other answers when a prompt continues cached KV, even that of "
        "its own prefix cache (allow_unproven = true serves it)": (
            not device
            and not settings.allow_unproven
            and any(isinstance(spec, MLAAttentionSpec) for spec in specs)
        ),
        "vLLM's chunked prefill is off, and its MLA then computes the rest of a prompt without "
        "the loaded KV": (
            any(isinstance(spec, MLAAttentionSpec) for spec in specs)
            and not config.scheduler_config.enable_chunked_prefill
        ),
        f"{sentence(unshown)} (allow_unproven = true serves it if the check at start passes)": (
            bool(unshown) and not settings.allow_unproven
        ),
        f"its KV is arranged as {cache.kv_cache_layout}; {', '.join(_COMPACT_LAYOUTS)} are "
        "supported": (bool(device) and cache.kv_cache_layout not in _COMPACT_LAYOUTS),
        f"kv_cache_dtype is {cache.cache_dtype}; {', '.join(_CACHE_DTYPES)} are supported": (
            cache.cache_dtype not in _CACHE_DTYPES
        ),
        f"{layers} layers are not divided evenly among {stages} pipeline stages": bool(
            stages > 1 and layers % stages
        ),
        f"its workers are on {parallel.nnodes_within_dp} hosts (nnodes), and each host has "
        "its own node (span.listen serves it)": (
            parallel.nnodes_within_dp > 1 and not settings.span.listen
        ),
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
        "it keeps states between blocks' ends, since its prefixes are matched in units that are "
        "smaller than a block of states (prefix_match_unit, or other groups' blocks)": (
            _keeps_states_between_blocks(config, kv_cache)
        ),
    } | _reasons_of_drafts(config, specs, settings)
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise LayoutError(
            "kvhold does not serve this set-up yet, because its KV is not proven to come "
            f"back exactly: {'; '.join(found)}"
        )
