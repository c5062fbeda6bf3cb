from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvhold.blend.permits import permit_model
from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.transformers.blending import Blender
from kvhold.integrations.transformers.identity import Identity
from kvhold.integrations.weights import model_identity
from kvhold_lab.retrieval.model import make_retrieval_model
from kvhold_lab.verify.blend.questions import Speech


@dataclass(frozen=True)
class LoadedModel:
    """name: folder or hub name"""

    name: str
    blender: Blender
    speech: Speech


def load(name: str | None, *, dtype: str, limit: int) -> LoadedModel:
    """None: the lab's retrieval model. Raises ConfigError, LayoutError."""
    name = name or str(make_retrieval_model())
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: not a type; give float32, float16 or bfloat16")
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=kind).eval()
    except (OSError, ValueError) as error:
        raise ConfigError(f"MODEL {name} cannot be loaded: {error}") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    ends = model.generation_config.eos_token_id
    speech = Speech(
        _tokenizer(name),
        model.config,
        ends if isinstance(ends, list) else [] if ends is None else [ends],
        limit=limit,
    )
    return LoadedModel(name, Blender(model), speech)


def names_in_permits(loaded: LoadedModel, model_id: str) -> list[str]:
    """For transformers and for vLLM."""
    if model_id:
        return [model_id]
    identity = Identity(loaded.blender.model)
    names = [permit_model(identity.namespace(loaded.blender.geometry.layout))]
    with suppress(LayoutError):
        names.append(model_identity(loaded.name, None))
    return names


def _tokenizer(name: str) -> AutoTokenizer | None:
    folder = Path(name).expanduser()
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        return None
    return AutoTokenizer.from_pretrained(name)
