"""Small checkpoints of every class of model, made on this host: random weights of a fixed seed,
nothing downloaded.

    checkpoint = make_checkpoint("gemma3")
    checkpoint.path, checkpoint.adapters

`kvhold verify --all-classes` and the tests run engines on them. Each is a few megabytes, is made in
a second or two and kept in the user's cache folder under a name that holds a fingerprint of its
recipe. `recipes.py` says which classes there are, `weights.py` draws the weights, `tokenizer.py` is
the tokenizer that all share, `files.py` writes what is not a language model's own. Needs torch,
transformers and safetensors, which come with vLLM.
"""

from kvhold.lab.checkpoints.make import Checkpoint, make_checkpoint
from kvhold.lab.checkpoints.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Checkpoint", "Recipe", "make_checkpoint"]
