"""Messages between the demo and an engine's child process: one JSON object a line.

A refused start ends the engine.
"""

import os
from typing import Any, Literal, TypeAlias

import msgspec

DriverName = Literal["vllm", "transformers"]


class _Operation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True
):
    pass


class _Reply(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", forbid_unknown_fields=True
):
    pass


class EngineOptions(_Operation, frozen=True, kw_only=True, tag="start"):
    """How to start; None leaves a choice to the driver."""

    model_path: str
    max_model_len: int  # prompt and output
    kv_cache_bytes: int
    driver: DriverName = "vllm"
    kv_transfer_config: dict[str, Any] | None = (
        None  # as for vLLM's --kv-transfer-config; None: no connector
    )
    prefix_caching: bool = True
    max_num_batched_tokens: int | None = None  # of one step
    block_size: int | None = None
    num_threads: int = msgspec.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    own_binding: bool = False  # bind each thread to a core (vLLM only)


class Generate(_Operation, frozen=True, kw_only=True, tag="generate"):
    """Decode one prompt greedily, past any end-of-text token."""

    prompt_token_ids: list[int]
    max_tokens: int
    rules: dict[str, Any] = {}
    first_logprobs: bool = False  # vLLM only


class GenerateMany(_Operation, frozen=True, kw_only=True, tag="generate_many"):
    """Decode prompts greedily, together."""

    prompts: list[list[int]]
    max_tokens: int
    rules: dict[str, Any] = {}


class ResetPrefixCache(_Operation, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Clear the engine's own KV; the connector's stays."""


class EngineStop(_Operation, frozen=True, kw_only=True, tag="stop"):
    """Shut down in order, connector included."""


class Ready(_Reply, frozen=True, kw_only=True, tag="ready"):
    """Started and warmed up."""

    tokens_per_block: int
    num_blocks: int


class Generated(_Reply, frozen=True, kw_only=True, tag="generated"):
    """One output. Times are taken in the engine's process, without transport."""

    # to the end of the step that made the first token
    ttft_s: float
    total_s: float
    token_ids: list[int]
    num_cached_tokens: int
    first_logprobs: list[float] = []  # for the whole vocabulary, in order


class GeneratedMany(_Reply, frozen=True, kw_only=True, tag="generated_many"):
    token_ids: list[list[int]]
    num_cached_tokens: list[int]


class Reset(_Reply, frozen=True, kw_only=True, tag="reset"):
    """done: False if running requests prevented it."""

    done: bool


class Stopped(_Reply, frozen=True, kw_only=True, tag="stopped"):
    """The engine's last message."""


class EngineRefusal(_Reply, frozen=True, kw_only=True, tag="refused"):
    """Failure. The traceback is in the engine's log."""

    reason: str


Operation: TypeAlias = EngineOptions | Generate | GenerateMany | ResetPrefixCache | EngineStop
Reply: TypeAlias = Ready | Generated | GeneratedMany | Reset | Stopped | EngineRefusal
