from kvhold.integrations.transformers.marked import Blend
from kvhold.integrations.transformers.reuse import Reuse, ReuseResult

__all__ = ["Blend", "Reuse", "ReuseResult"]
