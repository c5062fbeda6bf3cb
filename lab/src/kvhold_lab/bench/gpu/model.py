"""`Reuse` in transformers: loaded KV bytes, and TTFT."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from kvhold import open_cache
from kvhold.integrations.transformers import Reuse
from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target

PART = "model"
_ROUNDS = 5
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def rows(target: Target) -> Iterator[GpuRow]:
    model = _model(target)
    for num_tokens in (600,) if target.small else (2048, 8192):
        yield from _of_length(target, model, num_tokens)


def _model(target: Target) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if target.small else torch.bfloat16)
    try:
        with torch.device(target.device):
            model = LlamaForCausalLM(LlamaConfig(**(_TINY if target.small else _LLAMA_8B)))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def _of_length(target: Target, model: Any, num_tokens: int) -> Iterator[GpuRow]:
    with open_cache(ram_bytes="64MiB" if target.small else "4GiB") as cache:
        reuse = Reuse(model, cache, model_id="bench")
        alone: list[float] = []
        storing: list[float] = []
        loading: list[float] = []
        loaded, equal = 0, True
        for _ in range(1 + _ROUNDS):
            prompt = torch.randint(10, 500, (1, num_tokens)).to(target.device)
            taken_s, _ = _timed(target, model.generate, prompt)
            alone.append(taken_s)
            taken_s, stored = _timed(target, reuse.generate, prompt)
            storing.append(taken_s)
            taken_s, found = _timed(target, reuse.generate, prompt)
            loading.append(taken_s)
            loaded += reuse.last.num_loaded
            equal = equal and _equal(stored, found, reuse.last.num_loaded)
    title = f"{num_tokens} tokens"
    yield check(
        PART,
        f"{title}: all but the last were loaded",
        loaded == (1 + _ROUNDS) * (num_tokens - 1),
        loaded,
    )
    yield check(PART, f"{title}: KV bytes after loading", equal, 1 + _ROUNDS)
    cold = 1e3 * median(alone[1:])
    for name, times in (("when it stores", storing), ("of a hit", loading)):
        taken = 1e3 * median(times[1:])
        yield GpuRow(
            PART,
            f"{title}: time to the first token {name}",
            round(taken, 2),
            "ms",
            round(cold, 2),
            round(taken / cold, 3),
        )


def _timed(target: Target, generate: Callable[..., Any], prompt: torch.Tensor) -> tuple[float, Any]:
    target.synchronize()
    began_s = time.perf_counter()
    output = generate(prompt, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    target.synchronize()
    return time.perf_counter() - began_s, output.past_key_values


def _equal(stored: Any, found: Any, num_tokens: int) -> bool:
    return num_tokens > 0 and all(
        torch.equal(getattr(one, name)[:, :, :num_tokens], getattr(other, name)[:, :, :num_tokens])
        for one, other in zip(stored.layers, found.layers, strict=True)
        for name in ("keys", "values")
    )
