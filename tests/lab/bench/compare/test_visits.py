"""The workloads of `kvhold bench compare`: who is visited when, and with which text."""

from itertools import pairwise
from pathlib import Path

import pytest

from kvhold_lab.bench.compare import visits as visits_module
from kvhold_lab.bench.compare.visits import (
    BURST,
    OWN_PROMPTS,
    REUSE_PERCENT,
    WORKLOADS,
    Visit,
    VisitTexts,
    held_prompts,
    seconds_left,
    visits,
)

ROUNDS = 3


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_document_is_visited_first_and_then_as_often_as_any_other(name: str) -> None:
    workload = WORKLOADS[name]
    planned = list(visits(workload, rounds=ROUNDS))
    first = [visit for visit in planned if not visit.counts]
    assert planned[: len(first)] == first
    assert [visit.documents for visit in first] == [
        (number,) for number in range(workload.num_documents)
    ]
    asked = [number for visit in planned if not visit.asked for number in visit.documents]
    # so between two visits of one are all the others
    assert asked == [at % workload.num_documents for at in range(len(asked))]
    counted = [
        (visit.reuse, visit.is_burst) for visit in planned if visit.counts and not visit.asked
    ]
    assert counted == [
        (reuse, burst) for reuse in REUSE_PERCENT for _ in range(ROUNDS) for burst in (False, True)
    ]
    within = [(visit.reuse, visit.is_burst) for visit in planned if visit.asked]
    assert within == [(0, False), (0, True)] * ROUNDS


def test_sets_are_multiples_of_what_an_engine_holds() -> None:
    assert {name: workload.num_documents / OWN_PROMPTS for name, workload in WORKLOADS.items()} == {
        "0.5x": 0.5,
        "2x": 2,
        "8x": 8,
    }
    assert [workload.title for workload in WORKLOADS.values()] == [
        "working set 0.5x",
        "working set 2x",
        "working set 8x",
    ]
    largest = WORKLOADS["8x"].num_documents
    assert (
        held_prompts(list(WORKLOADS.values())) == held_prompts([WORKLOADS["8x"]]) >= largest + BURST
    )
    assert held_prompts([WORKLOADS["2x"]]) < largest


def test_a_prompt_begins_with_a_part_of_its_document_and_goes_on_as_none_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        visits_module, "make_prompt", lambda path, num_tokens, seed: [seed] * num_tokens
    )
    texts, ends = VisitTexts(Path(), 40), set()
    for name in WORKLOADS:
        beginnings: dict[int, int] = {}
        for visit in visits(WORKLOADS[name], rounds=ROUNDS):
            for number, prompt in zip(visit.documents, texts.prompts(name, visit), strict=True):
                known = 40 * visit.reuse // 100
                assert len(prompt) == 40
                assert (
                    set(prompt[:known]) <= {beginnings.setdefault(number, prompt[0])} or not known
                )
                if known < 40:
                    assert len(set(prompt[known:])) == 1 and prompt[-1] not in ends
                    ends.add(prompt[-1])
        assert len(set(beginnings.values())) == WORKLOADS[name].num_documents
        assert not set(beginnings.values()) & ends


def test_shares_fall_so_that_what_is_asked_for_was_part_of_each_visit_before() -> None:
    assert all(before > after for before, after in pairwise(REUSE_PERCENT))


def test_what_is_left_takes_as_long_as_what_was_done_by_what_is_computed() -> None:
    hit, miss = Visit(100, (0,)), Visit(0, (0,))
    assert seconds_left([], [hit]) == 0
    assert seconds_left([(miss, 2.0)], [miss, miss]) == pytest.approx(4.0)
    assert seconds_left([(miss, 2.0)], [hit]) == pytest.approx(0.4)
    assert seconds_left([(miss, 2.0)], [Visit(0, (0, 1))]) == pytest.approx(4.0)
    assert seconds_left([(Visit(100, (0,), counts=False), 2.0)], [miss]) == pytest.approx(2.0)
