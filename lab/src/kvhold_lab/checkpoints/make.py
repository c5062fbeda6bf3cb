"""A checkpoint for each release of transformers and torch."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvhold_lab.checkpoints.files import save_adapter, save_image_processor
from kvhold_lab.checkpoints.recipes import MAX_MODEL_LEN, RECIPES, Recipe
from kvhold_lab.checkpoints.tokenizer import save_tokenizer
from kvhold_lab.checkpoints.weights import draw_weights
from kvhold_lab.once import default_root, fingerprint, make_once

_RECIPE = 2  # increase when the files change
_SEED = 20_261
_NUM_ADAPTERS = 2


@dataclass(frozen=True)
class Checkpoint:
    name: str
    path: Path
    recipe: Recipe
    adapters: tuple[Path, ...] = ()


def make_checkpoint(name: str, root: Path | None = None) -> Checkpoint:
    """Make it if it is missing. Safe in several processes. Raises ValueError, OSError."""
    if name not in RECIPES:
        raise ValueError(f"{name!r} is not a class of models; there are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    root = default_root() if root is None else root
    folder = make_once(root / f"{name}-{_fingerprint(recipe)}", lambda draft: _write(recipe, draft))
    adapters = sorted(path for path in folder.iterdir() if path.name.startswith("adapter-"))
    return Checkpoint(name, folder / "model", recipe, tuple(adapters))


def _fingerprint(recipe: Recipe) -> str:
    state = [_RECIPE, _SEED, asdict(recipe), version("transformers"), version("torch")]
    return fingerprint(state)


def _write(recipe: Recipe, folder: Path) -> None:
    import torch
    import transformers

    model_folder = folder / "model"
    model_folder.mkdir()
    config = getattr(transformers, recipe.config)(**recipe.settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = _class_of(recipe).from_config(config, dtype=torch.float32)
    draw_weights(model, _SEED)
    model.save_pretrained(model_folder)
    tokenizer = save_tokenizer(model_folder, max_model_len=MAX_MODEL_LEN)
    if recipe.kind == "image":
        save_image_processor(model_folder, recipe.settings, tokenizer)
    if recipe.kind == "adapters":
        for number in range(_NUM_ADAPTERS):
            save_adapter(folder / f"adapter-{number}", recipe.settings, _SEED + 1 + number)


def _class_of(recipe: Recipe) -> Any:
    import transformers

    return (
        transformers.AutoModelForImageTextToText
        if recipe.kind == "image"
        else transformers.AutoModelForCausalLM
    )
