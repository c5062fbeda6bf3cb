"""The workloads: a set of documents that is visited again and again, each time with other text
behind a part of the document.

    for visit in visits(WORKLOADS["2x"], rounds=5): prompts = texts.prompts(visit)

The documents of a set are visited in a circle, so between two visits of one there is a prompt for
each of the others. A set of half of what the engine's own KV memory holds is still there at the
next visit, one of twice as much never is. Shares of reuse come in falling
order: whatever is asked for of a document was part of all visits of it before. Values only, but for
    the prompts' text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhold.lab.engines.prompts import make_prompt

OWN_PROMPTS = 2  # that an engine's own KV memory holds
REUSE_PERCENT = (100, 75, 50, 25, 0)
BURST = 2  # prompts handed over together
TOKENS_PER_BLOCK = 128  # vLLM's, on CPUs

_FIRST_DOCUMENT = 1_000_000  # seeds; new texts count from 1
_DOCUMENTS_APART = 1_000  # seeds of two workloads


@dataclass(frozen=True)
class Workload:
    """A working set, as a multiple of the engine's own KV memory."""

    name: str
    factor: float

    @property
    def title(self) -> str:
        """As rows have it."""
        return f"working set {self.name}"

    @property
    def num_documents(self) -> int:
        """Prompts of full length that are the set."""
        return max(1, round(self.factor * OWN_PROMPTS))


WORKLOADS = {
    name: Workload(name, factor) for name, factor in (("0.5x", 0.5), ("2x", 2.0), ("8x", 8.0))
}


@dataclass(frozen=True)
class Visit:
    """What is asked for in one cell.

    reuse: per cent of each prompt that is of a document
    documents: the number of each prompt's document; more than one prompt: a burst
    counts: whether its times do; first visits do not
    within: asked of one engine in several ways instead of all engines: what following a request
        costs
    """

    reuse: int
    documents: tuple[int, ...]
    counts: bool = True
    within: bool = False

    @property
    def is_burst(self) -> bool:
        """Several prompts together."""
        return len(self.documents) > 1


def visits(workload: Workload, *, rounds: int) -> Iterator[Visit]:
    """First each document once, then of each share of reuse so many rounds, of a prompt by itself
    and of a burst.
    """
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


def held_prompts(workloads: Sequence[Workload]) -> int:
    """Prompts that a memory must have room for to hold the largest set through all visits, with
    room for what is on its way.
    """
    return max(workload.num_documents for workload in workloads) * 3 // 2 + 2 * BURST


def seconds_left(done: Sequence[tuple[Visit, float]], left: Sequence[Visit]) -> float:
    """How long the visits that are left will take, from how long others took. 0 before the first is
    done.
    """
    weight = work([visit for visit, _ in done])
    return sum(seconds for _, seconds in done) / weight * work(left) if weight else 0.0


def work(visits: Iterable[Visit]) -> float:
    """Of what visits take of each system: as much as computing so many prompts."""
    return sum(map(_weight, visits))


def _weight(visit: Visit) -> float:
    """Of what it takes, relative to others: a prompt that is computed counts as 1."""
    reuse = visit.reuse if visit.counts else 0
    return len(visit.documents) * (1 - 0.8 * reuse / 100) * (0.25 if visit.within else 1)


class Texts:
    """The prompts, all of one length. New text is never met again."""

    def __init__(self, model_path: Path, num_tokens: int) -> None:
        self._path = model_path
        self._num_tokens = num_tokens
        self._made = 0
        self._documents: dict[int, list[int]] = {}

    def prompts(self, workload: Workload, visit: Visit) -> list[list[int]]:
        """Token ids of each prompt of a visit."""
        num_known = self._num_tokens * visit.reuse // 100
        return [
            self._document(workload, number)[:num_known] + self._new(self._num_tokens - num_known)
            for number in visit.documents
        ]

    def _document(self, workload: Workload, number: int) -> list[int]:
        seed = _FIRST_DOCUMENT + list(WORKLOADS).index(workload.name) * _DOCUMENTS_APART + number
        if seed not in self._documents:
            self._documents[seed] = make_prompt(self._path, self._num_tokens, seed=seed)
        return self._documents[seed]

    def _new(self, num_tokens: int) -> list[int]:
        self._made += 1
        return make_prompt(self._path, num_tokens, seed=self._made)
