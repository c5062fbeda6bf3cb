from typing import Any, Literal, TypeAlias

import msgspec

from kvhold_lab.engines.protocol import (
    ChildOperation,
    ChildReply,
    ResetPrefixCache,
    StopEngine,
)

Stage = Literal["arrived", "waiting", "loading", "prefill", "decode", "preempted"]
STAGES: tuple[Stage, ...] = (
    "arrived",
    "waiting",
    "loading",
    "prefill",
    "decode",
    "preempted",
)


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """tokens: the prompt, or the text after its images; images: seeds"""

    tokens: list[int]
    adapter: int | None = None
    images: list[int] = []


class Start(ChildOperation, frozen=True, kw_only=True, tag="start"):
    engine: dict[str, Any]
    adapters: list[str] = msgspec.field(default_factory=list)


class Ask(ChildOperation, frozen=True, kw_only=True, tag="ask"):
    """Greedily, past any end-of-text token.

    choices: report the two best logits of each token; needs `logprobs_mode` "raw_logits"
    """

    questions: list[Question]
    max_tokens: int
    choices: bool = False


class VerifyArrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request that arrives at engine step `step`.

    abort:       at this stage, or the next reached
    abort_after: steps to wait after that stage
    rules:       `kv_transfer_params` for kvhold
    """

    tokens: list[int]
    max_tokens: int
    step: int = 0
    abort: Stage | None = None
    abort_after: int = 0
    salt: str = ""
    rules: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: int = 0


class Serve(ChildOperation, frozen=True, kw_only=True, tag="serve"):
    arrivals: list[VerifyArrival]
    margins: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: tuple[int, int]
    logits: tuple[float, float]


class Started(ChildReply, frozen=True, kw_only=True, tag="started"):
    """block_sizes: tokens, by KV cache group
    token_bytes: KV of one token in all layers and workers
    """

    block_sizes: list[int]
    num_blocks: int
    token_bytes: int
    vocabulary: list[int]
    takes_images: bool
    prefix_caching: bool
    chunked_prefill: bool
    async_scheduling: bool
    cuda_graphs: bool
    max_num_batched_tokens: int
    dtype: str


class Answered(ChildReply, frozen=True, kw_only=True, tag="answered"):
    """cached: prompt tokens not computed; num_passes: steps with output"""

    token_ids: list[list[int]]
    cached: list[int]
    num_preemptions: int
    num_passes: int = 0
    choices: list[list[Choice]] = msgspec.field(default_factory=list)


class VerifyServed(ChildReply, frozen=True, kw_only=True, tag="served"):
    """ends:       vLLM's `finish_reason` (normally "length"), or "abort"
    aborted_in: the stage, or ""
    margins:    each token's lead over the next best, in natural log probability
    """

    token_ids: list[list[int]]
    ends: list[str]
    aborted_in: list[str]
    margins: list[list[float]]
    names: list[str]
    num_preemptions: int


Operation: TypeAlias = Start | Ask | Serve | ResetPrefixCache | StopEngine
