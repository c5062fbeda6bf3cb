"""What a tier holds and nobody is to see: `hidden.hides(key)`.

Two kinds. What was cleared while the tier could not be reached is *owed*: it is not found there any more, and removed when the tier is
back. A value that the tier has but cannot give (a bad sector) is *unreadable*: not found there either, so that a tier below can give its
own. Both live as long as the process: a tier that was away when it ended still holds what was owed.
"""

from collections import OrderedDict

_MOST_UNREADABLE = 10_000


class Hidden:
    """Of one tier. Pure."""

    def __init__(self) -> None:
        self._owed: dict[bytes, None] = {}
        self._unreadable: OrderedDict[bytes, None] = OrderedDict()

    @property
    def owed(self) -> list[bytes]:
        """Prefixes of keys that are still to be removed, the oldest first."""
        return list(self._owed)

    def owe(self, prefix: bytes) -> None:
        """All with this prefix is to go."""
        self._owed[prefix] = None

    def paid(self, prefix: bytes) -> None:
        """All with this prefix has gone."""
        self._owed.pop(prefix, None)

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
        return key in self._unreadable or any(key.startswith(prefix) for prefix in self._owed)
