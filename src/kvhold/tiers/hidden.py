"""The values that a tier holds and that must not be found: `hidden.hides(key)`.

- *Owed*: cleared but not removed yet. `journal.py` keeps these through a restart.
- *Unreadable* (a bad sector): hidden so that a tier below can deliver its copy.

A *debt* is a pending clear of a prefix. Its number keeps an earlier removal from settling a later
debt. It is *due* when the writes that ran at its start have ended: an earlier removal would miss
their values.
"""

from collections import OrderedDict
from typing import NamedTuple

_MOST_UNREADABLE = 10_000


class Debt(NamedTuple):
    """Remove all values with a prefix, b"" for all keys."""

    prefix: bytes
    number: int


class Hidden:
    def __init__(self) -> None:
        self._owed: dict[bytes, int] = {}
        self._due: dict[bytes, int] = {}
        self._lengths: set[int] = set()
        self._num_debts = 0
        self._unreadable: OrderedDict[bytes, None] = OrderedDict()

    @property
    def owed(self) -> list[bytes]:
        return list(self._owed)

    @property
    def all_due(self) -> list[bytes]:
        return [prefix for prefix in self._owed if prefix in self._due]

    def owe(self, prefix: bytes) -> int:
        self._num_debts += 1
        self._owed[prefix] = self._num_debts
        self._lengths.add(len(prefix))
        return self._num_debts

    def owe_everything_instead(self) -> int:
        """Replace all debts by one debt for all values. Return its number."""
        self._owed.clear()
        self._due.clear()
        return self.owe(b"")

    def fall_due(self, prefix: bytes, debt: int) -> None:
        """Allow a debt, and earlier debts of its prefix, to be paid."""
        if prefix in self._owed:
            self._due[prefix] = max(debt, self._due.get(prefix, 0))

    def due(self, prefix: bytes) -> int:
        """0 if none is due."""
        return self._due.get(prefix, 0)

    def debt(self, prefix: bytes) -> int:
        """0 without a debt."""
        return self._owed.get(prefix, 0)

    def paid(self, prefix: bytes, debt: int) -> None:
        """Settle a debt: the values that were there at its start are removed."""
        if self._owed.get(prefix) == debt:
            del self._owed[prefix]
        if self._due.get(prefix, 0) <= debt:
            self._due.pop(prefix, None)

    def unreadable(self, key: bytes) -> None:
        self._unreadable[key] = None
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.popitem(last=False)

    def removed(self, key: bytes) -> None:
        self._unreadable.pop(key, None)

    def mended(self) -> None:
        """After an outage, the tier may be another disk."""
        self._unreadable.clear()

    def hides(self, key: bytes) -> bool:
        return key in self._unreadable or (
            bool(self._owed) and any(key[:length] in self._owed for length in self._lengths)
        )
