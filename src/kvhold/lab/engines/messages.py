"""What the demo and an engine's child process say to each other: one JSON object a line, `op` from
us, `reply` from it.

    {"op": "start", "model_path": ...}                  -> {"reply": "ready", ...}
    {"op": "generate", "prompt_token_ids": [...], ...}  -> {"reply": "generated", "ttft_s": ...,
    ...}
    {"op": "reset_prefix_cache"}                        -> {"reply": "reset", "done": true}
    {"op": "stop"}                                      -> {"reply": "stopped"}

Any of them may be answered by {"reply": "refused", "reason": ...}; the engine then goes on, but
after a refused start it ends. The same messages drive every kind of engine. Values only:
`kvhold.lab.engines.engine` is our side of the pipes.
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
    """How to start an engine. `None` leaves a choice to the driver, which knows what is fast."""

    model_path: str
    max_model_len: int  # tokens of the longest prompt with its output
    kv_cache_bytes: int  # the engine's own KV memory; at least max_model_len tokens must fit
    driver: DriverName = "vllm"
    kv_transfer_config: dict[str, Any] | None = (
        None  # as vLLM's --kv-transfer-config takes it; None runs without a connector
    )
    prefix_caching: bool = True  # the engine's own, in its own KV memory
    max_num_batched_tokens: int | None = (
        None  # the most tokens of one step: longer prompts are prefilled in pieces of it
    )
    block_size: int | None = None  # tokens a block
    num_threads: int = msgspec.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    own_binding: bool = (
        False  # its threads are bound to a core each, as vLLM does for a user (vLLM only)
    )


class Generate(_Operation, frozen=True, kw_only=True, tag="generate"):
    """Greedy decoding of one prompt; an end-of-text token does not end it."""

    prompt_token_ids: list[int]
    max_tokens: int
    rules: dict[str, Any] = {}  # what the request says to kvhold, as in `kv_transfer_params`
    first_logprobs: bool = False  # whether the answer is to have them (vLLM only)


class GenerateMany(_Operation, frozen=True, kw_only=True, tag="generate_many"):
    """Greedy decoding of prompts that are handed to the engine at once; it runs as many of them
    together as it can.
    """

    prompts: list[list[int]]
    max_tokens: int
    rules: dict[str, Any] = {}


class ResetPrefixCache(_Operation, frozen=True, kw_only=True, tag="reset_prefix_cache"):
    """Forget the engine's own cached KV; what a connector stored elsewhere stays."""


class Stop(_Operation, frozen=True, kw_only=True, tag="stop"):
    """Shut down in order, connector included."""


class Ready(_Reply, frozen=True, kw_only=True, tag="ready"):
    """Started and warmed up: the first request will not pay for first uses."""

    tokens_per_block: int
    num_blocks: int


class Generated(_Reply, frozen=True, kw_only=True, tag="generated"):
    """One prompt's output and its times, taken in the engine's process with no
    transport in them.
    """

    # from handing the prompt to the engine to the end of the step that made its first token
    ttft_s: float
    total_s: float
    token_ids: list[int]
    # prompt tokens not computed: found in the engine's own prefix cache or loaded by the connector
    num_cached_tokens: int
    first_logprobs: list[float] = []  # of the first token, of all of the vocabulary in its order


class GeneratedMany(_Reply, frozen=True, kw_only=True, tag="generated_many"):
    """Each prompt's output, in the prompts' order, and how many of its tokens were not computed."""

    token_ids: list[list[int]]
    num_cached_tokens: list[int]


class Reset(_Reply, frozen=True, kw_only=True, tag="reset"):
    """`done` is false if running requests kept the engine from it."""

    done: bool


class Stopped(_Reply, frozen=True, kw_only=True, tag="stopped"):
    """The last line of an engine."""


class Refused(_Reply, frozen=True, kw_only=True, tag="refused"):
    """The operation was not done. The engine's log holds the traceback."""

    reason: str


Operation: TypeAlias = EngineOptions | Generate | GenerateMany | ResetPrefixCache | Stop
Reply: TypeAlias = Ready | Generated | GeneratedMany | Reset | Stopped | Refused
