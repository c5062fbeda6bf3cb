"""Admissions to memory and removals, as a numbered stream of the latest events, for indexes.

    log = EventLog(100_000); log.add("admitted", entry)
    log.after(number)                     # the events since; and whether some are lost

Numbers begin at a random value, so that a number of an earlier run or of another cache is never
mistaken for one of this cache. Such a number is *lost*: the index starts again from a snapshot.
Pure; its cache is the single writer.
"""

from collections.abc import Iterable
from secrets import randbits

from kvhold.core.api import Event, EventBatch
from kvhold.tiers.ram import Entry

MOST = 500  # in one batch: making and sending it holds the loop for a millisecond


class EventLog:
    """A bounded buffer of events."""

    def __init__(self, limit: int) -> None:
        """Make an empty log of at most `limit` events."""
        self._limit = limit
        self._ring: list[Event] = []  # the event with number n stands at (n - first) % limit
        self._first = 0
        self._last = randbits(48)

    @property
    def last(self) -> int:
        """The number of the newest event."""
        return self._last

    def add(self, kind: str, entry: Entry) -> None:
        """Add an event."""
        self._last += 1
        event = event_of(kind, entry, self._last)
        if len(self._ring) < self._limit:
            if not self._ring:
                self._first = self._last
            self._ring.append(event)
        else:
            self._ring[(self._last - self._first) % self._limit] = event

    def after(self, number: int) -> EventBatch:
        """Return the events after `number`, the oldest first, MOST at most."""
        new = self._last - number
        if not 0 <= new <= len(self._ring):  # forgotten since, or no number of ours
            return EventBatch([], self._last, lost=True)
        if not new:
            return EventBatch([], number)
        begin, count = (number + 1 - self._first) % self._limit, min(new, MOST)
        events = self._ring[begin : begin + count]
        events += self._ring[: count - len(events)]  # round the end
        return EventBatch(events, number + count)


def event_of(kind: str, entry: Entry, number: int) -> Event:
    """Make an event about an entry of memory."""
    return Event(
        number, kind, entry.key, "ram", entry.num_tokens, entry.first_token, entry.parent or b""
    )


def snapshot_of(entries: Iterable[Entry], number: int) -> list[Event]:
    """Return entries as if each had been admitted just before event `number + 1`."""
    return [event_of("admitted", entry, number) for entry in entries]
