"""A real vLLM engine, run in this process and stepped by hand.

    driver = VllmDriver(options)
    driver.generate(Generate(prompt_token_ids=[...], max_tokens=16))

Only for a child process (`kvhold.cli.demo.engine_child`): it sets environment variables that must be there before torch is
loaded, and a process holds one engine. vLLM runs eager and in float32: on CPUs compiling costs more than it gains here,
float32 is faster than bfloat16, and outputs can be compared token by token.
"""

import itertools
import os
import time
from typing import Any

from kvhold.cli.demo.messages import EngineOptions, Generate, Generated, GeneratedMany, GenerateMany, Ready

BATCHED_TOKENS = 2_048  # cold prefill of 4,000 tokens: pieces of 512 to 2,048 are alike, a single one takes a quarter longer
_WARM_UP_TOKENS = 16  # less than any block, so that neither vLLM nor a connector has a whole block to keep
_DRAIN_S = 60.0


class VllmDriver:
    """Meets `kvhold.cli.demo.engine_child.Driver`."""

    def __init__(self, options: EngineOptions) -> None:
        os.environ.update(environment_for(options.num_threads))
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        given: dict[str, Any] = {}
        if options.kv_transfer_config is not None:
            given["kv_transfer_config"] = KVTransferConfig(**options.kv_transfer_config)
        if options.block_size is not None:
            given["block_size"] = options.block_size
        arguments = EngineArgs(
            model=options.model_path,
            dtype="float32",
            enforce_eager=True,
            max_model_len=options.max_model_len,
            kv_cache_memory_bytes=options.kv_cache_bytes,
            enable_prefix_caching=options.prefix_caching,
            max_num_batched_tokens=options.max_num_batched_tokens or BATCHED_TOKENS,
            max_num_seqs=8,
            seed=0,
            disable_log_stats=True,
            **given,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._core: Any = self._engine.engine_core.engine_core  # in-process: the client holds the core itself
        self._request_ids = itertools.count()

    def ready(self) -> Ready:
        self.generate(Generate(prompt_token_ids=list(range(1, 1 + _WARM_UP_TOKENS)), max_tokens=2))
        cache_config = self._core.vllm_config.cache_config
        return Ready(tokens_per_block=cache_config.block_size, num_blocks=cache_config.num_gpu_blocks)

    def generate(self, request: Generate) -> Generated:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
        request_id = f"demo-{next(self._request_ids)}"
        began = time.perf_counter()
        self._engine.add_request(request_id, {"prompt_token_ids": request.prompt_token_ids}, params)
        ttft_s = None
        output: Any = None
        while self._engine.has_unfinished_requests():
            for output in self._step():
                if ttft_s is None and output.outputs and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - began
        total_s = time.perf_counter() - began
        self._drain()
        if ttft_s is None:
            raise RuntimeError(f"vLLM ended the request without a token: {output and output.outputs}")
        return Generated(
            ttft_s=ttft_s,
            total_s=total_s,
            token_ids=list(output.outputs[0].token_ids),
            num_cached_tokens=output.num_cached_tokens or 0,
        )

    def generate_many(self, request: GenerateMany) -> GeneratedMany:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
        names = [f"demo-{next(self._request_ids)}" for _ in request.prompts]
        for name, prompt in zip(names, request.prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        last: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            last.update((output.request_id, output) for output in self._step())
        self._drain()
        return GeneratedMany(
            token_ids=[list(last[name].outputs[0].token_ids) for name in names],
            num_cached_tokens=[last[name].num_cached_tokens or 0 for name in names],
        )

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _step(self) -> list[Any]:
        """One step. Where there was nothing to compute, as while KV is being loaded, wait a millisecond as vLLM's own loop does."""
        began = time.perf_counter()
        outputs: list[Any] = self._engine.step()
        if not outputs and time.perf_counter() - began < 0.002:  # a step that computes takes longer, even of the tiny model
            time.sleep(0.001)
        return outputs

    def _drain(self) -> None:
        """Step on until the scheduler has let go of what finished, as vLLM's own loop does: connectors save and free here."""
        deadline = time.monotonic() + _DRAIN_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM still holds finished requests after {_DRAIN_S:g} s: its connector has not let go of their blocks")
            self._step()


def environment_for(num_threads: int) -> dict[str, str]:
    """Variables for a vLLM process on CPUs: offline, quiet, all of `num_threads` used. They must be set before torch is loaded."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: starts in seconds, and can be stepped by hand
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM keeps one core back
        "OMP_NUM_THREADS": str(num_threads),
    }
