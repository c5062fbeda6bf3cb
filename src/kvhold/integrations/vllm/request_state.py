from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhold.core.api import Hit
from kvhold.core.holdings import Holding
from kvhold.core.keys import Prompt
from kvhold.core.rules import RequestRules
from kvhold.core.tracing import TraceContext
from kvhold.integrations.vllm.blending.requests import BlendRequest
from kvhold.integrations.vllm.handovers import WHOLE_REQUEST, HandoverPart
from kvhold.integrations.vllm.stats import NO_ANSWER
from kvhold.integrations.vllm.tracing import RequestTrace
from kvhold.integrations.vllm.tracker import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestState:
    """naming: None: not cached
    arriving: the hit that `lookup` refreshes
    asked_s, since_s: the last and the first call for this hit, without a wait for another engine
    first_asked_s: the same, with this wait
    ask_again_s: the next call during this wait
    tried: `num_preemptions` at the last lookup; None: look up. Each start tries one load
    pending_steps: steps that the tracker does not know yet
    no_hit: the reason of a miss if the cache gave none
    announcement: that this engine computes missing chunks
    blend: None: it is served without blend
    is_end_zeroed: the prompt's last block has no other request's KV behind the prompt's end
    """

    request: "Request"
    rules: RequestRules
    part: HandoverPart = WHOLE_REQUEST
    naming: "Future[Prompt | None] | None" = None
    tracker: RequestTracker | None = None
    lookup: "Future[Hit | None] | None" = None
    arriving: Hit | None = None
    patience_s: float = 0.0
    asked_s: float = 0.0
    since_s: float = 0.0
    first_asked_s: float = 0.0
    ask_again_s: float = 0.0
    hit: Hit | None = None
    first_token: int = 0
    loading: bool = False
    tried: int | None = None
    pending_steps: "list[Scheduled]" = field(default_factory=list)
    ask: "Callable[[], Hit | None] | None" = None
    is_lost: bool = False
    computed_tokens: int = 0
    compute_s: float = 0.0
    no_hit: str = NO_ANSWER
    announcement: Holding | None = None
    trace: RequestTrace | None = None
    blend: BlendRequest | None = None
    is_end_zeroed: bool = False

    @property
    def is_private(self) -> bool:
        """Its KV is not exact, and never stored."""
        return self.blend is not None and self.blend.is_private

    @property
    def trace_context(self) -> TraceContext:
        return self.trace.context if self.trace is not None else ""


@dataclass(frozen=True)
class Scheduled:
    num_tokens: int
    computed_tokens: int
    starts: bool
