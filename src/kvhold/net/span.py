"""Between an engine's scheduler and a relay, a worker on another host.

After LoginHello and RelayWelcome (`login.py`), requests and answers alternate.
"""

from typing import Annotated, Union

import msgspec

from kvhold.core.api import Uses
from kvhold.core.keys import Query
from kvhold.net.login import LoginRefused

SPAN_VERSION = 1
SPAN_MAGIC = "kvhold-span"
DEFAULT_PORT = 7713
BEAT_S = 1.0
SILENT_S = 5.0

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=60)]
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class SpanMessage(msgspec.Struct, frozen=True, array_like=True, tag=True): ...


class RelayWelcome(SpanMessage, frozen=True):
    version: int
    kvhold: str


class LookUp(SpanMessage, frozen=True):
    query: Query
    have_tokens: Annotated[int, msgspec.Meta(ge=0)]
    uses: Uses
    deadline_s: _Seconds


class LookAgain(SpanMessage, frozen=True):
    """-> LookedUp

    settle: make the hit final
    """

    ticket: int
    settle: bool


class LookedUp(SpanMessage, frozen=True):
    """cleared_ns: the namespace's last clear, asked for after the pins; 0: never
    lost:       why the node gave no answer, or empty
    """

    ticket: int = 0
    num_tokens: int = 0
    arriving: bool = False
    sources: dict[str, int] = {}
    reason: str = ""
    cleared_ns: _Nanoseconds = 0
    lost: str = ""


class LetGo(SpanMessage, frozen=True):
    """-> Alive"""

    ticket: int


class RepeatClear(SpanMessage, frozen=True):
    """Another host's clear. -> Alive"""

    namespace: bytes
    at_ns: _Nanoseconds


class Beat(SpanMessage, frozen=True):
    """-> Alive"""


class Alive(SpanMessage, frozen=True):
    """lost: why the node could not be asked, or empty"""

    lost: str = ""


Greeting = Union[RelayWelcome, LoginRefused]  # noqa: UP007 - msgspec reads the union
Request = Union[LookUp, LookAgain, LetGo, RepeatClear, Beat]  # noqa: UP007
Answer = Union[LookedUp, Alive]  # noqa: UP007
