"""What a cache counts adds up, at every moment.

What was asked for was found or missed; what was reserved was stored or abandoned, or is being
written; what came has gone or is here.
"""

from kvhold.cache.state import CacheState
from kvhold.core.reasons import REASONS, WHOLE


class Index:
    """What is visible in memory, by its events alone."""

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self.next, parts = state.snapshot()
        self.there = {entry.key for entries in parts for entry in entries}

    def assert_right(self) -> None:
        """Follow, and compare."""
        batch = self.state.events(self.next)
        assert not batch.lost
        self.next = batch.next
        for event in batch.events:
            assert (event.key in self.there) == (event.kind != "admitted")
            (self.there.add if event.kind == "admitted" else self.there.remove)(event.key)
        assert self.there == {entry.key for entry in self.state.ram.entries() if entry.committed}


def total(state: CacheState, name: str) -> float:
    """Of a counter, over all its labels."""
    return sum(sample.value for sample in state.metrics.samples() if sample.metric.name == name)


def assert_counters_reconcile(state: CacheState) -> None:
    """All laws, exactly."""
    samples = list(state.metrics.samples())
    assert {s.labels[0] for s in samples if s.metric.name == "kvhold_hit_tokens"} <= {
        "ram",
        *state.tier_names,
    }
    assert {
        s.labels[0] for s in samples if s.metric.name == "kvhold_missed_tokens"
    } <= REASONS.keys() - {WHOLE}
    assert all(
        s.value > 0
        for s in samples
        if s.metric.name in ("kvhold_hit_tokens", "kvhold_missed_tokens")
    )
    assert total(state, "kvhold_lookup_tokens") == total(state, "kvhold_hit_tokens") + total(
        state, "kvhold_missed_tokens"
    )

    here = [entry for entry in state.ram.entries() if entry.committed]
    writing = [
        e
        for held in state._leases._holdings.values()
        for reservation in held.reservations.values()
        for entries in reservation.chunks.values()
        for e in entries
    ]
    for unit, now_here, now_writing in (
        ("chunks", len(here), len(writing)),
        ("bytes", sum(entry.nbytes for entry in here), sum(entry.nbytes for entry in writing)),
    ):
        came = total(state, f"kvhold_stored_{unit}") + total(state, f"kvhold_promoted_{unit}")
        went = sum(
            total(state, f"kvhold_{how}_{unit}") for how in ("evicted", "expired", "cleared")
        )
        assert came == went + now_here
        reserved = total(state, f"kvhold_reserved_{unit}")
        assert (
            reserved
            == total(state, f"kvhold_stored_{unit}")
            + total(state, f"kvhold_abandoned_{unit}")
            + now_writing
        )


def finish_chores(state: CacheState) -> None:
    """Do all that goes on in the background: what was cleared is freed in steps."""
    while state.step():
        pass
