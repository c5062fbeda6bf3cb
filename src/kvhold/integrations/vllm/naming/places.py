"""Weights outside the model's folder or hub cache: named, or refused."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm import envs

from kvhold.core.errors import LayoutError


def check_weights(load: Any, model: str) -> None:
    """Raises LayoutError: vLLM reads weights from elsewhere.

    load: vLLM's LoadConfig
    """
    extra = load.model_loader_extra_config
    if load.load_format == "tensorizer" or any("/" in text for text in _texts(extra)):
        raise LayoutError(
            f"cannot identify the weights by their content: load_format {load.load_format} with "
            "model_loader_extra_config reads them from elsewhere; set model_id"
        )
    if envs.VLLM_USE_MODELSCOPE and not Path(model).expanduser().exists():
        raise LayoutError(
            f"cannot identify the weights of {model!r}: they come from ModelScope; set model_id"
        )


def other_models(hf_config: object) -> list[tuple[str, str]]:
    """(setting, model) of models such as Ultravox's towers."""
    return [
        (name, value)
        for name, value in sorted(vars(hf_config).items())
        if name.endswith("_model_id") and isinstance(value, str) and value
    ]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str | os.PathLike):
        yield os.fspath(value)
