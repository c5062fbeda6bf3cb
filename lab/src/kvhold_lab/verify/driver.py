"""Only for `engine_child`, whose parent sets the environment."""

import gc
from typing import Any

from kvhold_lab.engines.prompts import corpus
from kvhold_lab.engines.stepped import SteppedEngine
from kvhold_lab.verify.messages import (
    Answered,
    Ask,
    Choice,
    Question,
    Serve,
    Start,
    Started,
    VerifyServed,
)
from kvhold_lab.verify.serving import serve

_collect = gc.collect
_VOCABULARY_TEXT = 20_000
_IMAGE_SIDE = 112  # pixels
_BEST = 2


class VerifyDriver:
    def __init__(self, options: Start) -> None:
        gc.collect = _collect_later
        self._adapters = options.adapters
        self._engine = SteppedEngine(options.engine)
        _keep_kernels()
        self._processor: Any = None

    def started(self) -> Started:
        kv_cache = self._engine.core.scheduler.kv_cache_config
        specs = [
            (group.kv_cache_spec, len(group.layer_names)) for group in kv_cache.kv_cache_groups
        ]
        scheduling, workers = (
            self._engine.config.scheduler_config,
            self._engine.config.parallel_config.world_size,
        )
        return Started(
            block_sizes=[spec.block_size for spec, _ in specs],
            num_blocks=kv_cache.num_blocks,
            token_bytes=workers
            * sum(-(-spec.page_size_bytes // spec.block_size) * layers for spec, layers in specs),
            vocabulary=self._vocabulary(),
            takes_images=bool(self._engine.config.model_config.is_multimodal_model),
            prefix_caching=bool(self._engine.config.cache_config.enable_prefix_caching),
            chunked_prefill=bool(scheduling.enable_chunked_prefill),
            async_scheduling=bool(scheduling.async_scheduling),
            cuda_graphs=bool(self._engine.config.compilation_config.cudagraph_mode.value),
            max_num_batched_tokens=scheduling.max_num_batched_tokens,
            dtype=str(self._engine.config.model_config.dtype).removeprefix("torch."),
        )

    def ask(self, operation: Ask) -> Answered:
        names = [
            self._engine.add(
                self._prompt(question),
                max_tokens=operation.max_tokens,
                lora=self._lora(question),
                logprobs=_BEST if operation.choices else None,
            )
            for question in operation.questions
        ]
        last: dict[str, Any] = {}
        preempted: dict[str, int] = {}
        num_passes = 0
        while self._engine.is_busy():
            outputs = self._engine.step()
            num_passes += bool(outputs)
            last.update((output.request_id, output) for output in outputs)
            preempted.update(
                (name, request.num_preemptions)
                for name, request in self._engine.core.scheduler.requests.items()
            )
        self._engine.drain()
        assert len(last) == len(names), f"{len(names)} questions, {len(last)} answers"
        return Answered(
            token_ids=[list(last[name].outputs[0].token_ids) for name in names],
            cached=[last[name].num_cached_tokens or 0 for name in names],
            num_preemptions=sum(preempted.values()),
            num_passes=num_passes,
            choices=[[_choice(best) for best in last[name].outputs[0].logprobs] for name in names]
            if operation.choices
            else [],
        )

    def serve(self, operation: Serve) -> VerifyServed:
        return serve(self._engine, operation)

    def reset(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache: it still holds blocks of finished requests"
            )

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.close()
        self._processor = None
        _collect()
        cleanup_dist_env_and_memory()

    def _prompt(self, question: Question) -> dict[str, Any]:
        if not question.images:
            return {"prompt_token_ids": question.tokens}
        if self._processor is None:
            from transformers import AutoProcessor

            self._processor = AutoProcessor.from_pretrained(
                self._engine.config.model_config.model, local_files_only=True
            )
        text = self._processor.tokenizer.decode(question.tokens)
        content = [{"type": "image"} for _ in question.images] + [{"type": "text", "text": text}]
        prompt = self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        images = [_image(seed) for seed in question.images]
        return {
            "prompt": prompt,
            "multi_modal_data": {"image": images if len(images) > 1 else images[0]},
        }

    def _lora(self, question: Question) -> Any:
        from vllm.lora.request import LoRARequest

        if question.adapter is None:
            return None
        return LoRARequest(
            f"adapter-{question.adapter}", 1 + question.adapter, self._adapters[question.adapter]
        )

    def _vocabulary(self) -> list[int]:
        tokenizer = self._engine.engine.get_tokenizer()
        if tokenizer is None:
            return list(range(self._engine.config.model_config.get_vocab_size()))
        ids = tokenizer.encode(corpus()[:_VOCABULARY_TEXT], add_special_tokens=False)
        return sorted(set(ids) - set(tokenizer.all_special_ids))


def _choice(best: dict[int, Any]) -> Choice:
    (chosen, first), *others = best.items()
    rival, second = max(others, key=lambda item: float(item[1].logprob))
    return Choice(tokens=(chosen, rival), logits=(first.logprob, second.logprob))


def _collect_later(generation: int = 2) -> int:
    """`gc.collect` took 88 % of a small engine's time."""
    return 0


def _keep_kernels() -> None:
    """Keep registered kernels for the next engine: vLLM's search of modules fails on llvmlite."""
    from vllm.platforms import current_platform

    current_platform.register_triton_kernel_overrides = lambda: None


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(
        0, 256, (_IMAGE_SIDE, _IMAGE_SIDE, 3), dtype=np.uint8
    )
    return Image.fromarray(pixels)
