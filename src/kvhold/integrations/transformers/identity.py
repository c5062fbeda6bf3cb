"""Name the namespace of a model's KV, from plain data only. One thread at a time."""

import sys
from hashlib import blake2b
from importlib import import_module
from typing import Any

import torch
import transformers

from kvhold.core.errors import LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Layout
from kvhold.core.naming import Facts, NamingRules, Table, text_of, walk
from kvhold.integrations.machine import (
    device_facts,
    library_facts,
    processor_facts,
    version_facts,
)
from kvhold.integrations.transformers.weights import Weights

_PLACES = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})

HARMLESS = {
    "where a file is, or who wrote it": " ".join(sorted(_PLACES)),
    "how the model is made; its class is a fact": "architectures auto_map model_type",
    "how text becomes tokens, and where it ends": "bos_token_id eos_token_id pad_token_id",
    "what is done with the last hidden state": "id2label label2id problem_type",
    "what else a call returns": "output_attentions _output_attentions output_hidden_states "
    "return_dict use_cache",
    "the type that counts is that of the weights": "dtype torch_dtype",
}
"""Top-level fields of a model's configuration that do not change KV, by the reason."""

_RULES = NamingRules(
    tables={"PreTrainedConfig": Table.of("", HARMLESS), "PretrainedConfig": Table.of("", HARMLESS)},
    opens=lambda kind: (
        kind.__module__.partition(".")[0] in ("transformers", "transformers_modules")
    ),
    atoms={torch.dtype: str, torch.device: str, torch.Size: lambda size: str(list(size))},
    # deeper inside, other names matter: a quantization's `dtype` shapes KV
    not_keys=_PLACES,
)
_LIBRARIES = (
    "torch",
    "peft",
    "accelerate",
    "flash-attn",
    "bitsandbytes",
    "kernels",
    "compressed-tensors",
)
_VOLATILE_IN_ADAPTERS = frozenset(
    {"base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
)


class Identity:
    def __init__(self, model: Any, *, model_id: str = "", cache_salt: str = "") -> None:
        self._model = model
        self._model_id = model_id
        self._cache_salt = cache_salt
        self._weights = Weights(model)

    def namespace(self, layout: Layout) -> Namespace:
        """Raises ConfigError: unreadable weights; LayoutError: learnt prefixes."""
        model, config = self._model, self._model.config
        kind = type(_unwrapped(model))
        facts: dict[str, str] = {}
        walk(config, "config", _RULES, facts)
        facts |= library_facts() | {**version_facts(*_LIBRARIES), **processor_facts()}
        facts["class"] = repr(f"{kind.__module__}.{kind.__qualname__}")
        facts["attention"] = repr(str(getattr(config, "_attn_implementation", None)))
        facts["device"] = repr(str(model.device.type))
        facts |= device_facts(str(model.device))
        facts["products"] = repr(torch.get_float32_matmul_precision())
        facts["versions.transformers"] = repr(transformers.__version__)
        return Namespace(
            model=f"named:{self._model_id}"
            if self._model_id
            else f"content:{self._weights.digest()}",
            layout=layout,
            dtype=str(model.dtype),
            quantization=_quantization(config),
            lora=_adapters(model),
            cache_salt=self._cache_salt,
            facts=Facts.of(facts),
            title=str(getattr(config, "_name_or_path", "") or kind.__name__),
        )


def learnt_prefixes(model: Any) -> list[str]:
    """PEFT's adapters that prepend KV to every prompt."""
    return [
        name
        for name, config in getattr(model, "peft_config", {}).items()
        if config.is_prompt_learning
    ]


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _quantization(config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    return _digest(
        settings if isinstance(settings, dict) else settings.to_dict(), "quantization_config"
    )


def _adapters(model: Any) -> str:
    if "peft" not in sys.modules:
        return ""
    tuner_layer = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    layers = [
        [name, *_layer_state(module)]
        for name, module in model.named_modules()
        if isinstance(module, tuner_layer)
    ]
    if prefixes := learnt_prefixes(model):
        raise LayoutError(
            f"adapter {', '.join(prefixes)} puts a learnt prefix before the prompt; "
            "kvhold does not serve that"
        )
    if not layers:
        return ""
    configs = {name: config.to_dict() for name, config in getattr(model, "peft_config", {}).items()}
    kept = {
        name: {k: v for k, v in config.items() if k not in _VOLATILE_IN_ADAPTERS}
        for name, config in configs.items()
    }
    return _digest([layers, kept], "peft_config")


def _layer_state(layer: Any) -> list[Any]:
    active, scaling = list(layer.active_adapters), getattr(layer, "scaling", {})
    return [
        active,
        bool(layer.disable_adapters),
        list(layer.merged_adapters),
        [scaling.get(name) for name in active],
    ]


def _digest(value: Any, name: str) -> str:
    return blake2b(text_of(value, name, _RULES).encode(), digest_size=16).hexdigest()
