from collections.abc import Sequence

from kvhold.core.api import Found
from kvhold.core.metrics import Metrics
from kvhold.tiers.ram import Entry


def count_lookup(metrics: Metrics, answer: Found, asked: int) -> None:
    result = "miss" if not answer.num_tokens else "hit" if answer.num_tokens == asked else "partial"
    metrics.add("kvhold_lookup_requests", result=result)
    metrics.add("kvhold_lookup_tokens", asked)
    for source, num_tokens in answer.sources.items():
        metrics.add("kvhold_hit_tokens", num_tokens, source=source)
    if answer.reason is not None and answer.num_tokens < asked:
        metrics.add("kvhold_missed_tokens", asked - answer.num_tokens, reason=answer.reason)


def count_entries(metrics: Metrics, what: str, entries: Sequence[Entry]) -> None:
    if entries:
        metrics.add(f"kvhold_{what}_chunks", len(entries))
        metrics.add(f"kvhold_{what}_bytes", sum([entry.nbytes for entry in entries]))
