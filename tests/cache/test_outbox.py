"""The queue of writes to one tier costs the same for each chunk, however many wait."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvhold.core.keys import KEY_BYTES
from kvhold.core.metrics import Metrics
from kvhold.tiers.guard import Guard
from kvhold.tiers.stack import Stack
from tests.tiers.memory import MemoryTier, a_place

try:
    from kvhold.cache.transfer.commands import WriteCommand
    from kvhold.cache.transfer.tier_worker import TierWorker
    from kvhold.tiers.guard_config import GuardConfig
except ImportError:  # 5f474b0
    from kvhold.cache.mover import Mover as TierWorker  # type: ignore[import-not-found,no-redef]
    from kvhold.cache.orders import WriteOrder as WriteCommand  # type: ignore[import-not-found,no-redef]

    from kvhold.tiers.guard import GuardConfig  # type: ignore[attr-defined]


class CountedEntry:
    """An entry that counts how often its size is read."""

    expires_at, doomed = 0, True
    reads = 0

    def __init__(self, number: int) -> None:
        self.key = number.to_bytes(KEY_BYTES, "big")

    @property
    def nbytes(self) -> int:
        CountedEntry.reads += 1
        return 4096


@pytest.mark.parametrize("num_chunks", [100, 2000])
def test_queueing_and_writing_reads_each_chunk_a_fixed_number_of_times(num_chunks: int) -> None:
    CountedEntry.reads, metrics = 0, Metrics()
    written: list[int] = []
    ram = SimpleNamespace(now=lambda: 0, is_doomed=lambda entry: entry.doomed)
    state: Any = SimpleNamespace(ram=ram, written=written.append)
    with a_place() as place:
        place.hold("probe")  # so that all of them wait at once
        guard = Guard(
            MemoryTier(place),
            GuardConfig(probe_timeout_s=60, batch_bytes=64 << 10),
            name="memory",
            metrics=metrics,
        )
        tier_worker = TierWorker(state, Stack([guard]), metrics, lambda event: event())
        entries: list[Any] = [CountedEntry(number) for number in range(num_chunks)]
        layout: Any = None
        tier_worker.submit(
            [WriteCommand(number, entry, layout) for number, entry in enumerate(entries)]
        )
        place.wait_for("probe", 3)
        assert metrics.value("kvhold_tier_queued_chunks", tier="memory") == num_chunks
        assert metrics.value("kvhold_tier_queued_bytes", tier="memory") == 4096 * num_chunks
        place.let_go("probe")
        tier_worker.close(drain_timeout_s=60)
    assert sorted(written) == list(range(num_chunks))
    assert (
        metrics.value("kvhold_tier_queued_chunks", tier="memory")
        == metrics.value("kvhold_tier_queued_bytes", tier="memory")
        == 0
    )
    assert CountedEntry.reads <= 8 * num_chunks
