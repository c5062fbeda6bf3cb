"""Let the model fill a cache, and find the shape of its KV.

The probe is two prompts with the same first token. If its KV differs, the model looks ahead.
"""

import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvhold.core.errors import LayoutError
from kvhold.core.layout import Group, Layout
from kvhold.integrations.transformers.identity import learnt_prefixes
from kvhold.memory.views import View, separate_pools

# "dynamic" and "longrope" depend on the prompt's length
_STEADY_ROTARY = ("default", "linear", "llama3", "proportional", "yarn")

_PROBE = [[3, 4], [3, 5]]


@dataclass(frozen=True)
class CacheGeometry:
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    config: Any

    def empty(self) -> DynamicCache:
        return DynamicCache(config=self.config)

    def allocated(self, num_rows: int, num_tokens: int) -> DynamicCache:
        """Tensors are uninitialised: `[num_rows, heads, num_tokens, head_dim]`."""
        cache, group = self.empty(), self.layout.groups[0]
        for layer in cache.layers:
            shape = (num_rows, group.heads, num_tokens, group.head_dim)
            keys, values = (
                torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)
            )
            layer.update(keys[:, :, :0], values[:, :, :0])
            layer.keys, layer.values = keys, values
        return cache

    def view(self, cache: DynamicCache) -> View:
        """Block b is row b; slot `b * num_tokens + t` is token t of row b.

        Raises LayoutError: a layer is no DynamicLayer.
        """
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise LayoutError(
                f"layers: the cache has {_kinds(cache)}; every layer must be a DynamicLayer"
            )
        pools = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        return separate_pools(self.layout.groups[0], pools, axes="block head token dim")


def geometry_of(model: Any, *, tokens_per_chunk: int) -> CacheGeometry:
    """Raises LayoutError: an unsupported model."""
    _refuse_unproven(model)
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise LayoutError(
            f"kvhold does not serve {_kinds(cache)}; every layer must have full attention "
            "(DynamicLayer)"
        )
    prompts = torch.tensor(_PROBE, device=model.device)
    with torch.no_grad(), torch.autocast(prompts.device.type, enabled=False):
        model(input_ids=prompts, past_key_values=cache, use_cache=True)
    if any(layer.get_seq_length() != prompts.shape[1] for layer in cache.layers):
        raise LayoutError(
            f"{type(model).__name__} does not store each token in every layer of the given cache"
        )
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    _check_alike(tensors)
    _check_causal(model, tensors)
    _, heads, _, head_dim = tensors[0].shape
    group = Group(
        layers=len(cache.layers),
        planes=2,
        heads=heads,
        head_dim=head_dim,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        rotary=_rotary(config),
    )
    return CacheGeometry(
        Layout((group,), tokens_per_chunk=tokens_per_chunk, tail_tokens=1),
        tensors[0].dtype,
        tensors[0].device,
        config,
    )


def _check_alike(tensors: list[Any]) -> None:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        for what in ("shape", "dtype", "device"):
            mine, others = getattr(tensor, what), getattr(first, what)
            if mine != others:
                name = f"the {'values' if number % 2 else 'keys'} of layer {number // 2}"
                raise LayoutError(
                    f"{what} of {name} is {_plain(mine)}, of the keys of layer 0 "
                    f"{_plain(others)}; they must be equal"
                )
    rows, tokens = len(_PROBE), len(_PROBE[0])
    if first.ndim != 4 or first.shape[::2] != (rows, tokens):
        raise LayoutError(
            f"shape of the keys is {_plain(first.shape)}; it must be [{rows} rows, heads, "
            f"{tokens} tokens, head_dim]"
        )


def _check_causal(model: Any, tensors: list[Any]) -> None:
    for number, tensor in enumerate(tensors):
        one, other = tensor[:, :, 0].double()
        error = float((one - other).norm() / one.norm().clamp_min(1e-30))
        if not error <= max(1e-4, 4 * torch.finfo(tensor.dtype).eps):
            raise LayoutError(
                f"kvhold does not serve this {type(model).__name__}: KV of a token depends "
                f"on the tokens after it (in layer {number // 2})"
            )


def _refuse_unproven(model: Any) -> None:
    config = model.config
    text = config.get_text_config(decoder=True)
    unsteady = sorted(_rotary_types(text) - set(_STEADY_ROTARY))
    reasons = {
        "it is in training mode; call model.eval() first": model.training,
        "an adapter puts a learnt prefix before the prompt": bool(learnt_prefixes(model)),
        "it has an encoder": bool(config.is_encoder_decoder),
        "it takes more than text": text is not config,
        f"its rotary embedding ({', '.join(unsteady)}) depends on the prompt's length": bool(
            unsteady
        ),
        "some of its layers share their KV": bool(getattr(text, "num_kv_shared_layers", 0)),
        "it is split over several processes": (getattr(model, "_tp_size", None) or 1) > 1,
        "it is split over several devices": len(
            set((getattr(model, "hf_device_map", None) or {}).values())
        )
        > 1,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise LayoutError(f"kvhold does not serve this {type(model).__name__}: {'; '.join(found)}")


def _rotary_types(config: Any) -> set[str]:
    types = set()
    for settings in (
        getattr(config, "rope_parameters", None),
        getattr(config, "rope_scaling", None),
    ):
        if isinstance(settings, dict):
            for part in (settings, *settings.values()):
                if isinstance(part, dict):
                    types |= {str(part[name]) for name in ("rope_type", "type") if part.get(name)}
    return types


def _rotary(config: Any) -> str:
    settings = getattr(config, "rope_parameters", None)
    return json.dumps(settings, sort_keys=True, default=str) if settings else ""


def _kinds(cache: DynamicCache) -> str:
    return ", ".join(sorted({type(layer).__name__ for layer in cache.layers})) or "no layers"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, torch.Size) else value
