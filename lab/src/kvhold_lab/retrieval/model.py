"""The trained model, for each release of transformers and torch."""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from kvhold_lab.once import default_root, fingerprint, make_once
from kvhold_lab.retrieval.training import PHASES, SEED, train

_RECIPE = 1  # increase when the language or the training changes


def make_retrieval_model(root: Path | None = None) -> Path:
    """Return the folder; trains if it is missing. Raises OSError."""
    root = default_root() if root is None else root
    state = [
        _RECIPE,
        SEED,
        [asdict(phase) for phase in PHASES],
        version("transformers"),
        version("torch"),
    ]
    return make_once(root / f"retrieval-{fingerprint(state)}", train)
