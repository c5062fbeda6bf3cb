from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhold.core.holdings import Holding

if TYPE_CHECKING:
    from kvhold.core.api import Hit


@dataclass(frozen=True)
class HeldSpan:
    """number: of its query"""

    number: int
    hit: "Hit"

    @property
    def num_tokens(self) -> int:
        """From the span's start."""
        return self.hit.num_tokens


class HeldSpans(Holding):
    """Longest first. Each ticket is valid until this closes."""

    def __init__(self, hits: "Sequence[Hit]") -> None:
        super().__init__(self._close_all)
        self._hits = hits

    def __iter__(self) -> Iterator[HeldSpan]:
        return iter(self._held())

    def __len__(self) -> int:
        return len(self._held())

    @property
    def arriving(self) -> bool:
        """Spans may still grow, or appear."""
        return any(hit.arriving for hit in self._hits)

    def hit_of(self, number: int) -> "Hit":
        """number: of a query, also of a span that is not held"""
        return self._hits[number]

    def refresh(self) -> None:
        for hit in self._hits:
            hit.refresh()

    def settle(self) -> None:
        for hit in self._hits:
            hit.settle()

    def wait(self, until_s: float) -> None:
        """As `Hit.wait`, for all."""
        for hit in self._hits:
            hit.wait(until_s)

    def _held(self) -> list[HeldSpan]:
        held = [HeldSpan(number, hit) for number, hit in enumerate(self._hits) if hit.num_tokens]
        return sorted(held, key=lambda span: -span.num_tokens)

    def _close_all(self) -> None:
        with ExitStack() as hits:
            for hit in self._hits:
                hits.callback(hit.close)
