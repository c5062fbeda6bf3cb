"""What the command and an engine's child process say to each other: one JSON object a line, `op` from us, `reply` from it.

    {"op": "start", ...} -> {"reply": "started", ...}      {"op": "ask", ...} -> {"reply": "answered", ...}
    {"op": "reset"}      -> {"reply": "done"}              {"op": "stop"}     -> {"reply": "done"}

Any of them may be answered by {"reply": "refused", ...}. A stopped engine's process lives on and can start another engine.
"""

from typing import Any, TypeAlias

import msgspec


class _Operation(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True):
    pass


class _Reply(msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", forbid_unknown_fields=True):
    pass


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request.

    tokens:  the prompt, or what follows the images in it
    adapter: number of the LoRA adapter in `Start.adapters`; None is the model itself
    images:  seeds of images to look at; each seed is another image
    """

    tokens: list[int]
    adapter: int | None = None
    images: list[int] = []


class Start(_Operation, frozen=True, kw_only=True, tag="start"):
    """Start an engine. engine: vLLM's engine arguments; adapters: folders of LoRA adapters."""

    engine: dict[str, Any]
    adapters: list[str] = []


class Ask(_Operation, frozen=True, kw_only=True, tag="ask"):
    """Greedy decoding of questions that are handed over at once; an end-of-text token does not end it."""

    questions: list[Question]
    max_tokens: int


class Reset(_Operation, frozen=True, kw_only=True, tag="reset"):
    """Have the engine forget its own cached KV; what a connector stored elsewhere stays."""


class Stop(_Operation, frozen=True, kw_only=True, tag="stop"):
    """Shut the engine down, connector included."""


class Started(_Reply, frozen=True, kw_only=True, tag="started"):
    """What vLLM made of the arguments.

    block_sizes: tokens a block, of each KV cache group (states: of a model's recurrent layers, whose block is no bound of prompts)
    num_blocks:  in all; all groups take from them
    token_bytes: KV of one token in all layers and workers
    vocabulary:  token ids that text is made of
    takes_images: whether questions may have images
    """

    block_sizes: list[int]
    num_blocks: int
    token_bytes: int
    vocabulary: list[int]
    takes_images: bool
    prefix_caching: bool
    chunked_prefill: bool
    async_scheduling: bool
    max_num_batched_tokens: int


class Answered(_Reply, frozen=True, kw_only=True, tag="answered"):
    """Each question's output, in their order; how often a request was preempted; cached: prompt tokens that were not computed."""

    token_ids: list[list[int]]
    cached: list[int]
    num_preemptions: int


class Done(_Reply, frozen=True, kw_only=True, tag="done"):
    """It was done."""


class Refused(_Reply, frozen=True, kw_only=True, tag="refused"):
    """It was not. kind: the exception's; reason: what it says; by_kvhold: whether the connector refused this set-up."""

    kind: str
    reason: str
    by_kvhold: bool = False


Operation: TypeAlias = Start | Ask | Reset | Stop
Reply: TypeAlias = Started | Answered | Done | Refused
