"""Rotary settings in Hugging Face configs, also of transformers 4."""

from collections.abc import Mapping
from typing import Any

from kvhold.core.errors import ConfigError
from kvhold.kernels.rotary import Scaling

# of keys as transformers stores them, by config.model_type
_HALF = (
    "apertus arcee bitnet diffllama dots1 exaone4 falcon gemma gemma2 gemma3 gemma3_text glm4_moe "
    "gpt_neox gpt_oss granite granitemoe hunyuan_v1_dense llama ministral mistral mixtral nemotron "
    "olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss "
    "smollm3 stablelm starcoder2"
)
_INTERLEAVED = "codegen cohere cohere2 ernie4_5 ernie4_5_moe glm glm4 gptj helium"
HALF, INTERLEAVED = frozenset(_HALF.split()), frozenset(_INTERLEAVED.split())
_ALIBI = frozenset(("bloom", "mpt"))
_KNOWN = "default linear dynamic yarn llama3"
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def rope_of(config: Mapping[str, Any], layout: str | None, layer_type: str) -> dict[str, Any]:
    """Arguments of `Rope`. Raises ConfigError."""
    head_dim, first, rotary_dim = _sizes(config)
    model_type = str(config.get("model_type", ""))
    if model_type in _ALIBI or config.get("alibi"):
        return {"head_dim": head_dim, "rotary_dim": 0}
    if False in map(bool, config.get("no_rope_layers") or ()):
        raise _refused("no_rope_layers", config["no_rope_layers"], "some layers are not rotated")
    name, settings = _settings(config, layer_type)
    for field in ("mrope_section", "mrope_interleaved"):
        if settings.get(field):
            raise _refused(f"{name}.{field}", settings[field], "M-RoPE has no single position")
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    if kind not in _KNOWN.split():
        raise _refused(f"{name}.rope_type", kind, f"known are {_KNOWN}")
    if rotary_dim is None:
        rotary_dim = _rotary_dim(config, settings, head_dim)
    if layout is None:
        layout = "interleaved" if model_type in INTERLEAVED or first else "half"
        if not first and model_type not in HALF | INTERLEAVED:
            raise _refused("model_type", model_type, "pass layout='half' or 'interleaved'")
    return {
        "head_dim": head_dim,
        "rotary_dim": rotary_dim,
        "theta": _theta(config, settings, name),
        "layout": layout,
        "scaling": _scaling(config, settings, kind, name),
        "first": first,
    }


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int | None]:
    if config.get("kv_lora_rank"):
        latent, rotated = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        return latent + rotated, latent, rotated
    if config.get("head_dim"):
        return int(config["head_dim"]), 0, None
    hidden = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not hidden or not heads:
        raise ConfigError(
            "config.head_dim is missing, and so are hidden_size and num_attention_heads"
        )
    return int(hidden) // int(heads), 0, None


def _settings(config: Mapping[str, Any], layer_type: str) -> tuple[str, Mapping[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if not found:
            continue
        by_type = {key for key, value in found.items() if isinstance(value, Mapping)}
        if not by_type:
            return name, found
        if layer_type not in by_type:
            raise _refused(
                name, sorted(by_type), f"pass layer_type, one of {', '.join(sorted(by_type))}"
            )
        return f"{name}.{layer_type}", found[layer_type]
    return "rope_parameters", {}


def _theta(config: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> float:
    found = settings.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    if found is None and config.get("rotary_dim") is not None:
        return 10_000.0
    if not isinstance(found, int | float) or found <= 1:
        raise _refused(f"{name}.rope_theta", found, "without it, positions are not rotary")
    return float(found)


def _rotary_dim(config: Mapping[str, Any], settings: Mapping[str, Any], head_dim: int) -> int:
    if config.get("rotary_dim") is not None:
        return int(config["rotary_dim"])
    for part in (
        settings.get("partial_rotary_factor"),
        config.get("partial_rotary_factor"),
        config.get("rotary_pct"),
    ):
        if part is not None:
            return int(head_dim * part)
    return head_dim


def _scaling(
    config: Mapping[str, Any], settings: Mapping[str, Any], kind: str, name: str
) -> Scaling:
    if kind == "default":
        return Scaling()
    for field in _NEEDED[kind]:
        if not isinstance(settings.get(field), int | float):
            raise _refused(f"{name}.{field}", settings.get(field), f"{kind} needs a number")
    longest = config.get("max_position_embeddings")
    original = (
        longest
        if kind in ("linear", "dynamic")
        else config.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or longest
    )
    if kind != "linear" and not original:
        raise _refused("max_position_embeddings", original, f"{kind} needs it")
    factor = settings.get("factor")
    if factor is None:
        if not longest:
            raise _refused(f"{name}.factor", None, "yarn needs a number")
        factor = longest / original
    return Scaling(
        kind,  # type: ignore[arg-type]
        float(factor),
        int(original or 0),
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        truncate=bool(settings.get("truncate", True)),
        low_freq=float(settings.get("low_freq_factor") or 1),
        high_freq=float(settings.get("high_freq_factor") or 4),
    )


def _refused(field: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"config.{field} is {value!r}; keys cannot be turned: {why}")
