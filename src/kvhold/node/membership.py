"""The decisions of a node's client, without I/O: which link is in use, silent or lost, and when to
close it.

    membership = Membership(path, link)
    link = membership.current("lookup")                  # NodeError: no node now
    membership.is_silent(link, after_s=1)  # it owes an answer, and has sent nothing for 1 s
    membership.lose(link)                                # later calls raise NodeError, until
    while told := membership.introduce(new_link, known): # ... a new link has been told every
        namespace ...

`NodeClient` runs it for threads, the simulation runs it for tasks. Where threads share one, they
hold a lock around each call, but for `current`, `is_silent` and `return_within_s`.
"""

import enum
import threading
from typing import Generic, Protocol, TypeVar

from kvhold.core.errors import NodeError, NodeLost
from kvhold.net import messages as m

_NO_TIME_S = 0.001  # for a silent node: the request is sent, and its answer is not waited for
_HOPELESS = 10  # failed attempts to join, after which no lookup waits
_FIRST_PAUSE_S = 0.01  # after the first of them; twice as long after each


class Lifetime:
    """The users of a link.

    A retired link is closed after its last call, and after its last reader or writer of the arena.
    """

    def __init__(self) -> None:
        self.retired = False
        self._callers = 0
        self._held = 0  # readers and writers of the arena

    def enter(self) -> None:
        """Add a caller. Raises ConnectionError if the link is retired."""
        if self.retired:
            raise ConnectionError("the connection is closed")
        self._callers += 1

    def leave(self) -> None:
        """Remove a caller."""
        self._callers -= 1

    def hold(self) -> None:
        """Add a reader or writer of the arena. Raises NodeError if the link is retired."""
        if self.retired:
            raise NodeError("the connection to the node is closed")
        self._held += 1

    def let_go(self) -> None:
        """Remove a reader or writer of the arena."""
        self._held -= 1

    def forget_callers(self) -> None:
        """Retire the link in a forked child, which does not have the calling threads."""
        self.retired = True
        self._callers = 0

    @property
    def is_over(self) -> bool:
        """Whether the link is to be closed now.

        The node takes memory back when its socket closes.
        """
        return self.retired and not self._held and not self._callers


class UsedLink(Protocol):
    """The part of a link that the decisions use. silent_s, has_loose_ends: see `Conversation`."""

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
    """Abandoned links of one process to one socket, for which a device may still copy.

    The node does not take their memory back when their connection ends. This process knows when the
    copies have ended: a link closes after its last reader and writer of the arena. It then sends
    `Departed` on a later link. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[UsedLink] = []

    def add(self, link: UsedLink) -> None:
        """Add a link that was lost, or whose client is closed. Ignored if no device uses it."""
        with self._lock:
            if link.uses_device and link not in self._links:
                self._links.append(link)

    def due(self, link: UsedLink) -> list[m.Departed]:
        """Return the messages to send on a link now.

        Forgets the links to earlier nodes of the socket, which have ended.
        """
        run = link.welcome.run
        with self._lock:
            self._links = [left for left in self._links if left.welcome.run == run]
            return [m.Departed(run, left.welcome.number) for left in self._links if left.closed]

    def told(self, departed: m.Departed) -> None:
        """Forget a link that the node was told about."""
        with self._lock:
            self._links = [
                left
                for left in self._links
                if (left.welcome.run, left.welcome.number) != (departed.run, departed.number)
            ]

    def forget_in_child(self) -> None:
        """Forget all links in a forked child: they are the parent's.

        The lock is new: a thread of the parent may hold the old one.
        """
        self._lock = threading.Lock()
        self._links = []


class Duty(enum.Enum):
    """The next task of a client's keeper."""

    REJOIN = enum.auto()  # there is no link
    # late answers are to be read, or requests without a waiting caller to be sent
    TEND = enum.auto()
    # an earlier link of this process is closed, and the node has not been told
    DEPART = enum.auto()
    PING = enum.auto()  # the node has said nothing for a heartbeat's time
    REST = enum.auto()


class Membership(Generic[AnyLink]):
    """The state of one client: its link, its namespaces, its attempts to join."""

    def __init__(
        self, where: object, link: AnyLink | None = None, departures: Departures | None = None
    ) -> None:
        """Begin with a link, or without one.

        where:      the node's address, for messages
        link:       the first link, with no namespace registered yet
        departures: those of the process; None: new ones
        """
        self.where = where
        self.link = link
        self.departures = departures if departures is not None else Departures()
        self.closed = False
        self._registered: dict[bytes, m.Register] = {}  # by namespace
        self._refusal = ""
        self._failures = 0  # of attempts to join again, since the node was lost

    def current(self, operation: str) -> AnyLink:
        """Return the link in use.

        Raises NodeLost when there is none, NodeError when the client is closed.
        """
        link = self.link
        if self.closed:
            raise NodeError(f"{operation}: this client is closed")
        if link is None:
            raise NodeLost(
                f"{operation}: no node on {self.where} now; looking for it in the background"
            )
        return link

    def is_silent(self, link: AnyLink, after_s: float) -> bool:
        """Return whether the node owes an answer, and has sent nothing for `after_s`."""
        return link.silent_s > after_s

    def silence(self, link: AnyLink, operation: str) -> NodeError:
        """Return the error for a caller of a silent node.

        It is not asked, so that callers do not wait one after another.
        """
        return NodeError(
            f"{operation}: the node on {self.where} has not answered for "
            f"{link.silent_s:.1f} s; not waiting for it again"
        )

    def return_within_s(self, link: AnyLink, call_timeout_s: float) -> float | None:
        """Return how long to wait for the return of a grant.

        None: do not send it; a retired link returns all when it closes.
        """
        if link.retired:
            return None
        return _NO_TIME_S if self.is_silent(link, call_timeout_s) else call_timeout_s

    def lose(self, link: AnyLink) -> bool:
        """Stop using the link. Returns whether it was in use."""
        self.departures.add(link)
        if self.link is not link:
            return False
        self.link = None
        return True

    def register(self, request: m.Register) -> None:
        """Record a namespace, to be registered on every later link."""
        self._registered[request.namespace] = request

    def introduce(self, link: AnyLink, told: set[bytes]) -> list[m.Register]:
        """Return the namespaces to register on a new link.

        If there are none, the link becomes the link in use, unless the client is closed.

        told: the digests that are registered on it already
        """
        missing = [
            request for namespace, request in self._registered.items() if namespace not in told
        ]
        if not missing and not self.closed:
            self.link = link
            self._refusal = ""
            self._failures = 0
        return missing

    def failed(self, *, may_be_back: bool) -> None:
        """Count a failed attempt to join again.

        may_be_back: False: the node could not be started, or refuses this client.
        """
        self._failures = self._failures + 1 if may_be_back else _HOPELESS

    def pause_s(self, most_s: float) -> float:
        """Return how long to wait before the next attempt to join."""
        return min(most_s, _FIRST_PAUSE_S * (1 << min(self._failures, _HOPELESS)))

    @property
    def is_rejoining(self) -> bool:
        """Whether a lost node may be back in a moment."""
        return self.link is None and not self.closed and self._failures < _HOPELESS

    def is_news(self, refusal: str) -> bool:
        """Return whether the refusal differs from the last one.

        A repeated reason is logged once.
        """
        before, self._refusal = self._refusal, refusal
        return refusal != before

    def duty(self, link: AnyLink | None, now_s: float, heartbeat_s: float) -> Duty:
        """Return the keeper's next task. link: the link that the keeper read last"""
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
        """Close the client. Returns the link that was in use, for the caller to retire."""
        self.closed = True
        link, self.link = self.link, None
        if link is not None:
            self.departures.add(link)
        return link
