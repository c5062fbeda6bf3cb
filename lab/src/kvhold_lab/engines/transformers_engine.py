"""transformers with kvhold's reuse."""

import time
from typing import TYPE_CHECKING, Any

from kvhold.core.config import load_config
from kvhold.node import connect
from kvhold_lab.engines.messages import (
    EngineOptions,
    Generate,
    Generated,
    GeneratedMany,
    GenerateMany,
    Ready,
)

if TYPE_CHECKING:
    import torch

_WARM_UP_TOKENS = 16


class TransformersDriver:
    def __init__(self, options: EngineOptions) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from kvhold.integrations.transformers import Reuse

        torch.set_num_threads(options.num_threads)
        self._torch = torch
        model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32)
        self._reuse: Reuse | None = None
        if options.kv_transfer_config is not None:
            config = load_config(options.kv_transfer_config["kv_connector_extra_config"])
            self._cache = connect(config, name="transformers")
            self._reuse = Reuse(model, self._cache, config=config)
        self._generate: Any = self._reuse.generate if self._reuse is not None else model.generate

    def ready(self) -> Ready:
        self.generate(Generate(prompt_token_ids=list(range(1, 1 + _WARM_UP_TOKENS)), max_tokens=2))
        return Ready(tokens_per_block=1, num_blocks=0)

    def generate(self, request: Generate) -> Generated:
        first_token = _FirstToken()
        began = time.perf_counter()
        output = self._run(request.prompt_token_ids, request.max_tokens, streamer=first_token)
        total_s = time.perf_counter() - began
        assert first_token.at is not None
        return Generated(
            ttft_s=first_token.at - began,
            total_s=total_s,
            token_ids=output,
            num_cached_tokens=self._reuse.last.num_loaded if self._reuse is not None else 0,
        )

    def generate_many(self, request: GenerateMany) -> GeneratedMany:
        answers = [
            self.generate(Generate(prompt_token_ids=prompt, max_tokens=request.max_tokens))
            for prompt in request.prompts
        ]
        return GeneratedMany(
            token_ids=[a.token_ids for a in answers],
            num_cached_tokens=[a.num_cached_tokens for a in answers],
        )

    def reset_prefix_cache(self) -> bool:
        return True

    def close(self) -> None:
        if self._reuse is not None:
            self._cache.close()

    def _run(self, prompt: list[int], max_tokens: int, streamer: "_FirstToken") -> list[int]:
        sequences: torch.Tensor = self._generate(
            self._torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            streamer=streamer,
        )
        tokens: list[int] = sequences[0, len(prompt) :].tolist()
        return tokens


class _FirstToken:
    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt_seen = False

    def put(self, value: "torch.Tensor") -> None:
        if self._prompt_seen and self.at is None:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None: ...
