"""The latest changes of memory, as numbered events. Numbers begin at a random value."""

from collections.abc import Iterable
from secrets import randbits

from kvhold.core.api import Event, EventBatch
from kvhold.tiers.ram import Entry

MOST = 500  # per batch


class EventLog:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ring: list[Event] = []  # event number n is at (n - first) % limit
        self._first = 0
        self._last = randbits(48)

    @property
    def last(self) -> int:
        return self._last

    def add(self, kind: str, entry: Entry) -> None:
        self._last += 1
        event = event_of(kind, entry, self._last)
        if len(self._ring) < self._limit:
            if not self._ring:
                self._first = self._last
            self._ring.append(event)
        else:
            self._ring[(self._last - self._first) % self._limit] = event

    def after(self, number: int) -> EventBatch:
        """Oldest first, at most MOST."""
        new = self._last - number
        if not 0 <= new <= len(self._ring):
            return EventBatch([], self._last, lost=True)
        if not new:
            return EventBatch([], number)
        begin, count = (number + 1 - self._first) % self._limit, min(new, MOST)
        events = self._ring[begin : begin + count]
        events += self._ring[: count - len(events)]
        return EventBatch(events, number + count)


def event_of(kind: str, entry: Entry, number: int) -> Event:
    return Event(
        number, kind, entry.key, "ram", entry.num_tokens, entry.first_token, entry.parent or b""
    )


def snapshot_of(entries: Iterable[Entry], number: int) -> list[Event]:
    return [event_of("admitted", entry, number) for entry in entries]
