"""A workload yields phases, a phase sessions. A session yields requests and receives replies."""

from array import array
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from kvhold_lab.bench.load.prompts import Content, Prompts

COLD, WARM = "cold", "warm"
"""Groups of requests that gains are computed from: first sight of a text, and the same text again.
"""


@dataclass(frozen=True)
class Turn:
    role: Literal["system", "user", "assistant"]
    content: Content


@dataclass(frozen=True)
class Request:
    """at_s:  arrival, from the phase's start; None: when the phase's limit allows it
    score: rates the answer's text, 0 to 1
    """

    group: str
    turns: tuple[Turn, ...]
    max_tokens: int
    at_s: float | None = None
    labels: Mapping[str, int | str] = field(default_factory=dict)
    needs_content: bool = False
    score: Callable[[str], float] | None = None


@dataclass(frozen=True)
class Reply:
    """Times are in seconds from sending.

    gaps_s: between tokens
    content: like the prompt
    """

    latency_s: float
    ttft_s: float | None = None
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    input_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    content: Content = ""
    text: str = ""
    error: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Result:
    group: str
    labels: Mapping[str, int | str]
    started_s: float
    late_s: float | None
    reply: Reply
    score: float | None = None


Session: TypeAlias = Generator[Request, Reply, None]


@dataclass(frozen=True)
class Phase:
    """max_in_flight: None: no limit but arrivals"""

    name: str
    sessions: Iterable[Session]
    max_in_flight: int | None = None
    total: int | None = None
    pause_s: float = 0.0


class Workload(Protocol):
    def phases(self, prompts: Prompts) -> Iterable[Phase]:
        """Raises ConfigError."""


def single(request: Request) -> Session:
    yield request
