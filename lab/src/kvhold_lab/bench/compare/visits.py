"""Stages of visits to documents.

Shares of reuse fall, so earlier visits had the reused part.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhold_lab.bench.compare import names
from kvhold_lab.engines.prompts import make_prompt

OWN_PROMPTS = 2
REUSE_PERCENT = (100, 75, 50, 25, 0)
BURST = 2
TOKENS_PER_BLOCK = 128
WITHIN = (names.key(names.KVHOLD, "ram"), names.LEFT_ALONE, names.LEFT_AGAIN)
VISITING = (
    names.RECOMPUTE,
    names.PLAIN,
    names.AGAIN,
    names.OFFLOADING,
    names.KVHOLD,
    names.ALONE,
    names.LMCACHE,
    names.LEFT_ALONE,
    names.LEFT_AGAIN,
)

_FIRST_DOCUMENT = 1_000_000
_ALL_ASKED = 12


@dataclass(frozen=True)
class VisitWorkload:
    """A multiple of the engine's own KV memory."""

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
    """reuse:   per cent of a prompt, from its document
    asked:   systems; empty: all but copies of the kvhold engine
    forgets: all engines but the limit first clear their prefix cache
    """

    reuse: int
    documents: tuple[int, ...]
    counts: bool = True
    asked: tuple[str, ...] = ()
    forgets: bool = False

    @property
    def is_burst(self) -> bool:
        return len(self.documents) > 1


@dataclass(frozen=True)
class VisitStage:
    workload: str
    what: str
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class ComparePlan:
    """held_prompts:  prompts that a connector in "ram" holds
    strict:        a failure or another answer ends the run
    settles:       wait for each system to rest
    """

    command: str
    systems: tuple[str, ...]
    stages: tuple[VisitStage, ...]
    held_prompts: int
    output_tokens: int
    tiers: tuple[str, ...] = ("ram",)
    strict: bool = False
    settles: bool = True
    page_cache: bool = False

    @property
    def most_reuse(self) -> int:
        return max(visit.reuse for stage in self.stages for visit in stage.visits)


def visiting(
    workloads: Sequence[VisitWorkload],
    *,
    rounds: int,
    tiers: tuple[str, ...],
    page_cache: bool = False,
) -> ComparePlan:
    stages = []
    for workload in workloads:
        planned = list(visits(workload, rounds=rounds))
        first = tuple(visit for visit in planned if not visit.counts)
        stages.append(VisitStage(workload.title, "first visits", first))
        for reuse in REUSE_PERCENT:
            counted = tuple(visit for visit in planned if visit.counts and visit.reuse == reuse)
            stages.append(VisitStage(workload.title, f"{reuse} % reuse", counted))
    return ComparePlan(
        "compare",
        VISITING,
        tuple(stages),
        held_prompts=held_prompts(workloads),
        output_tokens=4,
        tiers=tiers,
        page_cache=page_cache,
    )


def visits(workload: VisitWorkload, *, rounds: int) -> Iterator[Visit]:
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
                    yield Visit(reuse, documents, asked=WITHIN, forgets=True)


def held_prompts(workloads: Sequence[VisitWorkload]) -> int:
    return max(workload.num_documents for workload in workloads) * 3 // 2 + 2 * BURST


def seconds_left(done: Sequence[tuple[Visit, float]], left: Sequence[Visit]) -> float:
    weight = work([visit for visit, _ in done])
    return sum(seconds for _, seconds in done) / weight * work(left) if weight else 0.0


def work(visits: Iterable[Visit]) -> float:
    return sum(map(_weight, visits))


def _weight(visit: Visit) -> float:
    reuse = visit.reuse if visit.counts else 0
    of_systems = len(visit.asked) / _ALL_ASKED if visit.asked else 1
    return len(visit.documents) * (1 - 0.8 * reuse / 100) * of_systems


class VisitTexts:
    def __init__(self, model_path: Path, num_tokens: int) -> None:
        self._path = model_path
        self._num_tokens = num_tokens
        self._made = 0
        self._documents: dict[tuple[str, int], list[int]] = {}

    def prompts(self, workload: str, visit: Visit) -> list[list[int]]:
        num_known = self._num_tokens * visit.reuse // 100
        return [
            (self._document(workload, number)[:num_known] if num_known else [])
            + self._new(self._num_tokens - num_known)
            for number in visit.documents
        ]

    def _document(self, workload: str, number: int) -> list[int]:
        document = self._documents.get((workload, number))
        if document is None:
            document = self._documents[workload, number] = make_prompt(
                self._path, self._num_tokens, seed=_FIRST_DOCUMENT + len(self._documents)
            )
        return document

    def _new(self, num_tokens: int) -> list[int]:
        self._made += 1
        return make_prompt(self._path, num_tokens, seed=self._made)
