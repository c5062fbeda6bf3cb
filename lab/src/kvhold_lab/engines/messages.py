import os
from typing import Any, Literal, TypeAlias

import msgspec

from kvhold_lab.engines.protocol import (
    ChildOperation,
    ChildReply,
    ResetPrefixCache,
    StopEngine,
)

DriverName = Literal["vllm", "transformers"]


class EngineOptions(ChildOperation, frozen=True, kw_only=True, tag="start"):
    """None: the driver chooses."""

    model_path: str
    max_model_len: int
    kv_cache_bytes: int
    driver: DriverName = "vllm"
    kv_transfer_config: dict[str, Any] | None = (
        None  # for vLLM's --kv-transfer-config; None: no connector
    )
    prefix_caching: bool = True
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    dtype: str = "float32"
    load_format: str = "auto"
    num_threads: int = msgspec.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    own_binding: bool = False


class Generate(ChildOperation, frozen=True, kw_only=True, tag="generate"):
    """Greedily, past any end-of-text token."""

    prompt_token_ids: list[int]
    max_tokens: int
    rules: dict[str, Any] = msgspec.field(default_factory=dict)
    first_logprobs: bool = False


class GenerateMany(ChildOperation, frozen=True, kw_only=True, tag="generate_many"):
    prompts: list[list[int]]
    max_tokens: int
    rules: dict[str, Any] = msgspec.field(default_factory=dict)


class CheckMemory(ChildOperation, frozen=True, kw_only=True, tag="check_memory"):
    """-> MemoryChecked"""

    enabled: bool


class MemoryChecked(ChildReply, frozen=True, kw_only=True, tag="memory_checked"):
    clients: int


class Ready(ChildReply, frozen=True, kw_only=True, tag="ready"):
    tokens_per_block: int
    num_blocks: int


class Generated(ChildReply, frozen=True, kw_only=True, tag="generated"):
    # to the end of the step with the first token
    ttft_s: float
    total_s: float
    token_ids: list[int]
    num_cached_tokens: int
    first_logprobs: list[float] = msgspec.field(default_factory=list)
    kv_transfer_params: dict[str, Any] = msgspec.field(default_factory=dict)


class GeneratedMany(ChildReply, frozen=True, kw_only=True, tag="generated_many"):
    token_ids: list[list[int]]
    num_cached_tokens: list[int]


Operation: TypeAlias = (
    EngineOptions | Generate | GenerateMany | CheckMemory | ResetPrefixCache | StopEngine
)
