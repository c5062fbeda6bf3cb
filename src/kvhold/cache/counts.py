from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Generic, TypeVar

from kvhold.core.api import Found
from kvhold.core.keys import is_span
from kvhold.core.metrics import Metrics
from kvhold.core.planning import BlendReport
from kvhold.core.status import ActivityStatus
from kvhold.tiers.ram import Entry

_MOST_FOLLOWED = 512  # namespaces, and tenants; those used longest ago are dropped
_MOST_SHOWN = 16
_HALF_LIFE_S = 60.0

Name = TypeVar("Name", bytes, str)


@dataclass(slots=True)
class _Activity:
    """score: tokens, halved each minute until `at_s`"""

    score: float = 0.0
    at_s: float = 0.0
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0

    def score_at(self, now_s: float) -> float:
        return float(self.score * 0.5 ** ((now_s - self.at_s) / _HALF_LIFE_S))


class _Activities(Generic[Name]):
    def __init__(self) -> None:
        self._of: OrderedDict[Name, _Activity] = OrderedDict()

    def add(self, name: Name, answer: Found, asked: int, now_s: float) -> None:
        one = self._of.get(name)
        if one is None:
            one = self._of[name] = _Activity()
            if len(self._of) > _MOST_FOLLOWED:
                self._of.popitem(last=False)
        self._of.move_to_end(name)
        one.score, one.at_s = one.score_at(now_s) + asked, now_s
        one.lookups += 1
        one.lookup_tokens += asked
        one.hit_tokens += answer.num_tokens

    def busiest(self, now_s: float) -> list[tuple[Name, _Activity]]:
        return nlargest(_MOST_SHOWN, self._of.items(), key=lambda one: one[1].score_at(now_s))


class LookupCounts:
    def __init__(
        self,
        metrics: Metrics,
        tenant_of: Callable[[bytes], str | None],
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._tenant_of = tenant_of
        self._clock = clock
        self._namespaces: _Activities[bytes] = _Activities()
        self._tenants: _Activities[str] = _Activities()

    def add(self, namespace: bytes, answer: Found, asked: int) -> None:
        result = (
            "miss" if not answer.num_tokens else "hit" if answer.num_tokens == asked else "partial"
        )
        metrics, requests, kind = self._metrics, "kvhold_lookup_requests", "kvhold_"
        if is_span(namespace):
            requests, kind = "kvhold_span_lookups", "kvhold_span_"
        metrics.add(requests, result=result)
        metrics.add(f"{kind}lookup_tokens", asked)
        for source, num_tokens in answer.sources.items():
            metrics.add(f"{kind}hit_tokens", num_tokens, source=source)
        if answer.reason is not None and answer.num_tokens < asked:
            metrics.add(f"{kind}missed_tokens", asked - answer.num_tokens, reason=answer.reason)
        if is_span(namespace):
            return
        now_s = self._clock()
        self._namespaces.add(namespace, answer, asked, now_s)
        if tenant := self._tenant_of(namespace):
            self._tenants.add(tenant, answer, asked, now_s)

    def busiest_namespaces(self) -> list[ActivityStatus]:
        return [
            _shown(namespace.hex(), self._tenant_of(namespace) or "", one)
            for namespace, one in self._namespaces.busiest(self._clock())
        ]

    def busiest_tenants(self) -> list[ActivityStatus]:
        return [_shown("", tenant, one) for tenant, one in self._tenants.busiest(self._clock())]


def count_blend(metrics: Metrics, report: BlendReport) -> None:
    metrics.add("kvhold_blended_requests", result=report.result)
    if report.result == "blended":
        metrics.add("kvhold_blended_tokens", report.exact_tokens, kv="exact")
        metrics.add("kvhold_blended_tokens", report.reused_tokens, kv="reused")
        metrics.add("kvhold_blended_tokens", report.recomputed_tokens, kv="recomputed")


def count_entries(metrics: Metrics, what: str, entries: Sequence[Entry]) -> None:
    if entries:
        metrics.add(f"kvhold_{what}_chunks", len(entries))
        metrics.add(f"kvhold_{what}_bytes", sum([entry.nbytes for entry in entries]))


def _shown(namespace: str, tenant: str, one: _Activity) -> ActivityStatus:
    return {
        "namespace": namespace,
        "tenant": tenant,
        "lookups": one.lookups,
        "lookup_tokens": one.lookup_tokens,
        "hit_tokens": one.hit_tokens,
    }
