"""The workloads: documents visited in a circle, each time followed by other text.

A set half as large as an engine's KV memory is still there at the next visit, one twice as large
never is. Shares of reuse fall, so the reused part was in all earlier visits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhold_lab.engines.prompts import make_prompt

OWN_PROMPTS = 2
REUSE_PERCENT = (100, 75, 50, 25, 0)
BURST = 2
TOKENS_PER_BLOCK = 128

_FIRST_DOCUMENT = 1_000_000
_DOCUMENTS_APART = 1_000


@dataclass(frozen=True)
class VisitWorkload:
    """A working set, as a multiple of the engine's own KV memory."""

    name: str
    factor: float

    @property
    def title(self) -> str:
        return f"working set {self.name}"

    @property
    def num_documents(self) -> int:
        return max(1, round(self.factor * OWN_PROMPTS))


WORKLOADS = {
    name: VisitWorkload(name, factor) for name, factor in (("0.5x", 0.5), ("2x", 2.0), ("8x", 8.0))
}


@dataclass(frozen=True)
class Visit:
    """One cell.

    reuse: per cent of a prompt that comes from its document
    counts: False: a first visit, not timed
    within: asked of one engine in several ways
    """

    reuse: int
    documents: tuple[int, ...]
    counts: bool = True
    within: bool = False

    @property
    def is_burst(self) -> bool:
        return len(self.documents) > 1


def visits(workload: VisitWorkload, *, rounds: int) -> Iterator[Visit]:
    """Visit each document once, then `rounds` prompts and bursts for each share."""
    for document in range(workload.num_documents):
        yield Visit(100, (document,), counts=False)
    at = 0
    for reuse in REUSE_PERCENT:
        for _ in range(rounds):
            for size in (1, BURST):
                documents = tuple((at + number) % workload.num_documents for number in range(size))
                at += size
                yield Visit(reuse, documents)
                if not reuse:
                    yield Visit(reuse, documents, within=True)


def held_prompts(workloads: Sequence[VisitWorkload]) -> int:
    return max(workload.num_documents for workload in workloads) * 3 // 2 + 2 * BURST


def seconds_left(done: Sequence[tuple[Visit, float]], left: Sequence[Visit]) -> float:
    weight = work([visit for visit, _ in done])
    return sum(seconds for _, seconds in done) / weight * work(left) if weight else 0.0


def work(visits: Iterable[Visit]) -> float:
    return sum(map(_weight, visits))


def _weight(visit: Visit) -> float:
    reuse = visit.reuse if visit.counts else 0
    return len(visit.documents) * (1 - 0.8 * reuse / 100) * (0.25 if visit.within else 1)


class VisitTexts:
    def __init__(self, model_path: Path, num_tokens: int) -> None:
        self._path = model_path
        self._num_tokens = num_tokens
        self._made = 0
        self._documents: dict[int, list[int]] = {}

    def prompts(self, workload: VisitWorkload, visit: Visit) -> list[list[int]]:
        num_known = self._num_tokens * visit.reuse // 100
        return [
            self._document(workload, number)[:num_known] + self._new(self._num_tokens - num_known)
            for number in visit.documents
        ]

    def _document(self, workload: VisitWorkload, number: int) -> list[int]:
        seed = _FIRST_DOCUMENT + list(WORKLOADS).index(workload.name) * _DOCUMENTS_APART + number
        if seed not in self._documents:
            self._documents[seed] = make_prompt(self._path, self._num_tokens, seed=seed)
        return self._documents[seed]

    def _new(self, num_tokens: int) -> list[int]:
        self._made += 1
        return make_prompt(self._path, num_tokens, seed=self._made)
