"""Permits for tests: granted as `kvhold verify --blend` does, with numbers made up."""

from pathlib import Path
from typing import Any

from kvhold.blend.permits import Permit, Permits


def permit_of(**changes: Any) -> Permit:
    fields: dict[str, Any] = {
        "model": "tiny",
        "selector": "query ratio=0.1",
        "data": "test",
        "prompts": 400,
        "f1": 0.9,
        "f1_full": 0.9,
        "f1_low": -0.005,
        "f1_high": 0.005,
        "exact_match": 0.8,
        "exact_match_full": 0.8,
        "kl": 0.01,
        "kl_high": 0.02,
        "kl_usual": 0.05,
        "max_f1_loss": 0.01,
        "max_kl": None,
        "granted": "2026-01-01T00:00:00+00:00",
        "version": "0.1.0",
    }
    return Permit(**fields | changes)


def grant(folder: Path, **changes: Any) -> Permit:
    permit = permit_of(**changes)
    Permits(folder).grant(permit)
    return permit
