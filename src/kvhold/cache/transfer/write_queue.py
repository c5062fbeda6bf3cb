"""A bounded queue of chunks for lower tiers; a full one drops new chunks. No I/O."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from kvhold.cache.transfer.commands import Command, WriteCommand
from kvhold.core.layout import Layout
from kvhold.core.metrics import Metrics
from kvhold.core.sizes import format_size
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.tiers.ram import Entry, RamTier

log = logging.getLogger(__name__)


class WriteQueue:
    def __init__(
        self,
        ram: RamTier,
        metrics: Metrics,
        give_command: Callable[[Command], None],
        *,
        limit_bytes: int,
    ) -> None:
        self._ram = ram
        self._metrics = metrics
        self._give_command = give_command
        self.limit_bytes = limit_bytes
        # oldest first; a plain dict finds its first key slowly
        self._held: OrderedDict[int, Entry] = OrderedDict()
        self._last = 0
        self._dropping = False
        self.queued_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def mark(self) -> int:
        return self._last

    def all_done(self, mark: int) -> bool:
        return not self._held or next(iter(self._held)) > mark

    def add(
        self,
        entry: Entry,
        layout: Layout | None,
        store_options: StoreOptions = DEFAULT_OPTIONS,
        *,
        above: int | None = None,
    ) -> None:
        if self._ram.is_doomed(entry):
            return
        if self.queued_bytes + entry.nbytes > self.limit_bytes:
            self._drop()
            return
        self._ram.hold(entry)
        self._last += 1
        self._held[self._last] = entry
        self.queued_bytes += entry.nbytes
        self._give_command(WriteCommand(self._last, entry, layout, store_options, above))

    def done(self, number: int) -> None:
        entry = self._held.pop(number)
        self.queued_bytes -= entry.nbytes
        self._ram.unpin(entry)
        if self.queued_bytes < self.limit_bytes // 2:
            self._dropping = False

    def _drop(self) -> None:
        self._metrics.add("kvhold_tier_dropped_chunks", tier="all", reason="queue full")
        if not self._dropping:
            log.warning(
                "lower tiers do not keep up: %s wait to be written, so new chunks are dropped",
                format_size(self.queued_bytes),
            )
        self._dropping = True
