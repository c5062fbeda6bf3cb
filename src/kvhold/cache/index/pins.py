"""Pins, holds and unpins entries in steps. A pin counts as a use, a hold does not."""

from collections.abc import Callable, Iterator

from kvhold.cache.chores import Chores, Turns, is_short
from kvhold.cache.index.presence import Prefix
from kvhold.tiers.ram import Entry, RamTier

_MOST_PINS = 64  # per step
_MOST_AT_ONCE = 1000


class Pins:
    def __init__(self, ram: RamTier, chores: Chores) -> None:
        self._ram = ram
        self._chores = chores

    def finder(self, num_keys: int, held: list[Entry]) -> Callable[[bytes], Entry | None]:
        """If the finder takes several steps, found entries are held and added to `held`."""
        return self._ram.find if is_short(num_keys) else self._find_and_hold(held)

    def pin_turns(self, entries: list[Entry]) -> Turns[None]:
        """Pin the last entry first (see `Reservations.commit_turns`).

        A short list is held before the first step.
        """
        if is_short(len(entries)):
            self._ram.hold_all(entries)
            try:
                yield len(entries) // 2
            except GeneratorExit:
                self._ram.unpin_all(entries)
                raise
            self._ram.touch_all(entries[::-1])
            return
        left = len(entries)
        try:
            while left:
                part = entries[max(0, left - _MOST_PINS) : left]
                self._ram.pin_all(part[::-1])
                left -= len(part)
                if left:
                    yield len(part)
        finally:
            if left:
                self.unpin(entries[left:])

    def hold_turns(self, prefix: Prefix[Entry]) -> Turns[list[Entry]]:
        entries = yield from prefix.in_order_turns()
        num_held = 0
        try:
            while num_held < len(entries):
                part = entries[num_held : num_held + _MOST_PINS]
                self._ram.hold_all(part)
                num_held += len(part)
                yield len(part) // 4
        except GeneratorExit:
            self.unpin(entries[:num_held])
            raise
        return entries

    def unpin(self, entries: list[Entry]) -> None:
        if len(entries) <= _MOST_AT_ONCE:
            self._ram.unpin_all(entries)
        else:
            self._chores.add(self._unpin_turns(entries))

    def _find_and_hold(self, held: list[Entry]) -> Callable[[bytes], Entry | None]:
        def find(key: bytes) -> Entry | None:
            entry = self._ram.find(key)
            if entry is not None:
                self._ram.hold(entry)
                held.append(entry)
            return entry

        return find

    def _unpin_turns(self, entries: list[Entry]) -> Iterator[int]:
        while entries:
            part = entries[-_MOST_PINS:]
            del entries[-_MOST_PINS:]
            self._ram.unpin_all(part)
            yield len(part) // 3
