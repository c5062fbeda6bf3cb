"""Retains that end by their time. A newer one replaces those of its prefixes, so a conversation
does not use up the limits of hints. No I/O, one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from kvhold.core.api import RetainedPrompt
from kvhold.core.keys import HASH_BYTES, Query, split_hashes

_MOST_RETAINS = 2048  # a node grants 1,024 at a time


@dataclass(frozen=True)
class _TimedRetain:
    """tail: hash of the tail that it keeps, or empty"""

    retained: RetainedPrompt
    due_s: float
    tail: bytes


class TimedRetains:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._by_end: dict[bytes, _TimedRetain] = {}

    def __len__(self) -> int:
        return len(self._by_end)

    def add(
        self, query: Query, retained: RetainedPrompt, ttl_s: float, tokens_per_chunk: int
    ) -> list[RetainedPrompt]:
        """Return its prefixes' retains that would not outlive it.

        Their tails are then not kept, unless the chunks before are the same.
        """
        num_chunks, rest = divmod(retained.num_tokens, tokens_per_chunk)
        names = [query.namespace + name for name in split_hashes(query.hashes)][:num_chunks]
        if not names:
            return []
        tail = query.tail_hashes[-HASH_BYTES:] if rest else b""
        new = _TimedRetain(retained, self._clock() + ttl_s, tail)
        needless = []
        for name in names:
            older = self._by_end.get(name)
            if older is None or older.due_s > new.due_s:
                continue
            if name == names[-1] and older.tail not in (b"", tail):
                continue
            needless.append(self._by_end.pop(name).retained)
        self._by_end.setdefault(names[-1], new)
        self._forget_ended()
        return needless

    def _forget_ended(self) -> None:
        if len(self._by_end) > _MOST_RETAINS:
            now_s = self._clock()
            live = {name: one for name, one in self._by_end.items() if one.due_s > now_s}
            self._by_end = live if len(live) <= _MOST_RETAINS else {}
