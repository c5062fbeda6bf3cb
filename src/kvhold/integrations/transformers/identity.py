"""What a model's KV depends on, as a Namespace: `Identity(model).namespace(layout)`.

The weights by their content (or the name the user gives them), the configuration without what does not touch KV, the model's class and
the version of transformers (which hold the code), the attention implementation, the device's kind and the precision of its products
(which round differently), quantisation, and the adapters of PEFT: which are active, merged or switched off, and how they are scaled.
Asked again for each call, because all of it may change while a model lives. Any one thread at a time.
"""

import json
import sys
from hashlib import blake2b
from importlib import import_module
from typing import Any

import torch
import transformers

from kvhold.core.errors import LayoutError
from kvhold.core.keys import Namespace
from kvhold.core.layout import Layout
from kvhold.integrations.transformers.weights import Weights

# Differ between copies of one model, or are changed at will, and leave its KV as it is. The dtype that counts is that of the weights.
_VOLATILE = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "quantization_config",  # a field of its own
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_VOLATILE_IN_ADAPTERS = frozenset({"base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"})


class Identity:
    """One model object.

    model_id:   what to call the weights, adapters included, instead of reading them; the caller answers for it
    cache_salt: text that separates callers who must not share KV
    """

    def __init__(self, model: Any, *, model_id: str = "", cache_salt: str = "") -> None:
        self._model = model
        self._model_id = model_id
        self._cache_salt = cache_salt
        self._weights = Weights(model)

    def namespace(self, layout: Layout) -> Namespace:
        """The namespace of the model as it is now. Raises ConfigError when its weights cannot be read, LayoutError for adapters whose
        KV does not depend on the tokens alone."""
        model, config = self._model, self._model.config
        kind = type(_unwrapped(model))
        return Namespace(
            model=f"named:{self._model_id}" if self._model_id else f"content:{self._weights.digest()}",
            layout=layout,
            revision=_digest({name: value for name, value in config.to_dict().items() if name not in _VOLATILE and name[0] != "_"}),
            dtype=str(model.dtype),
            quantization=_quantization(config),
            lora=_adapters(model),
            cache_salt=self._cache_salt,
            tags=(
                ("attention", str(getattr(config, "_attn_implementation", None))),
                ("class", f"{kind.__module__}.{kind.__qualname__}"),
                ("device", str(model.device.type)),
                ("products", torch.get_float32_matmul_precision()),
                ("transformers", transformers.__version__),
            ),
        )


def learnt_prefixes(model: Any) -> list[str]:
    """The adapters of PEFT (prefix tuning, prompt tuning) that put KV or embeddings of their own before every prompt."""
    return [name for name, config in getattr(model, "peft_config", {}).items() if config.is_prompt_learning]


def _unwrapped(model: Any) -> Any:
    """The transformers model inside a PeftModel."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _quantization(config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    return _digest(settings if isinstance(settings, dict) else settings.to_dict())


def _adapters(model: Any) -> str:
    """The state of PEFT's adapters, empty where there are none. Their weights are part of the model's."""
    if "peft" not in sys.modules:
        return ""
    tuner_layer = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    layers = [[name, *_layer_state(module)] for name, module in model.named_modules() if isinstance(module, tuner_layer)]
    if prefixes := learnt_prefixes(model):
        raise LayoutError(f"adapter {', '.join(prefixes)} puts something of its own before the prompt; kvhold does not serve that")
    if not layers:
        return ""
    configs = {name: config.to_dict() for name, config in getattr(model, "peft_config", {}).items()}
    kept = {name: {k: v for k, v in config.items() if k not in _VOLATILE_IN_ADAPTERS} for name, config in configs.items()}
    return _digest([layers, kept])


def _layer_state(layer: Any) -> list[Any]:
    active, scaling = list(layer.active_adapters), getattr(layer, "scaling", {})
    return [active, bool(layer.disable_adapters), list(layer.merged_adapters), [scaling.get(name) for name in active]]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=lambda other: sorted(other) if isinstance(other, set) else str(other))
    return blake2b(text.encode(), digest_size=16).hexdigest()
