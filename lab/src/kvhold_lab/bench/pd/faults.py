"""The faults of `kvhold bench pd`, and the judgement of the answers. No I/O."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

PdProtocol = Literal["nixl", "p2p"]
KVHOLD, NIXL = "kvhold", "nixl"

_HELD = ("pinned_chunks", "arriving_chunks", "clearing_chunks", "announced_chunks")
_MOST_DETAILS = 3


@dataclass(frozen=True)
class PdShape:
    prefill: int = 1
    decode: int = 1

    @property
    def name(self) -> str:
        return f"{self.prefill}P{self.decode}D"


ONE_EACH = PdShape()
SHAPES = {shape.name: shape for shape in (PdShape(p, d) for d in (1, 2) for p in (1, 2))}


@dataclass(frozen=True)
class PdConditions:
    """two_nodes:    prefill and decode engines' nodes are peers"""

    tiny_arena: bool = False
    short_leases: bool = False
    two_nodes: bool = False


USUAL = PdConditions()


@dataclass(frozen=True)
class PdFault:
    """only_kvhold: other connectors lack the part that fails, or the protocol"""

    name: str
    protocol: PdProtocol
    conditions: PdConditions = USUAL
    only_kvhold: bool = False


FAULTS = {
    fault.name: fault
    for fault in (
        PdFault("none", "nixl"),
        PdFault("proxy killed", "nixl"),
        PdFault("client gone", "nixl"),
        PdFault("duplicate legs", "nixl"),
        PdFault("stale legs", "nixl"),
        PdFault("same id", "p2p", only_kvhold=True),
        PdFault("node killed", "nixl", only_kvhold=True),
        PdFault("producer slow", "p2p"),
        PdFault("producer stopped", "p2p"),
        PdFault("producer restarted", "nixl"),
        PdFault("producer killed", "p2p"),
        PdFault("decoder restarted", "p2p"),
        PdFault("decoder killed", "nixl"),
        PdFault("producer evicting", "nixl", PdConditions(tiny_arena=True), only_kvhold=True),
        PdFault("short leases", "p2p", PdConditions(short_leases=True)),
        PdFault("two nodes", "nixl", PdConditions(two_nodes=True), only_kvhold=True),
        PdFault("peer killed", "nixl", PdConditions(two_nodes=True), only_kvhold=True),
    )
}


@dataclass(frozen=True)
class PdAnswer:
    """tokens:   those before an error
    may_fail: its engine was gone
    """

    number: int
    tokens: list[int]
    seconds: float
    error: str = ""
    may_fail: bool = False


@dataclass(frozen=True)
class PdFaultRow:
    """errors_allowed:  those whose engine was gone
    deadline_missed: late answers and errors
    leaked:          held by nodes at the end, and engines that hold blocks
    handed_tokens:   loaded by the decode engine; null: it was restarted
    was_made:        the fault came in time
    """

    fault: str
    system: str
    requests: int
    wrong: int
    errors: int
    deadline_missed: int
    leaked: int
    errors_allowed: int = 0
    handed_tokens: int | None = None
    detail: str = ""
    was_made: bool = True

    @property
    def is_clean(self) -> bool:
        """Right as far as the fault came."""
        return (
            not (self.wrong or self.deadline_missed or self.leaked)
            and self.errors <= self.errors_allowed
        )

    @property
    def is_right(self) -> bool:
        return self.was_made and self.is_clean


def judge(
    fault: str,
    system: str,
    answers: Sequence[PdAnswer],
    expected: Mapping[int, Sequence[int]],
    *,
    deadline_s: float,
    held: Mapping[str, int],
    notes: Sequence[str] = (),
    handed_tokens: int | None = None,
) -> PdFaultRow:
    """expected: tokens of one engine alone, by the request's number
    notes:    why the fault did not come in time
    """
    failed = [answer for answer in answers if answer.error]
    wrong = [answer for answer in answers if not _is_right(answer, expected[answer.number])]
    unexpected = [answer for answer in failed if not answer.may_fail]
    details = [
        *notes,
        *(f"request {answer.number}: {answer.error}" for answer in unexpected[:_MOST_DETAILS]),
        *(
            f"request {answer.number}: {answer.tokens} is not {list(expected[answer.number])}"
            for answer in wrong[:_MOST_DETAILS]
        ),
        *(f"{count} {kind}" for kind, count in held.items() if count),
    ]
    return PdFaultRow(
        fault,
        system,
        len(answers),
        len(wrong),
        len(failed),
        sum(answer.seconds > deadline_s for answer in answers),
        sum(held.values()),
        errors_allowed=len(failed) - len(unexpected),
        handed_tokens=handed_tokens,
        detail="; ".join(details),
        was_made=not notes,
    )


def count_held(statuses: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    held = Counter[str]()
    for status in statuses:
        held.update({**status["held"], **{name: status[name] for name in _HELD}})
    return {kind: count for kind, count in held.items() if count}


def failed_rows(rows: Iterable[PdFaultRow]) -> list[PdFaultRow]:
    return [row for row in rows if row.system == KVHOLD and not row.is_right]


def by_conditions(
    names: Iterable[str], system: str
) -> Iterator[tuple[PdConditions, list[PdFault]]]:
    chosen = [
        fault
        for name, fault in FAULTS.items()
        if name in set(names) and (system == KVHOLD or not fault.only_kvhold)
    ]
    for conditions, faults in groupby(chosen, lambda fault: fault.conditions):
        yield conditions, list(faults)


def _is_right(answer: PdAnswer, expected: Sequence[int]) -> bool:
    if answer.error:
        return answer.tokens == list(expected[: len(answer.tokens)])
    return answer.tokens == list(expected)
