from kvhold.integrations.transformers.reuse import Reuse, ReuseResult

__all__ = ["Reuse", "ReuseResult"]
