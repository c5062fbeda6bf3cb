"""Lookups of an engine on several hosts: the part that all have, pinned on all.

Hosts with a longer hit are asked again until all are equal. A lost or cleared host is a miss.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvhold.core.api import Found, Hit, Uses
from kvhold.core.errors import KVHoldError
from kvhold.core.keys import Prompt
from kvhold.core.reasons import CLEARED, HOST_AWAY, INCOMPLETE, Reason
from kvhold.net import span as s
from kvhold.node.span.hosts import Host

log = logging.getLogger(__name__)

_MOST_ROUNDS = 4


class SpanHit(Hit):
    """tickets: by host, to claim the hit there; empty: a miss"""

    def __init__(self, lookup: "_Lookup") -> None:
        super().__init__(
            lookup.found(),
            lookup.let_go,
            poll=lambda ticket, settle, growth: lookup.look_again(settle=settle),
            pause=lambda seconds: None,
        )
        self._lookup = lookup

    @property
    def tickets(self) -> tuple[int, ...]:
        return tuple(answer.ticket for answer in self._lookup.answers)


class HostSpan:
    """One thread."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = [host for host in hosts if host.shards]

    def lookup(
        self, prompt: Prompt, *, have_tokens: int = 0, uses: Uses = "all", deadline_s: float
    ) -> SpanHit:
        """The hit may be arriving.

        deadline_s: of each call to a host

        Raises the errors of the scheduler's own node.
        """
        lookup = _Lookup(self.hosts, prompt, have_tokens, uses, deadline_s)
        lookup.look_up()
        return SpanHit(lookup)

    def repeat_clear(self, namespace: bytes, at_ns: int, *, deadline_s: float) -> None:
        """A host that is away clears at the next lookup."""
        for host in self.hosts:
            host.repeat_clear(namespace, at_ns, deadline_s=deadline_s)


@dataclass
class _Lookup:
    hosts: Sequence[Host]
    prompt: Prompt
    have_tokens: int
    uses: Uses
    deadline_s: float

    def __post_init__(self) -> None:
        self.answers: list[s.LookedUp] = []
        self.reason: Reason | None = None
        self._num_rounds = 0

    def found(self) -> Found:
        answers = self.answers
        if not answers:
            return Found(0, 0, reason=self.reason)
        ticket = next((answer.ticket for answer in answers if answer.ticket), 0)
        num_tokens = min(answer.num_tokens for answer in answers)
        if any(answer.arriving for answer in answers):
            return Found(ticket, num_tokens, arriving=True)
        slowest = min(answers, key=lambda answer: answer.sources.get("ram", 0))
        return Found(ticket, num_tokens, sources=slowest.sources, reason=self.reason)

    def look_up(self) -> None:
        self._ask(
            [
                partial(
                    host.look_up,
                    replace(self.prompt.query(), only=host.shards),
                    have_tokens=self.have_tokens,
                    uses=self.uses,
                    deadline_s=self.deadline_s,
                )
                for host in self.hosts
            ]
        )
        self._go_on()

    def look_again(self, *, settle: bool) -> Found:
        if not self.answers:
            return self.found()
        self._ask(
            [
                partial(host.look_again, answer.ticket, settle=settle, deadline_s=self.deadline_s)
                if answer.arriving
                else None
                for host, answer in zip(self.hosts, self.answers, strict=True)
            ]
        )
        self._go_on()
        return self.found()

    def let_go(self) -> None:
        answers, self.answers = self.answers, []
        for host, answer in zip(self.hosts, answers, strict=bool(answers)):
            if answer.ticket:
                host.let_go(answer.ticket)

    def _go_on(self) -> None:
        while self.answers:
            empty = [one for one in self.answers if not one.arriving and not one.num_tokens]
            is_arriving = any(answer.arriving for answer in self.answers)
            if is_arriving and not empty:
                return
            if self._differ_in_clears():
                return
            if empty:
                self._miss(Reason(empty[0].reason) if empty[0].reason else None)
                return
            shortest = min(self.answers, key=lambda answer: answer.num_tokens)
            if self.reason is None and shortest.reason:
                self.reason = Reason(shortest.reason)
            longer = [answer.num_tokens > shortest.num_tokens for answer in self.answers]
            if not any(longer):
                return
            self._num_rounds += 1
            if self._num_rounds > _MOST_ROUNDS:
                self._miss(INCOMPLETE)
                return
            self._ask_for(shortest.num_tokens, longer)

    def _ask_for(self, num_tokens: int, longer: Sequence[bool]) -> None:
        """The longer hit stays pinned until the answer."""
        before, shorter = list(self.answers), self.prompt.until(num_tokens)
        try:
            self._ask(
                [
                    partial(
                        host.look_up,
                        replace(shorter.query(), only=host.shards),
                        have_tokens=self.have_tokens,
                        uses="none",
                        deadline_s=self.deadline_s,
                    )
                    if is_longer
                    else None
                    for host, is_longer in zip(self.hosts, longer, strict=True)
                ]
            )
        finally:
            for host, answer, is_longer in zip(self.hosts, before, longer, strict=True):
                if is_longer:
                    host.let_go(answer.ticket)

    def _ask(self, asks: Sequence[Callable[[], Callable[[], s.LookedUp]] | None]) -> None:
        """Ask hosts at once; None: the answer stays. Raises the own node's errors."""
        before = self.answers or [s.LookedUp()] * len(self.hosts)
        waits = [None if ask is None else ask() for ask in asks]
        answers, failure = list[s.LookedUp](), None
        for wait, answer in zip(waits, before, strict=True):
            try:
                answers.append(answer if wait is None else wait())
            except KVHoldError as error:
                failure = failure or error
                answers.append(s.LookedUp(lost=str(error)))
        self.answers = answers
        for host, answer, held in zip(self.hosts, answers, before, strict=True):
            if answer.lost and held.ticket:
                host.let_go(held.ticket)
        if failure is not None:
            self.let_go()
            raise failure
        for host, answer in zip(self.hosts, answers, strict=True):
            if answer.lost:
                log.debug("kvhold: lookup: %s: %s", host.name, answer.lost)
                self._miss(HOST_AWAY)
                return

    def _differ_in_clears(self) -> bool:
        latest_ns = max(answer.cleared_ns for answer in self.answers)
        behind = [
            host
            for host, answer in zip(self.hosts, self.answers, strict=True)
            if answer.cleared_ns < latest_ns
        ]
        if not behind:
            return False
        self._miss(CLEARED)
        namespace = self.prompt.namespace.digest
        for host in behind:
            log.info(
                "kvhold: another host of this engine was cleared, so %s clears the same", host.name
            )
            host.repeat_clear(namespace, latest_ns, deadline_s=self.deadline_s)
        return True

    def _miss(self, reason: Reason | None) -> None:
        self.let_go()
        self.reason = reason
