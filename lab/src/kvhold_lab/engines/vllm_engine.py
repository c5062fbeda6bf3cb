"""One vLLM engine a process, stepped by hand."""

import os
import time
from typing import Any

from kvhold_lab.engines.messages import (
    EngineOptions,
    Generate,
    Generated,
    GeneratedMany,
    GenerateMany,
    Ready,
)
from kvhold_lab.engines.stepped import SteppedEngine, environment_for

# for a cold prefill of 4,000 tokens, faster than one piece
BATCHED_TOKENS = 2_048
_WARM_UP_TOKENS = 16  # too short to be cached


class VllmDriver:
    def __init__(self, options: EngineOptions) -> None:
        os.environ.update(environment_for(options.num_threads))
        given: dict[str, Any] = (
            {"block_size": options.block_size} if options.block_size is not None else {}
        )
        self._engine = SteppedEngine(
            {
                "model": options.model_path,
                "dtype": options.dtype,
                "load_format": options.load_format,
                "enforce_eager": True,
                "max_model_len": options.max_model_len,
                "kv_cache_memory_bytes": options.kv_cache_bytes,
                "enable_prefix_caching": options.prefix_caching,
                "max_num_batched_tokens": options.max_num_batched_tokens or BATCHED_TOKENS,
                "max_num_seqs": 8,
                "max_logprobs": -1,
                "seed": 0,
                "kv_transfer_config": options.kv_transfer_config,
                **given,
            }
        )

    def ready(self) -> Ready:
        self.generate(Generate(prompt_token_ids=list(range(1, 1 + _WARM_UP_TOKENS)), max_tokens=2))
        cache_config = self._engine.config.cache_config
        return Ready(
            tokens_per_block=cache_config.block_size, num_blocks=cache_config.num_gpu_blocks
        )

    def generate(self, request: Generate) -> Generated:
        began = time.perf_counter()
        self._engine.add(
            {"prompt_token_ids": request.prompt_token_ids},
            max_tokens=request.max_tokens,
            extra=_extra(request),
            logprobs=-1 if request.first_logprobs else None,
        )
        ttft_s = None
        output: Any = None
        while self._engine.is_busy():
            for output in self._engine.step():
                if ttft_s is None and output.outputs and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - began
        total_s = time.perf_counter() - began
        self._engine.drain()
        if ttft_s is None:
            raise RuntimeError(
                f"vLLM ended the request without a token: {output and output.outputs}"
            )
        return Generated(
            ttft_s=ttft_s,
            total_s=total_s,
            token_ids=list(output.outputs[0].token_ids),
            num_cached_tokens=output.num_cached_tokens or 0,
            first_logprobs=_in_order(output.outputs[0].logprobs[0])
            if request.first_logprobs
            else [],
            kv_transfer_params=output.kv_transfer_params or {},
        )

    def generate_many(self, request: GenerateMany) -> GeneratedMany:
        extra = _extra(request)
        names = [
            self._engine.add(
                {"prompt_token_ids": prompt}, max_tokens=request.max_tokens, extra=extra
            )
            for prompt in request.prompts
        ]
        last: dict[str, Any] = {}
        while self._engine.is_busy():
            last.update((output.request_id, output) for output in self._engine.step())
        self._engine.drain()
        return GeneratedMany(
            token_ids=[list(last[name].outputs[0].token_ids) for name in names],
            num_cached_tokens=[last[name].num_cached_tokens or 0 for name in names],
        )

    def reset_prefix_cache(self) -> bool:
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        self._engine.close()


def _in_order(logprobs: dict[int, Any]) -> list[float]:
    return [logprobs[token].logprob for token in sorted(logprobs)]


def _extra(request: Generate | GenerateMany) -> dict[str, Any] | None:
    return {"kv_transfer_params": {"kvhold": request.rules}} if request.rules else None
