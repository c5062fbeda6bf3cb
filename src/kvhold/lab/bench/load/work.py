"""What is sent and what comes back: values only.

A workload is a few phases after each other. A phase is a stream of sessions. A session is a
generator that yields a request, is sent the reply, and may make its next request of it, as a
conversation does:

    def session() -> Session:
        reply = yield Request("round 1", (Turn("user", question),), max_tokens=100)
        yield Request("round 2", (Turn("user", question), Turn("assistant", reply.content),
        Turn("user", more)), max_tokens=100)

Sessions are made when their turn comes, so a workload of any length takes little memory. No clock
and no I/O is in here.
"""

from array import array
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from kvhold.lab.bench.load.prompts import Content, Prompts

COLD, WARM = "cold", "warm"
"""Groups of requests that gains are computed from: first sight of a text, and the same text again.
"""


@dataclass(frozen=True)
class Turn:
    """A part of a prompt.

    Chat sends it as a message; completions send all parts joined, without the roles.
    """

    role: Literal["system", "user", "assistant"]
    content: Content


@dataclass(frozen=True)
class Request:
    """One request.

    group: requests of one group are summed up together
    at_s: when it arrives, in seconds from the phase's start; None: as soon as there is room
    labels: what tells it from others in its group, for the JSON lines
    needs_content: whether the session goes on with the answer
    score: what the answer's text is worth, 0 to 1, where that is known
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
    """What became of a request; times in seconds from sending it.

    error: its kind, such as "http 503"; None if all is well. detail: the error in the server's or
        the library's own words
    gaps_s: between what arrived with tokens in it; mostly a token at a time
    input_tokens, cached_tokens: by the server's account; None if it gives none. cached: prompt
        tokens that were not computed
    content: the answer, as text or token ids, whichever the prompt was made of
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
    """A request with its reply, without the texts.

    started_s: when it was sent, from the run's start; late_s: how much later than it arrived, None
        where it had no time of arrival
    """

    group: str
    labels: Mapping[str, int | str]
    started_s: float
    late_s: float | None
    reply: Reply
    score: float | None = None


Session: TypeAlias = Generator[Request, Reply, None]


@dataclass(frozen=True)
class Phase:
    """Sessions that run beside each other.

    max_in_flight: how many sessions at a time; None: all that have arrived
    total: how many requests there will be, where it is known
    pause_s: how long nothing is done before it
    """

    name: str
    sessions: Iterable[Session]
    max_in_flight: int | None = None
    total: int | None = None
    pause_s: float = 0.0


class Workload(Protocol):
    """Requests to be made, decided by its arguments alone: the same arguments give the same
    requests.
    """

    def phases(self, prompts: Prompts) -> Iterable[Phase]:
        """The phases in their order. Raises ConfigError if the arguments contradict each other."""


def single(request: Request) -> Session:
    """A session of one request."""
    yield request
