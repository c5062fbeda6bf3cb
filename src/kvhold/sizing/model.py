"""Compute the KV size of a model from its `config.json`, without the model.

A missing or unknown field raises. States (Mamba, linear attention, short convolutions) are not
counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold.core.layout import DTYPE_BYTES, Group
from kvhold.sizing.known import KNOWN

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_MOST_BYTES = 16 << 20

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_PARTS = ("text_config", "language_config", "llm_config")

Kind = Literal["full", "sliding", "chunked", "state", "full+state", "none"]
_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("full_attention", "attention", "full", "global"), "full"),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention"), "sliding"),
    "chunked_attention": "chunked",
    **dict.fromkeys(
        ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "short_conv"), "state"
    ),
    **dict.fromkeys(("mlp", "moe"), "none"),
}
# Nemotron-H
_BY_LETTER: dict[str, Kind] = {"*": "full", "M": "state", "-": "none", "E": "none"}

_LEFT_OUT: dict[str, dict[str, Any]] = {  # transformers' defaults, by model_type
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    **{
        name: {"use_sliding_window": False}
        for name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
    },
}
_ALL_WINDOWED = ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2")

_OF_STATES = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "linear_num_key_heads",
    "linear_attn_config",
    "lru_width",
    "conv_L_cache",
)
_NOT_UNDERSTOOD = {
    "global_head_dim": "its full layers have heads of another size",
    "compress_ratios": "some of its layers store a summary of many tokens",
    "block_configs": "each of its layers has its own geometry",
}


@dataclass(frozen=True)
class ModelKV:
    groups: tuple[Group, ...]
    state_layers: int = 0
    notes: tuple[str, ...] = ()

    def stored_bytes(self, num_tokens: int) -> int:
        """As kvhold stores a text: of sliding layers, too, all tokens."""
        return sum(group.layers * group.layer_bytes(num_tokens) for group in self.groups)

    def kept_bytes(self, num_tokens: int) -> int:
        """As a hit loads it; of sliding layers, the window."""
        return sum(
            group.layers * group.layer_bytes(_within(group, num_tokens)) for group in self.groups
        )

    def rank_bytes(self, num_tokens: int, tp: int) -> int:
        """One worker's bytes. Raises ConfigError: indivisible heads."""
        return sum(
            group.layers * group.layer_bytes(_within(group, num_tokens)) // _divided(group, tp)
            for group in self.groups
        )


def read_settings(model: str) -> dict[str, Any]:
    """A folder, a config.json, or a name in `KNOWN`. Raises ConfigError."""
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _read(path)
    by_name = {name.lower(): name for name in KNOWN} | {
        name.partition("/")[2].lower(): name for name in KNOWN
    }
    if (name := by_name.get(model.lower())) is not None:
        return dict(KNOWN[name])
    near = get_close_matches(model.lower(), by_name, n=1)
    hint = f"did you mean {by_name[near[0]]}?" if near else f"known are {', '.join(KNOWN)}"
    raise ConfigError(
        f"{model}: no such file or folder, and no model of that name is known; {hint}. Or "
        "give the path of its config.json"
    )


def kv_of(settings: Mapping[str, Any], *, dtype: str = "auto") -> ModelKV:
    """Of a transformers config.json. Raises ConfigError with the field.

    dtype: of the KV; "auto": the model's
    """
    if settings.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder is true; kvhold caches only decoder models")
    outer = settings
    if not any(name in settings for name in _LAYERS):
        settings = next(
            (part for name in _PARTS if isinstance(part := settings.get(name), Mapping)), settings
        )
    if isinstance(model_type := settings.get("model_type"), str):
        settings = {**_LEFT_OUT.get(model_type, {}), **settings}
    for name, why in _NOT_UNDERSTOOD.items():
        if settings.get(name):
            raise ConfigError(
                f"{name} is set: {why}, so the size of its KV is not known here; serve it once, "
                "and divide the used bytes in kvhold status by the chunks"
            )
    kinds = _kinds(settings)
    notes: list[str] = []
    if shared := _number(settings, ("num_kv_shared_layers",), default=0):
        kinds = kinds[: max(0, len(kinds) - shared)]
        notes.append(f"the last {shared} layers use the KV of others and have none")
    states = sum(kind in ("state", "full+state") for kind in kinds)
    if states:
        notes.append(
            f"{states} layers keep a state, whose size is not known from settings and is "
            "not counted; kvhold stores one per chunk"
        )
    counts = {"full": sum(kind in ("full", "full+state") for kind in kinds)} | {
        k: kinds.count(k) for k in ("sliding", "chunked")
    }
    if not any(counts.values()):
        raise ConfigError(
            "none of its layers has attention: they keep states, whose size is not known "
            "from settings"
        )
    element = _dtype(settings, outer, dtype)
    planes, heads, head_dim = _geometry(settings)
    if settings.get("index_head_dim"):
        notes.append("the keys of its indexer (index_head_dim) are not counted")
    if counts["chunked"]:
        notes.append("its attention is chunked, which the vLLM connector refuses")
    groups = []
    for kind, layers in counts.items():
        if not layers:
            continue
        window = 0
        if kind != "full":
            window = _number(
                settings,
                ("sliding_window", "window_size")
                if kind == "sliding"
                else ("attention_chunk_size",),
            )
        groups.append(
            Group(
                layers,
                planes,
                heads,
                head_dim,
                element,
                attention="sliding" if window else "full",
                window=window,
            )
        )
    return ModelKV(tuple(groups), states, tuple(notes))


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES >> 20} MiB; it is no config.json")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no config.json: {error}") from None


def _kinds(settings: Mapping[str, Any]) -> list[Kind]:
    layers = _number(settings, _LAYERS)
    if layers > 4096:
        raise ConfigError(f"{_LAYERS[0]} is {layers}; it must be at most 4096")
    for name in ("layer_types", "layers_block_type"):
        if (types := settings.get(name)) is not None:
            return _named(name, types, layers)
    if (pattern := settings.get("hybrid_override_pattern")) is not None:
        if (
            not isinstance(pattern, str)
            or len(pattern) != layers
            or not set(pattern) <= set(_BY_LETTER)
        ):
            raise ConfigError(
                f"hybrid_override_pattern must be {layers} letters of {' '.join(_BY_LETTER)}"
            )
        return [_BY_LETTER[letter] for letter in pattern]
    if (flags := settings.get("attn_type_list")) is not None:
        return _flagged("attn_type_list", flags, layers)
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if (places := settings.get(name)) is not None:
            return _placed(name, places, layers)
    if settings.get("attn_layer_period"):
        period, offset = (
            _number(settings, ("attn_layer_period",)),
            _number(settings, ("attn_layer_offset",), default=0),
        )
        return ["full" if i % period == offset else "state" for i in range(layers)]
    if settings.get("full_attention_interval"):
        interval = _number(settings, ("full_attention_interval",))
        return ["state" if (i + 1) % interval else "full" for i in range(layers)]
    if settings.get("model_type") == "falcon_h1":
        return ["full+state"] * layers
    if found := [name for name in _OF_STATES if settings.get(name)]:
        raise ConfigError(
            f"{found[0]} is set, so some layers keep a state, but it is not known which; add "
            "layer_types, a list with each layer's kind"
        )
    return _windowed(settings, layers)


def _windowed(settings: Mapping[str, Any], layers: int) -> list[Kind]:
    if settings.get("attention_chunk_size"):
        return ["chunked" if (i + 1) % 4 else "full" for i in range(layers)]  # Llama 4
    if not settings.get("sliding_window") or settings.get("use_sliding_window") is False:
        return ["full"] * layers
    if settings.get("use_sliding_window"):  # Qwen 2
        first = _number(settings, ("max_window_layers",), default=0)
        return ["full" if i < first else "sliding" for i in range(layers)]
    every = _number(settings, ("sliding_window_pattern", "_sliding_window_pattern"), default=0)
    if not every and settings.get("model_type") not in _ALL_WINDOWED:
        raise ConfigError(
            "sliding_window is set, but it is not known which layers have it: add layer_types, "
            "a list with each layer's kind, or sliding_window_pattern: every n-th layer sees all "
            "tokens"
        )
    return ["full" if every and not (i + 1) % every else "sliding" for i in range(layers)]


def _named(name: str, types: Any, layers: int) -> list[Kind]:
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"{name} must be a list of {layers} kinds, as many as there are layers")
    for each in types:
        if not isinstance(each, str) or each not in _KINDS:
            raise ConfigError(
                f"{name}: {each!r} is an unknown kind of layer; known are {', '.join(_KINDS)}"
            )
    return [_KINDS[each] for each in types]


def _flagged(name: str, flags: Any, layers: int) -> list[Kind]:
    if (
        not isinstance(flags, list)
        or len(flags) != layers
        or any(flag not in (0, 1) for flag in flags)
    ):
        raise ConfigError(
            f"{name} must be a list of {layers} numbers, 1 for attention and 0 for a state"
        )
    return ["full" if flag else "state" for flag in flags]


def _placed(name: str, places: Any, layers: int) -> list[Kind]:
    if not isinstance(places, list) or any(
        type(place) is not int or not 0 <= place < layers for place in places
    ):
        raise ConfigError(f"{name} must be a list of layers' numbers, from 0 to {layers - 1}")
    return ["full" if i in places else "state" for i in range(layers)]


def _geometry(settings: Mapping[str, Any]) -> tuple[int, int, int]:
    if settings.get("kv_lora_rank"):  # MLA
        return 1, 1, _number(settings, ("kv_lora_rank",)) + _number(settings, ("qk_rope_head_dim",))
    heads = _number(settings, _HEADS)
    if settings.get("multi_query_attention") and "multi_query_group_num" in settings:
        kv_heads = _number(settings, ("multi_query_group_num",))
    elif settings.get("multi_query") and not settings.get("new_decoder_architecture"):
        kv_heads = 1
    else:
        kv_heads = _number(settings, _KV_HEADS, default=heads)
    head_dim = _number(settings, ("head_dim", "attention_head_dim", "kv_channels"), default=0)
    if not head_dim:
        width = _number(settings, _WIDTH)
        head_dim, rest = divmod(width, heads)
        if rest:
            raise ConfigError(
                f"head_dim is missing, and hidden_size {width} is no multiple of "
                f"num_attention_heads {heads}; add head_dim"
            )
    values = _number(settings, ("v_head_dim",), default=head_dim)
    if values != head_dim:
        raise ConfigError(
            f"v_head_dim is {values}, but keys have {head_dim}; heads whose keys and values "
            "differ in size are not supported"
        )
    return 2, kv_heads, head_dim


def _dtype(settings: Mapping[str, Any], outer: Mapping[str, Any], wanted: str) -> str:
    name: Any = wanted
    if wanted == "auto":
        places = (
            part.get(field) for part in (settings, outer) for field in ("dtype", "torch_dtype")
        )
        name = next((place for place in places if place), None)
        if name is None:
            raise ConfigError(
                "dtype is missing from the settings; give it, such as --dtype bfloat16"
            )
    known = DTYPES | {each: each for each in DTYPE_BYTES}
    text = str(name).removeprefix("torch.").lower()
    if text not in known:
        raise ConfigError(f"dtype is {name!r}; it must be one of {', '.join(known)}")
    return known[text]


def _number(
    settings: Mapping[str, Any], names: Sequence[str], *, default: int | None = None
) -> int:
    """The first field that is set. Only with a default may it be 0."""
    for name in names:
        if (value := settings.get(name)) is None:
            continue
        least = 1 if default is None else 0
        if type(value) is not int or not least <= value < 1 << 40:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        return value
    if default is None:
        raise ConfigError(
            f"{names[0]} is missing from the settings"
            + (f" (or {', '.join(names[1:])})" if names[1:] else "")
        )
    return default


def _within(group: Group, num_tokens: int) -> int:
    return min(num_tokens, group.window) if group.attention == "sliding" else num_tokens


def _divided(group: Group, tp: int) -> int:
    if tp < 1:
        raise ConfigError(f"tp is {tp}; it must be 1 or more")
    if group.planes == 1:
        return 1
    if group.heads % tp and tp % group.heads:
        raise ConfigError(
            f"tp is {tp}; it must divide the {group.heads} KV heads, or be a multiple of "
            f"{group.heads}"
        )
    return min(group.heads, tp)
