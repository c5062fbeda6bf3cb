"""A small LLM engine: vLLM's own scheduler and KV cache manager, kvhold's own connector, and models
in plain torch.

    engine = MiniEngine("llama", connector={"node": {"socket": "/run/kvhold.sock"}}, num_blocks=64)
    engine.add("a", prompt, max_tokens=8)
    engine.run()                    # {"a": [17, 4, ...]}
    engine.first_token_s["a"]       # seconds from `add` to the first token
    engine.close()

It serves real requests end to end where vLLM's compiled kernels are missing: on the CPU, and on a
GPU (`device="cuda"`) beside the Python files of vLLM's CPU build. `config.py` makes vLLM's
configuration and a model folder, `models.py` computes by `arithmetic.py`, `runner.py` stands for
vLLM's model runner, `calls.py` makes the connector's calls, `engine.py` stands for vLLM's engine
core. The arithmetic is exact, so a request has the same tokens and the same KV bytes in every
batch, however its prompt is cut, with kvhold and without it.

It leaves out sampling, LoRA, media, speculation, state models and several workers. One thread
drives it. Engines of one process take turns.
"""

from kvhold.lab.mini_engine.config import SHAPES, EngineOptions, ModelShape
from kvhold.lab.mini_engine.engine import MiniEngine

__all__ = ["SHAPES", "EngineOptions", "MiniEngine", "ModelShape"]
