"""A vLLM engine's configuration, except harmless fields.

Only plain values can be named. Others raise a LayoutError, unless `share` leaves the field out.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
import vllm
from vllm.platforms import current_platform

from kvhold.core.config import Config
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.core.naming import Facts, NamingRules, Table, text_of, walk
from kvhold.integrations.machine import processor_facts, version_facts
from kvhold.integrations.vllm.geometry import drafts
from kvhold.integrations.vllm.naming.environment import environment_facts
from kvhold.integrations.vllm.naming.places import check_weights
from kvhold.integrations.vllm.naming.tables import ELSEWHERE, TABLES
from kvhold.integrations.vllm.releases import EARLIER_FIELDS
from kvhold.integrations.weights import code_identity, file_digest, model_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_MODULES = {"vllm": vllm, "torch": torch, "transformers": transformers}
_LIBRARIES = ("triton", "flashinfer-python", "flash-attn", "compressed-tensors")
_OPEN_PACKAGES = ("vllm", "transformers", "transformers_modules", "compressed_tensors")
_PLACES = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_PER_WORKER = "num_kv_heads num_head_slots max_tp_shards page_size_padded state_content_bytes"

SHARES = {
    "versions": ("versions.",),
    "cpu": ("cpu.",),
    "tensor_parallel": ("vllm.parallel_config.tensor_parallel_size", "kv.kv_tp_replicas"),
    "data_parallel": ("vllm.parallel_config.data_parallel_size",),
    "expert_parallel": (
        "vllm.parallel_config.enable_expert_parallel",
        "vllm.parallel_config.all2all_backend",
    ),
    "environment": ("environment.",),
}
"""Words of the setting `share`, and the facts that each word leaves out.

A name that ends in a dot stands for all facts that begin with it.
"""


def engine_facts(config: "VllmConfig", kv_cache: "KVCacheConfig", settings: Config) -> Facts:
    """Raises LayoutError: a value cannot be named; ConfigError: unknown `share`."""
    left_out = shared_names(settings)
    found: dict[str, str] = {}
    rules = _rules(left_out, per_shard=settings.head_shards > 0)
    walk(config, "vllm", rules, found)
    _add_conditional(config, rules, found)
    _add_groups(config, kv_cache, rules, found)
    found |= build_facts() | environment_facts()
    found["vllm.quant_config"] = _class_of(config.quant_config)
    facts = Facts.of(found).without(lambda name: _is_shared(name, left_out))
    for name in settings.share:
        if (
            name not in SHARES
            and not any(_is_shared(fact, (name,)) for fact in found)
            and not name.startswith(("vllm.", "kv."))
        ):
            raise ConfigError(
                f"share: {name!r} is neither one of {', '.join(SHARES)} nor a fact of this engine;"
                " `kvhold names A B` lists those that differ"
            )
    return facts


def machine_facts(config: "VllmConfig", settings: Config) -> Facts:
    """This host's builds, environment, and drafter's weights."""
    left_out = shared_names(settings)
    found = build_facts() | environment_facts()
    if drafts(config):
        rules = _rules(left_out, per_shard=settings.head_shards > 0)
        _add_draft_model(config.speculative_config, config.load_config, rules, found)
    return Facts.of(found).without(lambda name: _is_shared(name, left_out))


def shared_names(settings: Config) -> tuple[str, ...]:
    names = [name for word in settings.share for name in SHARES.get(word, (word,))]
    if settings.head_shards:
        names += SHARES["tensor_parallel"]
    return tuple(names)


def build_facts() -> dict[str, str]:
    found = {f"versions.{name}": repr(str(module.__version__)) for name, module in _MODULES.items()}
    return {**found, **version_facts(*_LIBRARIES), **processor_facts(), **_device_facts()}


def _device_facts() -> dict[str, str]:
    """Ask the driver, because only the workers start CUDA."""
    facts = {"cpu.device": repr(str(current_platform.device_name))}
    if not current_platform.is_cpu():
        facts["device.name"] = repr(str(current_platform.get_device_name()))
        facts["device.capability"] = repr(str(current_platform.get_device_capability()))
        facts["versions.cuda"] = repr(str(torch.version.cuda))
        facts["versions.hip"] = repr(str(torch.version.hip))
    return facts


def _rules(left_out: tuple[str, ...], *, per_shard: bool) -> NamingRules:
    tables = {name: table | EARLIER_FIELDS.get(name, Table.of()) for name, table in TABLES.items()}
    if per_shard:  # these differ between engines with equal layouts
        tables["KVCacheSpec"] = Table.of("", {ELSEWHERE: _PER_WORKER})
    return NamingRules(
        tables=tables,
        opens=lambda kind: kind.__module__.partition(".")[0] in _OPEN_PACKAGES,
        atoms={torch.dtype: str, torch.device: str, torch.Size: lambda size: str(list(size))},
        not_keys=_PLACES,
        shared=left_out,
    )


def _is_shared(name: str, left_out: tuple[str, ...]) -> bool:
    return any(
        name == one or name.startswith(one if one.endswith(".") else f"{one}.") for one in left_out
    )


def _add_conditional(config: "VllmConfig", rules: NamingRules, found: dict[str, str]) -> None:
    model = config.model_config
    if any(
        "longrope" in text
        for name, text in found.items()
        if name.startswith("vllm.model_config.hf")
    ):
        # it decides between long and short factors
        found["vllm.model_config.max_model_len"] = text_of(model.max_model_len, "max_model_len")
    if str(config.load_config.load_format) == "dummy":
        found["vllm.model_config.seed"] = text_of(model.seed, "seed")
    if drafts(config):
        _add_draft_model(config.speculative_config, config.load_config, rules, found)
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales:
        try:
            found["vllm.mm_encoder_fp8_scales"] = file_digest(Path(scales))
        except OSError as error:
            raise LayoutError(
                f"mm_encoder_fp8_scale_path: cannot read {scales}: {error.strerror}"
            ) from None


def _add_draft_model(
    speculation: Any, load: Any, rules: NamingRules, found: dict[str, str]
) -> None:
    load = speculation.draft_load_config or load
    draft, where = speculation.draft_model_config, "vllm.draft_model_config"
    try:
        if draft.model_weights:
            raise LayoutError(f"its weights are at {draft.model_weights}")
        check_weights(load, draft.model)
        weights = model_identity(draft.model, draft.revision, cache_dir=load.download_dir)
    except LayoutError as error:
        raise LayoutError(
            f"the draft model {draft.model} cannot be identified by its content: {error}"
        ) from None
    walk(draft, where, rules, found)
    found[f"{where}.weights"] = repr(weights)
    found[f"{where}.max_model_len"] = text_of(draft.max_model_len, "max_model_len")
    if speculation.draft_load_config is not None:
        walk(speculation.draft_load_config, "vllm.draft_load_config", rules, found)
        if str(speculation.draft_load_config.load_format) == "dummy":
            found[f"{where}.seed"] = text_of(draft.seed, "seed")
    if draft.trust_remote_code:
        for code in code_identity(
            draft.model, getattr(draft.hf_config, "auto_map", None), draft.code_revision
        ):
            found[f"{where}.code.{code}"] = "'used'"


def _add_groups(
    config: "VllmConfig", kv_cache: "KVCacheConfig", rules: NamingRules, found: dict[str, str]
) -> None:
    """Without names: a pipeline stage does not know the other layers."""
    staged = config.parallel_config.pipeline_parallel_size > 1
    for number, group in enumerate(kv_cache.kv_cache_groups):
        walk(group, f"kv.groups[{number}]", rules, found)
        if staged:
            found[f"kv.groups[{number}].layer_names"] = "'of a stage'"
    for name in ("kv_cache_layout", "kv_tp_replicas"):
        if hasattr(kv_cache, name):
            walk(getattr(kv_cache, name), f"kv.{name}", rules, found)


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
