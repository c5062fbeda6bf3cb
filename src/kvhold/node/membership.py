"""The decisions of a node's client, without I/O: which link is used, silent, lost, or to be closed.

    membership = Membership(path, link)
    link = membership.current("lookup")                  # NodeError: no node now
    membership.is_silent(link, after_s=1)                # it owes an answer, and has said nothing for so long
    membership.lose(link)                                # later calls raise NodeError, until
    while told := membership.introduce(new_link, known): # ... a new link has been told every namespace
        ...

`NodeClient` runs it for threads, the simulation runs it for tasks. Where threads share one, they hold a lock around
each call, but for `current`, `is_silent` and `return_within_s`.
"""

import enum
from typing import Generic, Protocol, TypeVar

from kvhold.core.errors import NodeError, NodeLost
from kvhold.net import messages as m

_NO_TIME_S = 0.001  # for a silent node: the request is sent, and its answer is not waited for
_HOPELESS = 10  # failed attempts to join, after which no lookup waits
_FIRST_PAUSE_S = 0.01  # after the first of them; twice as long after each


class Lifetime:
    """Who uses a link. A retired link is closed after its last call, and after its last reader or writer of the arena."""

    def __init__(self) -> None:
        self.retired = False
        self._callers = 0
        self._held = 0  # readers and writers of the arena

    def enter(self) -> None:
        """One more caller. Raises ConnectionError if the link is retired."""
        if self.retired:
            raise ConnectionError("the connection is closed")
        self._callers += 1

    def leave(self) -> None:
        """One caller less."""
        self._callers -= 1

    def hold(self) -> None:
        """One more reader or writer of the arena. Raises NodeError if the link is retired."""
        if self.retired:
            raise NodeError("the connection to the node is closed")
        self._held += 1

    def let_go(self) -> None:
        """One reader or writer less."""
        self._held -= 1

    def forget_callers(self) -> None:
        """In a forked child: the callers are threads that it does not have, and there will be no others."""
        self.retired = True
        self._callers = 0

    @property
    def is_over(self) -> bool:
        """Whether the link is to be closed now. The node takes memory back when its socket closes."""
        return self.retired and not self._held and not self._callers


class UsedLink(Protocol):
    """A link, as far as decisions depend on it. silent_s, has_loose_ends: see `Conversation`."""

    @property
    def retired(self) -> bool: ...

    @property
    def silent_s(self) -> float: ...

    @property
    def last_heard_s(self) -> float: ...

    @property
    def has_loose_ends(self) -> bool: ...


AnyLink = TypeVar("AnyLink", bound=UsedLink)


class Duty(enum.Enum):
    """The next task of a client's keeper."""

    REJOIN = enum.auto()  # there is no link
    TEND = enum.auto()  # late answers are to be read, or requests without a waiting caller to be sent
    PING = enum.auto()  # the node has said nothing for a heartbeat's time
    REST = enum.auto()


class Membership(Generic[AnyLink]):
    """One client's."""

    def __init__(self, where: object, link: AnyLink | None = None) -> None:
        """where: the node's address, for messages. link: the first one, which knows no namespace yet."""
        self.where = where
        self.link = link
        self.closed = False
        self._registered: dict[bytes, m.Register] = {}  # by namespace
        self._refusal = ""
        self._failures = 0  # of attempts to join again, since the node was lost

    def current(self, operation: str) -> AnyLink:
        """The link in use. Raises NodeLost when there is none, NodeError when the client is closed."""
        link = self.link
        if self.closed:
            raise NodeError(f"{operation}: this client is closed")
        if link is None:
            raise NodeLost(f"{operation}: no node on {self.where} now; looking for it in the background")
        return link

    def is_silent(self, link: AnyLink, after_s: float) -> bool:
        """Whether the node owes an answer, and has said nothing for `after_s`."""
        return link.silent_s > after_s

    def silence(self, link: AnyLink, operation: str) -> NodeError:
        """The error of a caller. A silent node is not asked: callers do not wait for it one after another."""
        return NodeError(f"{operation}: the node on {self.where} has not answered for {link.silent_s:.1f} s; not waiting for it again")

    def return_within_s(self, link: AnyLink, call_timeout_s: float) -> float | None:
        """How long the return of something may take. None: it is not to be asked for, because a retired link returns all by closing."""
        if link.retired:
            return None
        return _NO_TIME_S if self.is_silent(link, call_timeout_s) else call_timeout_s

    def lose(self, link: AnyLink) -> bool:
        """Use the link no more. Whether it was in use."""
        if self.link is not link:
            return False
        self.link = None
        return True

    def register(self, request: m.Register) -> None:
        """Have a namespace told to every later link."""
        self._registered[request.namespace] = request

    def introduce(self, link: AnyLink, told: set[bytes]) -> list[m.Register]:
        """The namespaces that a new link is still to be told.

        When there are none, the link is in use from now on, unless the client was closed.
        """
        missing = [request for namespace, request in self._registered.items() if namespace not in told]
        if not missing and not self.closed:
            self.link = link
            self._refusal = ""
            self._failures = 0
        return missing

    def failed(self, *, may_be_back: bool) -> None:
        """An attempt to join again has failed. may_be_back: False: the node could not be started, or refuses this client."""
        self._failures = self._failures + 1 if may_be_back else _HOPELESS

    def pause_s(self, most_s: float) -> float:
        """How long to wait before the next attempt to join."""
        return min(most_s, _FIRST_PAUSE_S * (1 << min(self._failures, _HOPELESS)))

    @property
    def is_rejoining(self) -> bool:
        """Whether a lost node may be back in a moment."""
        return self.link is None and not self.closed and self._failures < _HOPELESS

    def is_news(self, refusal: str) -> bool:
        """Whether the node's last refusal had another reason. Each reason is logged once."""
        before, self._refusal = self._refusal, refusal
        return refusal != before

    def duty(self, link: AnyLink | None, now_s: float, heartbeat_s: float) -> Duty:
        """The keeper's next task. link: the one that was in use a moment ago."""
        if link is None:
            return Duty.REJOIN
        if link.has_loose_ends:
            return Duty.TEND
        if self.link is link and now_s - link.last_heard_s >= heartbeat_s:
            return Duty.PING
        return Duty.REST

    def close(self) -> AnyLink | None:
        """No more calls. Returns the link that was in use, which is to be retired."""
        self.closed = True
        link, self.link = self.link, None
        return link
