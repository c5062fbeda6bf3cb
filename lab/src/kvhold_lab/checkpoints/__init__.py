"""Small random checkpoints of every class. Needs torch, transformers and safetensors."""

from kvhold_lab.checkpoints.make import Checkpoint, make_checkpoint
from kvhold_lab.checkpoints.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Checkpoint", "Recipe", "make_checkpoint"]
