from collections.abc import Callable

from kvhold.cache.events import EventLog
from kvhold.cache.index.eviction_history import EvictionHistory
from kvhold.core.errors import ConfigError
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import CLEARED, REASONS, Reason
from kvhold.tiers.ram import Entry


class Changes:
    def __init__(self, metrics: Metrics, evictions: EvictionHistory, event_buffer: int) -> None:
        self._metrics = metrics
        self._evictions = evictions
        self._log = EventLog(event_buffer) if event_buffer else None
        self.watchers: list[Callable[[str, Entry], None]] = []
        """Called with each change, too."""

    @property
    def log(self) -> EventLog:
        """Raises ConfigError without events."""
        if self._log is None:
            raise ConfigError(
                "event_buffer is 0: this cache keeps no events; set it to the number of events "
                "to keep, such as 100000"
            )
        return self._log

    def note(self, what: str, entry: Entry) -> None:
        if self._log is not None:
            self._log.add(what, entry)
        for tell in self.watchers:
            tell(what, entry)
        if what in REASONS:
            self._evictions.add(entry.key, Reason(what))
        if what == CLEARED:
            self._metrics.add("kvhold_cleared_chunks")
            self._metrics.add("kvhold_cleared_bytes", entry.nbytes)
