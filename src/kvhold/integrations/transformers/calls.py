"""A served call fills its cache with the KV of exactly the prompt's tokens."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

_SERVED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)

_MUST_BE: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prefill_chunk_size": (None,),
    "token_healing": (None, False),
    "is_assistant": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}

_HARMLESS = frozenset(
    {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer"}
)


@dataclass(frozen=True)
class AsIs:
    reason: str


@dataclass(frozen=True)
class GenerateCall:
    """input_ids: [rows, tokens]
    most: loadable tokens of each row
    expand: sequences that `generate` makes from each row
    searched: a row of the cache may mix sequences (beams)
    """

    input_ids: Any
    most: int
    expand: int = 1
    searched: bool = False

    def tokens(self) -> npt.NDArray[np.int64]:
        """[rows, tokens]"""
        ids: npt.NDArray[np.int64] = self.input_ids.detach().cpu().numpy()
        return ids


def forward_call(model: Any, input_ids: Any, options: Mapping[str, Any]) -> GenerateCall | AsIs:
    given = {name: value for name, value in options.items() if value is not None}
    refused = _unfit(model, input_ids, given.pop("attention_mask", None))
    if refused is not None:
        return AsIs(refused)
    if _has_pads(model.config, input_ids):
        return AsIs("the prompt has pad tokens, and some models count positions without them")
    keep = given.pop("logits_to_keep", 1)
    if given.pop("use_cache", True) is not True:
        return AsIs("use_cache is off")
    given.pop("return_dict", None)
    if given:
        return AsIs(f"{', '.join(sorted(given))} given")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(model.config, name, False):
            return AsIs(f"config.{name} is on")
    if not isinstance(keep, int) or keep < 0:
        return AsIs("logits_to_keep is not a number of tokens")
    length = input_ids.shape[1]
    return GenerateCall(input_ids, most=max(0, length - (keep or length)))


def generate_call(
    model: Any, inputs: Any, config: GenerationConfig | None, options: Mapping[str, Any]
) -> GenerateCall | AsIs:
    given = {name: value for name, value in options.items() if value is not None}
    named = given.pop("input_ids", None)
    if inputs is not None and named is not None:
        return AsIs("both inputs and input_ids given")
    input_ids = named if inputs is None else inputs
    mask = given.pop("attention_mask", None)
    refused = _unfit(model, input_ids, mask)
    if refused is not None:
        return AsIs(refused)
    settings = _settings(model, config, given)
    others = sorted(name for name in given if not hasattr(settings, name) and name not in _HARMLESS)
    if others:
        return AsIs(f"{', '.join(others)} given")
    for name, allowed in _MUST_BE.items():
        if getattr(settings, name, None) not in allowed:
            return AsIs(f"{name} is {getattr(settings, name)}")
    mode = settings.get_generation_mode()
    if mode not in _SERVED_MODES:
        return AsIs(f"the generation mode is {mode.value}")
    if mask is None and _has_pads(settings, input_ids):
        return AsIs(
            "the prompt has pad tokens and no attention_mask, so generate guesses what is padding"
        )
    beams, returned = settings.num_beams or 1, settings.num_return_sequences or 1
    return GenerateCall(
        input_ids, most=input_ids.shape[1] - 1, expand=max(beams, returned), searched=beams > 1
    )


def _unfit(model: Any, input_ids: Any, mask: Any) -> str | None:
    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.ndim != 2
        or input_ids.dtype not in (torch.int64, torch.int32)
    ):
        return "the prompt is not [rows, tokens] of token ids"
    if not input_ids.numel():
        return "the prompt is empty"
    if model.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on"
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        return "the attention_mask does not have the prompt's shape"
    return None if bool((mask == 1).all()) else "the prompt is padded"


def _settings(
    model: Any, config: GenerationConfig | None, given: Mapping[str, Any]
) -> GenerationConfig:
    settings = copy.deepcopy(model.generation_config)
    for source in (vars(config) if config is not None else {}, given):
        for name, value in source.items():
            if value is not None and name[0] != "_" and hasattr(settings, name):
                setattr(settings, name, value)
    return settings


def _has_pads(settings: Any, input_ids: Any) -> bool:
    pad, end = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    if pad is None or not bool((input_ids == pad).any()):
        return False
    return end is None or pad not in (end if isinstance(end, (list, tuple)) else [end])
