from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvhold.core.api import Copying, CopyProgress, ReencodeProgress, Reencoding
from kvhold.core.arrays import WholePrompts
from kvhold.core.errors import ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.planning import Decision
from kvhold.core.status import MEMORY, NodeStatus
from kvhold.core.tags import tag_digest
from kvhold.core.usage import HeldAges, LookupShare, PromptWorth
from kvhold.net import messages as m
from kvhold.node.link import Link

Kind = TypeVar("Kind", bound=m.Message)

_CLEARS_AT_ONCE = 64


@dataclass(frozen=True)
class TagClear:
    """See `control.api.ClearAnswer`."""

    chunks: int
    namespaces: int
    unknown: int
    forgotten: int
    since_s: float | None
    unlisted_tiers: list[str]


class OperatorCalls(WholePrompts):
    @abstractmethod
    def flush(self, mark: int | None = None, *, deadline_s: float | None = None) -> bool: ...

    @abstractmethod
    def _current(self, operation: str) -> Link: ...

    @abstractmethod
    def _call(
        self,
        request: m.Message,
        expected: type[Kind],
        deadline_s: float | None,
        link: Link | None = None,
    ) -> Kind: ...

    @abstractmethod
    def _request(
        self, request: m.Message, deadline_s: float | None, link: Link, *, keep: bool = False
    ) -> m.Answer: ...

    @abstractmethod
    def _misunderstood(self, answer: m.Answer, link: Link) -> ProtocolError: ...

    @abstractmethod
    def _give_back(self, link: Link, request: m.Message | None, *, held: bool = False) -> None: ...

    def explain(
        self, request: str = "", *, tenant: str = "", deadline_s: float | None = None
    ) -> list[Decision]:
        """tenant: empty: all"""
        return self._call(m.Explain(request, tenant), m.Explained, deadline_s).decisions

    def names(
        self, prefix: str = "", *, deadline_s: float | None = None
    ) -> tuple[list[m.KnownSpace], int, int]:
        """Described namespaces, and number and bytes of the others."""
        spaces: list[m.KnownSpace] = []
        while True:
            page = self._call(
                m.ListNamespaces(spaces[-1].digest if spaces else b"", prefix), m.Named, deadline_s
            )
            spaces += page.spaces
            if not page.more or not page.spaces:
                return spaces, page.other_spaces, page.other_bytes

    def owned(self, tenant: str, *, deadline_s: float | None = None) -> frozenset[bytes]:
        """Digests of namespaces with only this tenant."""
        return frozenset(_split(self._call(m.ListOwned(tenant), m.Owned, deadline_s).digests))

    def tenants(self, *, deadline_s: float | None = None) -> dict[str, int]:
        """See `TenantBytes`."""
        return self._call(m.MeasureTenants(), m.TenantBytes, deadline_s).nbytes

    def held(self, *, deadline_s: float | None = None) -> list[HeldAges]:
        return self._call(m.MeasureHeld(), m.HeldRows, deadline_s).rows

    def shares(self, *, deadline_s: float | None = None) -> list[LookupShare]:
        return self._call(m.ListShares(), m.ShareRows, deadline_s).rows

    def worths(self, *, tenant: str = "", deadline_s: float | None = None) -> list[PromptWorth]:
        return self._call(m.ListWorths(tenant), m.WorthRows, deadline_s).rows

    def clear(
        self,
        namespace: bytes | None = None,
        *,
        tier: str = "",
        deadline_s: float | None = None,
    ) -> int:
        removed = self._call(m.Clear(namespace, tier=tier), m.Done, deadline_s).count
        self.flush(0, deadline_s=deadline_s)
        return removed

    def clear_tagged(
        self,
        name: str,
        value: str,
        *,
        tier: str = "",
        among: Container[bytes] | None = None,
        deadline_s: float | None = None,
    ) -> TagClear:
        """Forget the namespaces with a tag. among: only these digests"""
        found = self._call(m.ListOwned("", tag_digest(name, value)), m.Owned, deadline_s)
        spaces = [one for one in _split(found.digests) if among is None or one in among]
        removed = 0
        for number, space in enumerate(spaces, 1):
            removed += self._call(m.Clear(space, tier=tier), m.Done, deadline_s).count
            if number % _CLEARS_AT_ONCE == 0 or number == len(spaces):
                self.flush(0, deadline_s=deadline_s)
        tiers = [] if tier == MEMORY else self.status(deadline_s=deadline_s).get("tiers", [])
        unlisted = [one["name"] for one in tiers if one["shared"] and tier in ("", one["name"])]
        unknown = found.unknown if among is None else 0
        return TagClear(removed, len(spaces), unknown, found.forgotten, found.since_s, unlisted)

    def clear_prompt(
        self, query: Query, *, only_end: bool = False, deadline_s: float | None = None
    ) -> int:
        removed = self._call(m.ClearPrompt(query, only_end), m.Done, deadline_s).count
        self.flush(0, deadline_s=deadline_s)
        return removed

    def repeat_clear(
        self, namespace: bytes, at_ns: int, *, deadline_s: float | None = None
    ) -> None:
        """Unless the namespace was cleared here since `at_ns`."""
        self._call(m.Clear(namespace, at_ns), m.Done, deadline_s)

    def cleared_ns(self, namespace: bytes, *, deadline_s: float | None = None) -> int:
        """0: none."""
        return self._call(m.LastClear(namespace), m.Done, deadline_s).count

    def reencode(
        self,
        tier: str,
        codec: str,
        *,
        namespace: bytes | None = None,
        query: Query | None = None,
        deadline_s: float | None = None,
    ) -> Reencoding:
        """See `Cache`. deadline_s: per request"""
        link = self._current("reencode")
        begun = self._call(
            m.Reencode(tier, codec, namespace, query), m.ReencodeStatus, deadline_s, link
        )

        def poll() -> ReencodeProgress:
            answer = self._request(m.Progress(begun.number), deadline_s, link)
            if isinstance(answer, m.NotFound):
                return ReencodeProgress(done=True, stopped="closed")
            if not isinstance(answer, m.ReencodeStatus):
                raise self._misunderstood(answer, link)
            return answer.progress

        return Reencoding(
            begun.progress, lambda: self._give_back(link, m.Release(begun.number)), poll=poll
        )

    def copy(
        self,
        tier: str,
        query: Query | None,
        *,
        drop: bool = False,
        source: str = MEMORY,
        namespace: bytes = b"",
        deadline_s: float | None = None,
    ) -> Copying:
        """See `Cache`. deadline_s: per request"""
        link = self._current("copy")
        begun = self._call(
            m.Copy(tier, query, drop, source, namespace), m.CopyStatus, deadline_s, link
        )

        def poll() -> CopyProgress:
            answer = self._request(m.Progress(begun.number), deadline_s, link)
            if isinstance(answer, m.NotFound):
                return CopyProgress(done=True, stopped="closed")
            if not isinstance(answer, m.CopyStatus):
                raise self._misunderstood(answer, link)
            return answer.progress

        return Copying(
            begun.progress, lambda: self._give_back(link, m.Release(begun.number)), poll=poll
        )

    def status(self, *, deadline_s: float | None = None) -> NodeStatus:
        """Unchecked (see `check_status`)."""
        return cast(NodeStatus, self._call(m.Status(), m.Report, deadline_s).values)

    def settings(
        self, changes: Mapping[str, Any] | None = None, *, deadline_s: float | None = None
    ) -> dict[str, Any]:
        """Returns the settings that may change."""
        return self._call(m.ChangeSettings(dict(changes or {})), m.Report, deadline_s).values

    def layout_of(self, namespace: bytes, *, deadline_s: float | None = None) -> Layout | None:
        """By digest; None: the node does not know it."""
        return self._call(m.FindLayout(namespace), m.FoundLayout, deadline_s).layout

    def measure(self, *, deadline_s: float | None = None) -> list[m.MetricSample]:
        return self._call(m.Measure(), m.MetricSamples, deadline_s).samples

    def clients(self, *, deadline_s: float | None = None) -> list[m.ClientInfo]:
        """deadline_s: per page"""
        part = self._call(m.Clients(), m.ClientList, deadline_s)
        found = list(part.clients)
        while part.more:
            part = self._call(m.Clients(found[-1].number + 1), m.ClientList, deadline_s)
            found += part.clients
        return found

    def kick(
        self, *, number: int = 0, pid: int = 0, deadline_s: float | None = None
    ) -> list[m.ClientInfo]:
        """Returns their state before."""
        return self._call(m.Kick(number, pid), m.ClientList, deadline_s).clients


def _split(joined: bytes) -> Iterator[bytes]:
    for at in range(0, len(joined), NAMESPACE_BYTES):
        yield joined[at : at + NAMESPACE_BYTES]
