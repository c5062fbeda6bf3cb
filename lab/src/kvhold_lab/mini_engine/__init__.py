"""A small LLM engine: vLLM's scheduler and KV cache manager, kvhold's connector, and torch models.

A request has the same tokens and KV bytes in every batch. One worker, one thread.
"""

from kvhold_lab.mini_engine.config import SHAPES, MiniEngineOptions, ModelShape
from kvhold_lab.mini_engine.engine import MiniEngine

__all__ = ["SHAPES", "MiniEngine", "MiniEngineOptions", "ModelShape"]
