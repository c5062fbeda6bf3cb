"""kvhold with Hugging Face transformers (docs/transformers.md)."""

from kvhold.integrations.transformers.reuse import Reuse, ReuseResult

__all__ = ["Reuse", "ReuseResult"]
