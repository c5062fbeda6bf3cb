"""What a tier holds and nobody is to see: `hidden.hides(key)`.

Two kinds. What was cleared while the tier could not be reached is *owed*: it is not found there any more, and removed when the tier is
back. A value that the tier has but cannot give (a bad sector) is *unreadable*: not found there either, so that a tier below can give its
own. Both live as long as the process; the journal of clears (`journal.py`) remembers what is owed.
Each debt has a number: whoever pays an earlier debt of a prefix has not paid a later one. A debt falls *due* when the writes that were
under way when it was made have ended. A removal before that would miss what they write.
"""

from collections import OrderedDict
from typing import NamedTuple

_MOST_UNREADABLE = 10_000


class Debt(NamedTuple):
    """What one clear is to remove: all with a prefix. number: of the debt."""

    prefix: bytes
    number: int


class Hidden:
    """Of one tier. Pure."""

    def __init__(self) -> None:
        self._owed: dict[bytes, int] = {}  # prefix -> number of its latest debt
        self._due: dict[bytes, int] = {}  # prefix -> number of the latest debt that is due
        self._lengths: set[int] = set()  # of prefixes that were ever owed
        self._num_debts = 0
        self._unreadable: OrderedDict[bytes, None] = OrderedDict()

    @property
    def owed(self) -> list[bytes]:
        """Prefixes of keys that are still to be removed, the oldest first."""
        return list(self._owed)

    @property
    def all_due(self) -> list[bytes]:
        """Prefixes of which something may be removed now, the oldest debt first."""
        return [prefix for prefix in self._owed if prefix in self._due]

    def owe(self, prefix: bytes) -> int:
        """All with this prefix is to go. Returns the number of the debt."""
        self._num_debts += 1
        self._owed[prefix] = self._num_debts
        self._lengths.add(len(prefix))
        return self._num_debts

    def owe_everything_instead(self) -> int:
        """One debt of all in the place of all debts of prefixes. Returns its number."""
        self._owed.clear()
        self._due.clear()
        return self.owe(b"")

    def fall_due(self, prefix: bytes, debt: int) -> None:
        """A debt may be paid from now on, and so may those of the prefix before it."""
        if prefix in self._owed:
            self._due[prefix] = max(debt, self._due.get(prefix, 0))

    def due(self, prefix: bytes) -> int:
        """The number of a prefix's latest debt that is due; 0 if none is."""
        return self._due.get(prefix, 0)

    def debt(self, prefix: bytes) -> int:
        """The number of a prefix's latest debt; 0 if it owes none."""
        return self._owed.get(prefix, 0)

    def paid(self, prefix: bytes, debt: int) -> None:
        """All with this prefix that was there when the debt was made has gone."""
        if self._owed.get(prefix) == debt:
            del self._owed[prefix]
        if self._due.get(prefix, 0) <= debt:
            self._due.pop(prefix, None)

    def unreadable(self, key: bytes) -> None:
        """The tier has it and cannot give it."""
        self._unreadable[key] = None
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.popitem(last=False)

    def removed(self, key: bytes) -> None:
        """The tier has it no more."""
        self._unreadable.pop(key, None)

    def mended(self) -> None:
        """The tier was away and is back: it may be another disk."""
        self._unreadable.clear()

    def hides(self, key: bytes) -> bool:
        """Whether a value of this key is not to be seen."""
        return key in self._unreadable or (bool(self._owed) and any(key[:length] in self._owed for length in self._lengths))
