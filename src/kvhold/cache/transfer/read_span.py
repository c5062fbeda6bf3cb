"""Spans of one read: `kvhold.tier.read`, and `kvhold.peer.read` for each peer."""

import time
from collections import Counter
from collections.abc import Sequence

from kvhold.cache.transfer.commands import PendingRead
from kvhold.core.reasons import BAD_FRAME, DEADLINE
from kvhold.core.tracing import OpenSpan, Tracer
from kvhold.tiers.base import Origin
from kvhold.tiers.outcomes import TierOutcome

_MOST_LINKS = 16


class ReadSpan:
    def __init__(self, tracer: Tracer, span: OpenSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._began_s = time.monotonic()
        self._queued_s = 0.0
        self._ending: dict[str, int | str] = {"kvhold.reason": DEADLINE}

    @classmethod
    def begin(cls, tracer: Tracer, tier: str, batch: Sequence[PendingRead]) -> "ReadSpan | None":
        """A child of the first traced request, with links to the others."""
        traces = list(dict.fromkeys(read.trace for read in batch if read.trace))
        if not traces:
            return None
        span = tracer.begin(
            "kvhold.tier.read",
            traces[0],
            {"kvhold.tier": tier, "kvhold.chunks": len(batch)},
            links=traces[1 : 1 + _MOST_LINKS],
        )
        return cls(tracer, span) if span is not None else None

    def starts(self) -> None:
        self._queued_s = time.monotonic() - self._began_s

    def got(self, outcome: TierOutcome[int | None], *, num_good: int) -> None:
        """num_good: chunks that passed the checks"""
        arrived = [size for size in outcome.items if size is not None]
        self._ending = {"kvhold.found_chunks": num_good, "kvhold.bytes": sum(arrived)}
        if num_good < len(arrived):
            self._ending["kvhold.reason"] = BAD_FRAME
        elif missed := Counter(
            str(why) for size, why in zip(outcome.items, outcome.why, strict=True) if size is None
        ):
            self._ending["kvhold.reason"] = missed.most_common(1)[0][0]
        by_origin: dict[Origin, list[int]] = {}
        for size, origin in zip(outcome.items, outcome.origins, strict=False):
            if size is not None and origin is not None:
                by_origin.setdefault(origin, []).append(size)
        for origin, sizes in by_origin.items():
            span = self._tracer.begin(
                "kvhold.peer.read",
                self._span.context,
                {
                    "kvhold.peer": origin.place,
                    "kvhold.chunks": len(sizes),
                    "kvhold.bytes": sum(sizes),
                },
                began_s=origin.began_s,
            )
            if span is not None:
                span.end(ended_s=origin.ended_s)

    def end(self, _: object) -> None:
        """Without `got`, the tier did not answer in time."""
        self._span.end({"kvhold.queued_s": self._queued_s, **self._ending})
