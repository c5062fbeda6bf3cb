"""What the command and an engine's child process say to each other: one JSON object a line, `op`
from us, `reply` from it.

    {"op": "start", ...} -> {"reply": "started", ...}  {"op": "ask", ...}   -> {"reply": "answered",
    ...}
    {"op": "reset"}  -> {"reply": "done"}              {"op": "serve", ...} -> {"reply": "served", ...}
    {"op": "stop"}       -> {"reply": "done"}

Any of them may be answered by {"reply": "refused", ...}. A stopped engine's process lives on and
can start another engine.
"""

from typing import Any, Literal, TypeAlias

import msgspec

Stage = Literal["arrived", "waiting", "loading", "prefill", "decode", "preempted"]
STAGES: tuple[Stage, ...] = (
    "arrived",
    "waiting",
    "loading",
    "prefill",
    "decode",
    "preempted",
)  # of a request's life, in order


class _Operation(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="op", forbid_unknown_fields=True
):
    pass


class _Reply(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="reply", forbid_unknown_fields=True
):
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
    """Greedy decoding of questions that are handed over at once; an end-of-text token does not end
    it.

    choices: whether to tell between what tokens each was chosen; the engine must have been started
        with `logprobs_mode` "raw_logits"
    """

    questions: list[Question]
    max_tokens: int
    choices: bool = False


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of many that come and go.

    step:        of the engine, counted from the operation's begin, at which it arrives
    abort:       the stage in which it is aborted, or the next later one that it reaches; None: it is served to its end
    abort_after: so many steps later
    salt, rules: its `cache_salt`; what it says to kvhold in `kv_transfer_params`
    priority:    where the engine schedules by it; small numbers first
    """

    tokens: list[int]
    max_tokens: int
    step: int = 0
    abort: Stage | None = None
    abort_after: int = 0
    salt: str = ""
    rules: dict[str, Any] = {}
    priority: int = 0


class Serve(_Operation, frozen=True, kw_only=True, tag="serve"):
    """Greedy decoding of requests that arrive while others run. margins: whether to tell how sure
    the answers are.
    """

    arrivals: list[Arrival]
    margins: bool = False


class Reset(_Operation, frozen=True, kw_only=True, tag="reset"):
    """Have the engine forget its own cached KV; what a connector stored elsewhere stays."""


class Stop(_Operation, frozen=True, kw_only=True, tag="stop"):
    """Shut the engine down, connector included."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place in an answer: the token that was chosen there, the best of the others, and the logits
    of both.
    """

    tokens: tuple[int, int]
    logits: tuple[float, float]


class Started(_Reply, frozen=True, kw_only=True, tag="started"):
    """What vLLM made of the arguments.

    block_sizes: tokens a block, of each KV cache group (states: of a model's recurrent layers,
        whose block is no bound of prompts)
    num_blocks:  in all; all groups take from them
    token_bytes: KV of one token in all layers and workers
    vocabulary:  token ids that text is made of
    takes_images: whether questions may have images
    dtype: of its arithmetic, such as "bfloat16"
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
    dtype: str


class Answered(_Reply, frozen=True, kw_only=True, tag="answered"):
    """Each question's output, in their order; how often a request was preempted.

    cached:  prompt tokens that were not computed
    choices: of each token; empty unless asked for
    num_passes: steps of the engine that gave a token, or several where drafts were right
    """

    token_ids: list[list[int]]
    cached: list[int]
    num_preemptions: int
    num_passes: int = 0
    choices: list[list[Choice]] = []


class Served(_Reply, frozen=True, kw_only=True, tag="served"):
    """Each arrival's, in their order.

    token_ids:  its output, or what there was of it when it was aborted
    ends:       vLLM's `finish_reason` ("length" is the good one), or "abort"
    aborted_in: the stage in which it was aborted; "" otherwise
    margins:    of each token, by how much its logarithm of probability leads the next best one's;
        empty unless asked for
    names:      what the scheduler and its connector call it
    num_preemptions: of all together
    """

    token_ids: list[list[int]]
    ends: list[str]
    aborted_in: list[str]
    margins: list[list[float]]
    names: list[str]
    num_preemptions: int


class Done(_Reply, frozen=True, kw_only=True, tag="done"):
    """It was done."""


class Refused(_Reply, frozen=True, kw_only=True, tag="refused"):
    """It was not. kind: the exception's; reason: what it says; by_kvhold: whether the connector
    refused this set-up.
    """

    kind: str
    reason: str
    by_kvhold: bool = False


Operation: TypeAlias = Start | Ask | Serve | Reset | Stop
Reply: TypeAlias = Started | Answered | Served | Done | Refused
