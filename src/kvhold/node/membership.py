"""Which link of a client is in use, silent or lost. No I/O.

Threads hold a lock around each call, except `current`, `is_silent` and `return_within_s`.
"""

import enum
import os
import threading
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kvhold.core.errors import NodeError, NodeLost
from kvhold.net import messages as m

_NO_TIME_S = 0.001  # to a silent node: send, do not wait
_HOPELESS = 10  # failed attempts to join; then no lookup waits
_FIRST_PAUSE_S = 0.01


class Lifetime:
    """A retired link closes after its last user."""

    def __init__(self) -> None:
        self.retired = False
        self._callers = 0
        self._held = 0

    def enter(self) -> None:
        if self.retired:
            raise ConnectionError("the connection is closed")
        self._callers += 1

    def leave(self) -> None:
        self._callers -= 1

    def hold(self) -> None:
        if self.retired:
            raise NodeError("the connection to the node is closed")
        self._held += 1

    def let_go(self) -> None:
        self._held -= 1

    def forget_callers(self) -> None:
        self.retired = True
        self._callers = 0

    @property
    def is_over(self) -> bool:
        """The link may close. The node then takes the memory back."""
        return self.retired and not self._held and not self._callers


class UsedLink(Protocol):
    @property
    def retired(self) -> bool: ...

    @property
    def silent_s(self) -> float: ...

    @property
    def last_heard_s(self) -> float: ...

    @property
    def has_loose_ends(self) -> bool: ...

    @property
    def closed(self) -> bool: ...

    @property
    def welcome(self) -> m.Welcome: ...

    @property
    def uses_device(self) -> bool: ...


AnyLink = TypeVar("AnyLink", bound=UsedLink)


class Departures:
    """A process's lost links to one socket, whose memory a device may still use. Any thread.

    The node keeps that memory until `Departed`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[UsedLink] = []

    @classmethod
    def of_process(cls, path: Path) -> "Departures":
        return _of_process.setdefault(path.absolute(), cls())

    def add(self, link: UsedLink) -> None:
        with self._lock:
            if link.uses_device and link not in self._links:
                self._links.append(link)

    def due(self, link: UsedLink) -> list[m.Departed]:
        """Messages to send. Forgets links to earlier nodes."""
        run = link.welcome.run
        with self._lock:
            self._links = [left for left in self._links if left.welcome.run == run]
            return [m.Departed(run, left.welcome.number) for left in self._links if left.closed]

    def told(self, departed: m.Departed) -> None:
        with self._lock:
            self._links = [
                left
                for left in self._links
                if (left.welcome.run, left.welcome.number) != (departed.run, departed.number)
            ]

    def forget_in_child(self) -> None:
        self._lock = threading.Lock()
        self._links = []


_of_process: dict[Path, Departures] = {}


def _forget_in_child() -> None:
    for departures in _of_process.values():
        departures.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


class Duty(enum.Enum):
    REJOIN = enum.auto()
    TEND = enum.auto()
    DEPART = enum.auto()
    PING = enum.auto()
    REST = enum.auto()


class Membership(Generic[AnyLink]):
    def __init__(
        self, where: object, link: AnyLink | None = None, departures: Departures | None = None
    ) -> None:
        self.where = where
        self.link = link
        self.departures = departures if departures is not None else Departures()
        self.closed = False
        self._registered: dict[bytes, m.Register] = {}
        self._refusal: str | None = None
        self._failures = 0

    def current(self, operation: str) -> AnyLink:
        """Raises NodeLost: no link; NodeError: the client is closed."""
        link = self.link
        if self.closed:
            raise NodeError(f"{operation}: this client is closed")
        if link is None:
            raise NodeLost(
                f"{operation}: no node on {self.where} now; looking for it in the background"
            )
        return link

    def is_silent(self, link: AnyLink, after_s: float) -> bool:
        return link.silent_s > after_s

    def silence(self, link: AnyLink, operation: str) -> NodeError:
        return NodeError(
            f"{operation}: the node on {self.where} has not answered for "
            f"{link.silent_s:.1f} s; not waiting for it again"
        )

    def return_within_s(self, link: AnyLink, call_timeout_s: float) -> float | None:
        """For returning a grant. None: send nothing, the link closes."""
        if link.retired:
            return None
        return _NO_TIME_S if self.is_silent(link, call_timeout_s) else call_timeout_s

    def lose(self, link: AnyLink) -> bool:
        """False: the link was not in use."""
        self.departures.add(link)
        if self.link is not link:
            return False
        self.link = None
        return True

    def register(self, request: m.Register) -> None:
        self._registered[request.namespace] = request

    def introduce(self, link: AnyLink, told: set[bytes]) -> list[m.Register]:
        """The namespaces to register; if none, the link is used."""
        missing = [
            request for namespace, request in self._registered.items() if namespace not in told
        ]
        if not missing and not self.closed:
            self.link = link
            self._refusal = None
            self._failures = 0
        return missing

    def failed(self, *, may_be_back: bool) -> None:
        """may_be_back: False: no node can be started, or it refuses this client"""
        self._failures = self._failures + 1 if may_be_back else _HOPELESS

    def pause_s(self, most_s: float) -> float:
        return min(most_s, _FIRST_PAUSE_S * (1 << min(self._failures, _HOPELESS)))

    @property
    def is_rejoining(self) -> bool:
        return self.link is None and not self.closed and self._failures < _HOPELESS

    def is_news(self, refusal: str) -> bool:
        before, self._refusal = self._refusal, refusal
        return refusal != before

    def duty(self, link: AnyLink | None, now_s: float, heartbeat_s: float) -> Duty:
        if link is None:
            return Duty.REJOIN
        if link.has_loose_ends:
            return Duty.TEND
        if self.link is link and self.departures.due(link):
            return Duty.DEPART
        if self.link is link and now_s - link.last_heard_s >= heartbeat_s:
            return Duty.PING
        return Duty.REST

    def close(self) -> AnyLink | None:
        self.closed = True
        link, self.link = self.link, None
        if link is not None:
            self.departures.add(link)
        return link
