"""The values that a tier holds and that must not be found: `hidden.hides(key)`.

There are two kinds:

- *Owed*: the value was cleared but is not removed yet, for example because the tier was away. It is
  removed when the tier is back.
- *Unreadable*: the tier has the value but cannot read it (a bad sector). It is hidden so that a
  tier below can deliver its copy.

Both are kept for the life of the process. The journal of clears (`journal.py`) keeps owed clears
through a restart.

A pending clear of a prefix is called a *debt*. Each debt has a number, so that a removal for an
earlier debt of a prefix does not settle a later one. A debt is *due* when the writes that were
under way at its start have ended: an earlier removal would miss the values that they write.
"""

from collections import OrderedDict
from typing import NamedTuple

_MOST_UNREADABLE = 10_000


class Debt(NamedTuple):
    """A pending clear: remove all values with a prefix.

    prefix: of the keys; empty: all keys
    number: of this debt
    """

    prefix: bytes
    number: int


class Hidden:
    """The hidden keys of one tier. Does no I/O."""

    def __init__(self) -> None:
        self._owed: dict[bytes, int] = {}  # prefix -> number of its latest debt
        self._due: dict[bytes, int] = {}  # prefix -> number of the latest debt that is due
        self._lengths: set[int] = set()  # of all prefixes that ever had a debt
        self._num_debts = 0
        self._unreadable: OrderedDict[bytes, None] = OrderedDict()

    @property
    def owed(self) -> list[bytes]:
        """The prefixes that have a debt, the oldest first."""
        return list(self._owed)

    @property
    def all_due(self) -> list[bytes]:
        """The prefixes that have a due debt, the oldest first."""
        return [prefix for prefix in self._owed if prefix in self._due]

    def owe(self, prefix: bytes) -> int:
        """Add a debt for all values with this prefix. Return its number."""
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
        """Allow a debt, and earlier debts of its prefix, to be paid from now on."""
        if prefix in self._owed:
            self._due[prefix] = max(debt, self._due.get(prefix, 0))

    def due(self, prefix: bytes) -> int:
        """Return the number of the prefix's latest due debt; 0 if none is due."""
        return self._due.get(prefix, 0)

    def debt(self, prefix: bytes) -> int:
        """Return the number of the prefix's latest debt; 0 if it has none."""
        return self._owed.get(prefix, 0)

    def paid(self, prefix: bytes, debt: int) -> None:
        """Settle a debt: the values that were there at its start are removed."""
        if self._owed.get(prefix) == debt:
            del self._owed[prefix]
        if self._due.get(prefix, 0) <= debt:
            self._due.pop(prefix, None)

    def unreadable(self, key: bytes) -> None:
        """Hide a value that the tier has but cannot read."""
        self._unreadable[key] = None
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.popitem(last=False)

    def removed(self, key: bytes) -> None:
        """Note that the tier has removed an unreadable value."""
        self._unreadable.pop(key, None)

    def mended(self) -> None:
        """Forget unreadable values: the tier was away and may be another disk now."""
        self._unreadable.clear()

    def hides(self, key: bytes) -> bool:
        """Return whether a value of this key must not be found."""
        return key in self._unreadable or (
            bool(self._owed) and any(key[:length] in self._owed for length in self._lengths)
        )
