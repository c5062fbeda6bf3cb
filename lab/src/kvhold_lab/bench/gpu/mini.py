"""The mini engine: equal tokens and KV without kvhold, storing, and loading."""

import random
from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any

from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target
from kvhold_lab.bench.servers import running_node

PART = "mini"
_PROMPTS, _TOKENS, _ANSWER, _VOCAB = 20, 112, 4, 200


def rows(target: Target) -> Iterator[GpuRow]:
    if find_spec("vllm") is None:
        yield GpuRow(PART, "not run: vLLM's Python files are not here", 0, "")
        return
    from kvhold_lab.mini_engine import SHAPES

    for model in SHAPES:
        yield from _of_model(target, model)


def _of_model(target: Target, model: str) -> Iterator[GpuRow]:
    rng = random.Random(model)
    prompts = [[rng.randrange(_VOCAB) for _ in range(_TOKENS)] for _ in range(_PROMPTS)]
    with running_node(ram_bytes=64 << 20) as client:
        settings = {
            "tokens_per_chunk": 32,
            "node": {"socket": str(client.path), "autostart": False},
            "rules": {"plan": False},
        }
        alone = _serve(target, model, prompts, None)
        stored = _serve(target, model, prompts, settings)
        loaded = _serve(target, model, prompts, settings)
    yield check(
        PART,
        f"{model}: tokens and KV bytes while storing",
        stored.answers == alone.answers,
        _PROMPTS,
    )
    yield check(
        PART,
        f"{model}: tokens and KV bytes after loading",
        loaded.answers == alone.answers,
        _PROMPTS,
    )
    yield check(
        PART,
        f"{model}: prompts were loaded, not computed",
        loaded.loaded_tokens >= _PROMPTS * 64,
        loaded.loaded_tokens,
    )
    cold, hit = 1e3 * median(alone.first_token_s), 1e3 * median(loaded.first_token_s)
    yield GpuRow(
        PART,
        f"{model}: time to the first token of a hit",
        round(hit, 2),
        "ms",
        round(cold, 2),
        round(hit / cold, 3),
    )


class _Served:
    def __init__(self, engine: Any) -> None:
        self.answers = {
            name: (tokens, engine.kv_digests[name]) for name, tokens in engine.outputs.items()
        }
        self.first_token_s = list(engine.first_token_s.values())
        self.loaded_tokens: int = engine.counts.loaded_tokens


def _serve(
    target: Target, model: str, prompts: list[list[int]], settings: dict[str, Any] | None
) -> _Served:
    from kvhold_lab.mini_engine import MiniEngine

    engine = MiniEngine(
        model,
        connector=settings,
        device=target.device.type,
        num_blocks=200,
        prefix_caching=False,
        keep_digests=True,
    )
    try:
        for number, prompt in enumerate(prompts):
            engine.add(str(number), prompt, _ANSWER)
            engine.run()
        return _Served(engine)
    finally:
        engine.close()
