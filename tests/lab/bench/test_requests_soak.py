"""The soak of random requests without engines: what is asked, and how answers are judged."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("torch")  # checkpoints need it
pytest.importorskip("transformers")

from kvhold_lab.bench.soak.requests import Requests, SoakAnswer, _report, _Soak
from kvhold_lab.bench.soak.texts import Texts, TextShape
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.verify.messages import VerifyArrival, VerifyServed

SHAPE = TextShape(block=32, chunk=64, limit=448)
VOCABULARY = range(10, 250)
LOADED = {"request": "a", "compared": 3, "wrong": [], "unknown": [], "in_part": False}


class TestTexts:
    def drawn(self, seed: int, count: int = 400) -> list[list[int]]:
        texts = Texts(random.Random(seed), VOCABULARY, SHAPE)
        prompts = []
        for _ in range(count):
            prompts.append(texts.prompt())
            texts.answered(prompts[-1], [1, 2, 3])
        return prompts

    def test_the_same_seed_gives_the_same_prompts_and_another_one_others(self) -> None:
        assert self.drawn(1) == self.drawn(1) != self.drawn(2)

    def test_lengths_are_from_one_to_the_limit_and_meet_each_side_of_blocks_and_chunks(
        self,
    ) -> None:
        lengths = {len(prompt) for prompt in self.drawn(1, 1000)}
        assert min(lengths) < SHAPE.block
        assert max(lengths) == SHAPE.limit
        assert {length % SHAPE.block for length in lengths} == set(range(SHAPE.block))
        assert {0, 1, SHAPE.chunk - 1} <= {
            length % SHAPE.chunk for length in lengths if length > 2 * SHAPE.chunk
        }

    def test_prompts_come_again_go_on_after_answers_and_branch_anywhere(self) -> None:
        prompts = self.drawn(1, 1000)
        assert len(set(map(tuple, prompts))) < 0.9 * len(prompts), "some come again"
        # 1, 2 and 3 are not in the vocabulary
        answered = {(*prompt, 1, 2, 3) for prompt in prompts}
        assert (
            sum(
                any(tuple(prompt[:n]) in answered for n in range(4, len(prompt)))
                for prompt in prompts
            )
            > 50
        )
        shared = [
            max(self.common(prompt, other) for other in prompts[max(0, at - 8) : at])
            for at, prompt in enumerate(prompts)
            if at
        ]
        within = [n for prompt, n in zip(prompts[1:], shared, strict=True) if 0 < n < len(prompt)]
        assert sum(1 for n in within if n >= SHAPE.chunk) > 200
        assert len({n % SHAPE.chunk for n in within}) > 50, "not only at edges"

    def common(self, one: Sequence[int], other: Sequence[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )


def test_an_answer_reaches_to_its_first_near_tie() -> None:
    assert SoakAnswer.of([5, 6, 7], [1.0, 0.5, 0.2]) == SoakAnswer([5, 6, 7], near_tie=False)
    assert SoakAnswer.of([5, 6, 7], [1.0, 1e-5, 0.2]) == SoakAnswer([5], near_tie=True)
    assert SoakAnswer.of([5], [0.0]) == SoakAnswer([], near_tie=True)


class Scripted:
    """An engine that counts up from the prompt's last token, unless told otherwise.

    It stands for vLLM in a child process.
    """

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self.served: list[VerifyArrival] = []

    def serve(
        self, arrivals: list[VerifyArrival], *, margins: bool = False
    ) -> "Future[VerifyServed]":
        self.served += arrivals
        answers = [
            [arrival.tokens[-1] + n for n in range(1, arrival.max_tokens + 1)]
            for arrival in arrivals
        ]
        done: Future[VerifyServed] = Future()
        plain: dict[str, Any] = {
            "token_ids": answers,
            "ends": ["length"] * len(arrivals),
            "aborted_in": [""] * len(arrivals),
            "margins": [[1.0] * len(answer) for answer in answers],
            "names": ["a"] * len(arrivals),
            "num_preemptions": 1,
        }
        done.set_result(
            VerifyServed(**plain | {name: change(answers) for name, change in self.changes.items()})
        )
        return done


def soaked(
    alone: Scripted,
    *pair: Scripted,
    loads: Sequence[dict[str, Any]] = (LOADED,),
    evicted: int = 1,
    aborts: int = 1,
) -> Requests:
    soak = _Soak([alone, *pair], VOCABULARY, random.Random(1))  # type: ignore[list-item]
    soak.run(250)
    soak.tally.aborted_in["decode"] += aborts
    return _report(soak, loads, evicted=evicted, seconds=1.0)


def first_token_off(answers: list[list[int]]) -> list[list[int]]:
    return [[-1, *answer[1:]] for answer in answers]


class TestJudging:
    def test_equal_answers_pass_and_all_are_asked(self) -> None:
        one, two = Scripted(), Scripted()
        report = soaked(Scripted(), one, two)
        assert report.passed
        assert (report.requests, len(one.served) + len(two.served)) == (250, 250)
        assert (report.wrong, report.unsteady, report.errors, report.differences) == (0, 0, 0, [])
        assert (report.hits, report.loaded_tokens) == (1, 96)

    def test_another_token_is_wrong(self) -> None:
        report = soaked(Scripted(), Scripted(token_ids=first_token_off), Scripted())
        assert not report.passed
        assert report.wrong > 50
        assert "token 1 of " in report.differences[0]
        assert "is -1, not " in report.differences[0]
        assert "0 of 3 loaded blocks wrong" in report.differences[0]

    def test_a_missing_token_is_wrong(self) -> None:
        report = soaked(
            Scripted(),
            Scripted(),
            Scripted(token_ids=lambda answers: [answer[:-1] for answer in answers]),
        )
        assert not report.passed
        assert report.wrong > 50

    def test_an_aborted_answer_is_right_as_far_as_it_goes(self) -> None:
        def aborted(answers: list[list[int]]) -> list[str]:
            return ["abort"] * len(answers)

        assert (
            soaked(
                Scripted(),
                Scripted(token_ids=lambda answers: [a[:1] for a in answers], ends=aborted),
                Scripted(),
            ).wrong
            == 0
        )
        assert (
            soaked(Scripted(), Scripted(token_ids=first_token_off, ends=aborted), Scripted()).wrong
            > 50
        )

    def test_what_the_engine_without_kvhold_answers_now_so_now_so_is_unsteady(self) -> None:
        class Unsteady(Scripted):
            def serve(
                self, arrivals: list[VerifyArrival], *, margins: bool = False
            ) -> "Future[VerifyServed]":
                return (
                    super().serve(arrivals)
                    if margins
                    else Scripted(token_ids=first_token_off).serve(arrivals)
                )

        report = soaked(Unsteady(), Scripted(token_ids=first_token_off), Scripted())
        assert (report.wrong, report.passed) == (0, True)
        assert report.unsteady > 50

    def test_a_request_that_ends_otherwise_is_an_error(self) -> None:
        report = soaked(
            Scripted(), Scripted(ends=lambda answers: ["error"] * len(answers)), Scripted()
        )
        assert not report.passed
        assert report.errors > 50

    def test_an_engine_that_fails_ends_the_run_and_its_words_are_told(self) -> None:
        class Failing(Scripted):
            def serve(
                self, arrivals: list[VerifyArrival], *, margins: bool = False
            ) -> "Future[VerifyServed]":
                done: Future[VerifyServed] = Future()
                done.set_exception(EngineFailed("serve: the engine died"))
                return done

        report = soaked(Scripted(), Scripted(), Failing())
        assert (report.errors, report.passed, report.differences) == (
            1,
            False,
            ["serve: the engine died"],
        )

    def test_near_ties_are_asked_no_further(self) -> None:
        one, two = Scripted(), Scripted()
        unsure = Scripted(
            margins=lambda answers: [[1.0, 1.0] + [0.0] * (len(answer) - 2) for answer in answers]
        )
        report = soaked(unsure, one, two)
        assert report.passed
        assert report.near_ties > 50
        assert max(arrival.max_tokens for arrival in (*one.served, *two.served)) == 2

    @pytest.mark.parametrize("fault", [{"loads": []}, {"evicted": 0}, {"aborts": 0}])
    def test_a_run_that_did_not_meet_what_it_claims_does_not_pass(
        self, fault: dict[str, Any]
    ) -> None:
        report = soaked(Scripted(), Scripted(), Scripted(), **fault)
        assert not report.passed
        assert len(report.missing) == 1

    @pytest.mark.parametrize("fault", [{"wrong": ["00"]}, {"unknown": ["00"]}, {"in_part": True}])
    def test_a_loaded_block_with_other_bytes_fails_the_run(self, fault: dict[str, Any]) -> None:
        assert not soaked(Scripted(), Scripted(), Scripted(), loads=[LOADED | fault]).passed
