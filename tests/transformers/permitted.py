"""Permits for models of the tests."""

from pathlib import Path
from typing import Any

from kvhold.blend.permits import Permit, permit_model
from kvhold.blend.selection import Selector, selector_text
from kvhold.core.config import Config, load_config
from kvhold.integrations.transformers.geometry import geometry_of
from kvhold.integrations.transformers.identity import Identity
from tests.blend.permits import grant
from tests.transformers.models import TOKENS_PER_CHUNK


def permit_for(
    model: Any, folder: Path, selector: Selector, *, model_id: str = "", **numbers: Any
) -> Permit:
    """Of the model as it is now."""
    layout = geometry_of(model, tokens_per_chunk=TOKENS_PER_CHUNK).layout
    name = permit_model(Identity(model, model_id=model_id).namespace(layout))
    return grant(folder, model=name, selector=selector_text(selector), **numbers)


def blend_config(folder: Path, **settings: Any) -> Config:
    """Small chunks, and permits in the folder."""
    blend = {"permits": str(folder)} | settings
    return load_config({"tokens_per_chunk": TOKENS_PER_CHUNK, "blend": blend}, environ={})
