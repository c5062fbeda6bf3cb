"""`kvhold verify` without an engine: what is asked, what is noted, how a result is judged and
shown, how a child is talked to.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvhold_lab.engines.process import EngineFailed, LoggedProcess
from kvhold_lab.verify import command as verify
from kvhold_lab.verify.messages import Answered, Choice, Question, Started
from kvhold_lab.verify.notes import Notes, Verdict, read_verdict
from kvhold_lab.verify.paths import DEFAULT, PATHS
from kvhold_lab.verify.prompts import PromptSizes, crowd_tokens, make_batches, make_crowd
from kvhold_lab.verify.rows import VerifyRow, table
from kvhold_lab.verify.run import EngineAnswers, judged
from kvhold_lab.verify.ties import at_near_tie, is_near

VOCABULARY = list(range(10, 250))
SIZES = st.builds(
    lambda block, blocks, spare: PromptSizes(
        block=block, chunk=block * blocks, limit=8 * block * blocks + spare
    ),
    st.sampled_from([16, 32, 128, 384]),
    st.integers(1, 4),
    st.integers(0, 100),
)


def prompts(batches: list[list[Question]]) -> list[list[int]]:
    return [question.tokens for batch in batches for question in batch]


class TestPrompts:
    @given(sizes=SIZES, seed=st.integers(0, 100))
    def test_they_meet_each_side_of_blocks_and_chunks_share_prefixes_and_come_again(
        self, sizes: PromptSizes, seed: int
    ) -> None:
        asked = prompts(make_batches(VOCABULARY, sizes, seed=seed))
        lengths = {len(prompt) for prompt in asked}
        edges = {
            1,
            sizes.block - 1,
            sizes.block,
            sizes.block + 1,
            sizes.chunk - 1,
            sizes.chunk,
            sizes.chunk + 1,
        } - {0}
        assert edges <= lengths
        assert max(lengths) > 3 * sizes.chunk
        assert max(lengths) <= sizes.limit
        assert {token for prompt in asked for token in prompt} <= set(VOCABULARY)
        assert max(Counter(map(tuple, asked)).values()) > 1
        whole = [tuple(prompt[: sizes.block]) for prompt in asked if len(prompt) > sizes.block]
        assert len(set(whole)) < len(whole), "some begin alike"
        assert len(set(whole)) > 1, "and some do not"
        assert make_batches(VOCABULARY, sizes, seed=seed) == make_batches(
            VOCABULARY, sizes, seed=seed
        )

    def test_each_prompt_goes_to_the_model_and_to_each_adapter_and_never_to_both_at_once(
        self,
    ) -> None:
        batches = make_batches(VOCABULARY, PromptSizes(32, 64, 2_000), seed=1, num_adapters=2)
        asked = {
            adapter: [q.tokens for batch in batches for q in batch if q.adapter == adapter]
            for adapter in (None, 0, 1)
        }
        assert asked[None] == asked[0] == asked[1]
        assert {frozenset(q.adapter is None for q in batch) for batch in batches} == {
            frozenset({True}),
            frozenset({False}),
        }
        assert any({q.adapter for q in batch} == {0, 1} for batch in batches)

    def test_the_same_words_are_asked_about_several_images(self) -> None:
        questions = [
            q
            for batch in make_batches(VOCABULARY, PromptSizes(32, 64, 2_000), seed=1, images=True)
            for q in batch
            if q.images
        ]
        assert len({tuple(q.images) for q in questions if q.tokens == questions[0].tokens}) > 2

    @given(sizes=SIZES)
    def test_a_crowd_wants_another_block_each_as_soon_as_it_answers(
        self, sizes: PromptSizes
    ) -> None:
        [crowd] = make_crowd(VOCABULARY, sizes, seed=1)
        assert len(crowd) > 3
        assert {len(question.tokens) for question in crowd} == {crowd_tokens(sizes)}
        assert -crowd_tokens(sizes) % sizes.block == 2


class TestNotes:
    def test_what_one_engine_computed_is_known_to_the_next(self, tmp_path: Path) -> None:
        content, digest = b"c" * 24, b"d" * 16
        with (
            Notes(tmp_path, worker=0) as first,
            Notes(tmp_path, worker=0) as second,
            Notes(tmp_path, worker=1) as elsewhere,
        ):
            assert not second.knows(2, content)
            first.computed(2, content, digest)
            assert second.knows(2, content)
            assert second.is_computed(2, content, digest)
            assert not second.is_computed(2, content, b"e" * 16)
            assert not second.knows(1, content), "another group's block holds something else"
            assert not elsewhere.knows(2, content), "and so does another worker's"
            second.computed(2, content, b"e" * 16)
            assert first.is_computed(2, content, b"e" * 16), (
                "a prompt may be computed twice with different last bits"
            )

    def test_verdicts_are_summed_over_engines_and_workers(self, tmp_path: Path) -> None:
        assert not read_verdict(tmp_path).is_exact, "nothing compared proves nothing"
        for worker, wrong in ((0, []), (1, ["aa"])):
            with Notes(tmp_path, worker=worker) as notes:
                notes.verdict(compared=3, wrong=wrong, unknown=[], in_part=False)
        assert read_verdict(tmp_path) == Verdict(compared=6, wrong=1, unknown=0, in_part=0)

    @pytest.mark.parametrize(
        ("fault", "exact"),
        [({}, True), ({"wrong": 1}, False), ({"unknown": 1}, False), ({"in_part": 1}, False)],
    )
    def test_any_doubt_is_not_exact(self, fault: dict[str, int], exact: bool) -> None:
        assert (
            Verdict(**({"compared": 5, "wrong": 0, "unknown": 0, "in_part": 0} | fault)).is_exact
            is exact
        )


def started() -> Started:
    return Started(
        block_sizes=[32],
        num_blocks=100,
        token_bytes=1_024,
        vocabulary=VOCABULARY,
        takes_images=False,
        prefix_caching=True,
        chunked_prefill=True,
        async_scheduling=False,
        cuda_graphs=False,
        max_num_batched_tokens=2_048,
        dtype="bfloat16",
    )


def asked(
    *token_ids: list[int], preemptions: int = 0, rival: int = 99, lead: float = 1.0
) -> EngineAnswers:
    """rival: the next best token everywhere, and by how much it is behind."""
    found = EngineAnswers(started())
    choices = [
        [Choice(tokens=(token, rival), logits=(8.0, 8.0 - lead)) for token in answer]
        for answer in token_ids
    ]
    found.add(
        Answered(
            token_ids=list(token_ids),
            cached=[0] * len(token_ids),
            num_preemptions=preemptions,
            choices=choices,
        )
    )
    return found


class TestJudgement:
    BARE = VerifyRow("m", "plain", None, None, 0, "unsupported")
    GOOD = Verdict(compared=7, wrong=0, unknown=0, in_part=0)

    def test_equal_tokens_and_exact_blocks_pass(self) -> None:
        row = judged(
            self.BARE,
            PATHS["plain"],
            asked([1, 2], [3]),
            [asked([1, 2], [3]), asked([1, 2], [3])],
            self.GOOD,
        )
        assert (
            row.outcome,
            row.kv_exact,
            row.tokens_equal,
            row.requests,
            row.blocks,
            row.reason,
        ) == ("pass", True, True, 4, 7, "")

    @pytest.mark.parametrize("place", [0, 1])
    def test_one_other_token_in_either_round_fails(self, place: int) -> None:
        rounds = [asked([1, 2], [3]), asked([1, 2], [3])]
        rounds[place] = asked([1, 2], [4])
        row = judged(self.BARE, PATHS["plain"], asked([1, 2], [3]), rounds, self.GOOD)
        assert (row.outcome, row.kv_exact, row.tokens_equal) == ("FAIL", True, False)
        assert "first question 1 of the " + ("first", "second")[place] in row.reason

    def test_a_block_with_other_bytes_fails_though_the_tokens_are_equal(self) -> None:
        row = judged(
            self.BARE,
            PATHS["plain"],
            asked([1]),
            [asked([1]), asked([1])],
            Verdict(compared=7, wrong=1, unknown=0, in_part=0),
        )
        assert (row.outcome, row.kv_exact, row.tokens_equal) == ("FAIL", False, True)
        assert "1 of 7 loaded blocks" in row.reason

    def test_what_vllm_alone_answers_now_so_now_so_is_not_counted_against_kvhold_but_said(
        self,
    ) -> None:
        reference = asked([1], [2], [3])
        reference.unsteady = {1}
        row = judged(
            self.BARE,
            PATHS["plain"],
            reference,
            [asked([1], [9], [3]), asked([1], [2], [3])],
            self.GOOD,
        )
        assert (row.outcome, row.tokens_equal) == ("pass", True)
        assert "1 of 3 questions" in row.reason
        assert (
            judged(
                self.BARE, PATHS["plain"], reference, [asked([1], [9], [4])] * 2, self.GOOD
            ).tokens_equal
            is False
        )

    def test_where_it_answers_most_so_tokens_prove_nothing(self) -> None:
        reference = asked([1], [2])
        reference.unsteady = {1}
        rounds = [asked([1], [9]), asked([1], [2])]
        row = judged(self.BARE, PATHS["plain"], reference, rounds, self.GOOD)
        assert (row.outcome, row.kv_exact, row.tokens_equal) == ("unsupported", True, None)
        assert "1 of 2 questions" in row.reason
        wrong = Verdict(compared=7, wrong=1, unknown=0, in_part=0)
        assert judged(self.BARE, PATHS["plain"], reference, rounds, wrong).outcome == "FAIL", (
            "KV is compared all the same"
        )

    def test_what_differs_after_a_near_tie_of_vllms_own_is_counted_and_passes(self) -> None:
        reference = asked([1, 2], [3, 4], [5, 6], rival=9, lead=0.0625)
        rounds = [asked([1, 2], [3, 4], [5, 6]), asked([1, 2], [9, 7], [5, 6])]
        row = judged(self.BARE, PATHS["plain"], reference, rounds, self.GOOD)
        assert (row.outcome, row.kv_exact, row.tokens_equal, row.ties) == ("pass", True, True, 1)
        assert "question 1 of the second round" in row.reason
        rounds[0] = asked([1, 2], [3, 4], [5, 8])
        row = judged(self.BARE, PATHS["plain"], reference, rounds, self.GOOD)
        assert (row.outcome, row.tokens_equal, row.ties) == ("FAIL", False, 1)
        assert "1 answers differ" in row.reason

    def test_a_wrong_block_fails_though_all_that_differs_is_after_near_ties(self) -> None:
        reference = asked([1], [2], [3], rival=9, lead=0.0)
        rounds = [asked([1], [2], [9]), asked([1], [2], [3])]
        row = judged(
            self.BARE,
            PATHS["plain"],
            reference,
            rounds,
            Verdict(compared=7, wrong=1, unknown=0, in_part=0),
        )
        assert (row.outcome, row.kv_exact, row.ties) == ("FAIL", False, 1)
        assert "1 of 7 loaded blocks" in row.reason

    def test_where_most_answers_end_at_near_ties_tokens_prove_nothing(self) -> None:
        reference = asked([1], [2], rival=9, lead=0.0)
        row = judged(
            self.BARE, PATHS["plain"], reference, [asked([1], [9]), asked([1], [2])], self.GOOD
        )
        assert (row.outcome, row.kv_exact, row.tokens_equal, row.ties) == (
            "unsupported",
            True,
            None,
            1,
        )
        row = judged(
            self.BARE, PATHS["plain"], reference, [asked([1], [9]), asked([8], [2])], self.GOOD
        )
        assert (row.outcome, row.tokens_equal) == ("FAIL", False), (
            "a real difference is one, however many ties there are"
        )

    def test_nothing_loaded_fails(self) -> None:
        row = judged(
            self.BARE,
            PATHS["plain"],
            asked([1]),
            [asked([1]), asked([1])],
            Verdict(compared=0, wrong=0, unknown=0, in_part=0),
        )
        assert (row.outcome, row.kv_exact, row.tokens_equal) == ("FAIL", None, True)
        assert "no hit" in row.reason

    def test_a_crowd_of_which_nobody_was_preempted_fails(self) -> None:
        rounds = [asked([1]), asked([1])]
        assert (
            "nothing was preempted"
            in judged(self.BARE, PATHS["preemption"], asked([1]), rounds, self.GOOD).reason
        )
        assert (
            judged(
                self.BARE,
                PATHS["preemption"],
                asked([1]),
                [asked([1], preemptions=2), asked([1])],
                self.GOOD,
            ).outcome
            == "pass"
        )


class TestTies:
    CHOICES: ClassVar = [
        Choice(tokens=(1, 9), logits=(3.0, 1.0)),
        Choice(tokens=(2, 9), logits=(8.0, 7.9375)),
        Choice(tokens=(3, 9), logits=(8.0, 8.0)),
    ]

    @pytest.mark.parametrize(
        ("answer", "tied"),
        [
            ([1, 9, 5], True),
            ([1, 9, 3], True),
            ([1, 2, 9], True),
            ([1, 2, 3], False),
            ([9, 2, 3], False),
            ([1, 8, 3], False),
            ([9, 9, 9], False),
            ([1, 9], False),
        ],
        ids=[
            "near",
            "near and alike again",
            "equal",
            "the same",
            "far",
            "a third token",
            "far before near",
            "shorter",
        ],
    )
    def test_only_the_first_token_that_differs_counts_and_only_the_next_best_there(
        self, answer: list[int], tied: bool
    ) -> None:
        assert at_near_tie(answer, [1, 2, 3], self.CHOICES, dtype="bfloat16") is tied

    def test_without_choices_there_is_no_tie(self) -> None:
        assert not at_near_tie([9], [1], [], dtype="bfloat16")

    @pytest.mark.parametrize(
        ("dtype", "step"), [("float32", 2.0**-20), ("float16", 2.0**-7), ("bfloat16", 2.0**-4)]
    )
    def test_two_steps_of_the_type_are_near_and_three_are_not(
        self, dtype: str, step: float
    ) -> None:
        for value in (8.0 + 4 * step, 16.0 - step, -8.0, -12.0):
            assert is_near(value, value - 2 * step, dtype=dtype)
            assert is_near(value - 2 * step, value, dtype=dtype)
            assert not is_near(value, value - 3 * step, dtype=dtype)

    def test_what_no_rounding_decides_is_not_near(self) -> None:
        assert is_near(0.0, 0.0, dtype="float32")
        assert not is_near(float("inf"), float("inf"), dtype="bfloat16")
        assert not is_near(float("nan"), 1.0, dtype="bfloat16")
        assert not is_near(8.0, 8.0, dtype="float8_e4m3fn")


class TestCommand:
    @pytest.mark.parametrize(
        "arguments", [[], ["model", "--all-classes"], ["model", "--classes", "llama"]]
    )
    def test_one_thing_is_verified_at_a_time(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(verify.command, arguments)
        assert result.exit_code == 2
        assert "give a MODEL, or --all-classes" in result.output

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["m", "--paths", "plane"], "plane is not one of plain, no-prefix-caching"),
            (["m", "--paths", ","], "nothing is not one of"),
            (["--classes", "lama"], "lama is not one of llama"),
            (["m", "--config", "{"], "is no JSON"),
            (["m", "--engine-args", "[1]"], "must be an object"),
        ],
    )
    def test_a_mistake_is_named_with_what_would_be_right(
        self, arguments: list[str], told: str
    ) -> None:
        result = CliRunner().invoke(verify.command, arguments)
        assert result.exit_code == 2
        assert told in " ".join(result.output.split())

    @pytest.mark.parametrize(
        ("outcomes", "of_model", "of_classes"),
        [
            (["pass"], True, True),
            (["pass", "unsupported", "off"], True, True),
            (["pass", "refused"], False, True),
            (["pass", "FAIL"], False, False),
            (["unsupported"], False, False),
            ([], False, False),
        ],
    )
    def test_the_exit_code_says_whether_something_was_proven_and_nothing_failed(
        self,
        outcomes: list[str],
        of_model: bool,
        of_classes: bool,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        rows = [VerifyRow("m", "plain", None, None, 0, outcome, "because") for outcome in outcomes]  # type: ignore[arg-type]

        def found(*_: object, **__: object) -> Iterator[VerifyRow]:
            yield from rows

        monkeypatch.setattr(verify, "_of_classes", found)
        monkeypatch.setattr(verify, "_of_model", found)
        monkeypatch.setattr(verify, "is_vllm_available", lambda: True)
        for arguments, good in ((["m"], of_model), (["--all-classes"], of_classes)):
            result = CliRunner().invoke(
                verify.command, [*arguments, "--json", str(tmp_path / "rows.json")]
            )
            assert result.exit_code == (0 if good else 1), result.output
            assert json.loads((tmp_path / "rows.json").read_text()) == [
                row.as_json() for row in rows
            ]

    def test_the_default_paths_exist(self) -> None:
        assert set(DEFAULT) <= set(PATHS)

    def test_the_table_shows_each_row_and_the_reason_of_each_that_did_not_pass(self) -> None:
        text = table(
            [
                VerifyRow("m", "plain", True, True, 26, "pass", blocks=18, ties=1),
                VerifyRow("m", "tp2", False, None, 0, "FAIL", "it broke"),
            ]
        )
        lines = text.splitlines()
        assert lines[1].split() == ["m", "plain", "yes", "yes", "1", "26", "18", "0.0", "pass"]
        assert lines[2].split() == ["m", "tp2", "NO", "-", "0", "0", "0", "0.0", "FAIL"]
        assert lines[-1] == "m, tp2: FAIL: it broke"
        assert "plain:" not in text


class TestChild:
    def start(self, program: str) -> LoggedProcess:
        return LoggedProcess(
            "the child", [sys.executable, "-c", program], log_path=None, environment={}, pipes=True
        )

    def test_a_line_longer_than_the_pipe_arrives_whole_at_a_child_that_reads_late(self) -> None:
        process = self.start(
            "import sys, time; time.sleep(0.3); "
            "sys.stdout.write(str(len(sys.stdin.readline())) + chr(10)); sys.stdout.flush()"
        )
        try:
            assert process.ask(b"x" * 3_000_000, "a long line", 60.0) == b"3000001"
        finally:
            process.kill()

    def test_a_child_that_is_silent_shows_where_it_hangs_and_is_killed(self) -> None:
        program = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1)
def waits_for_nobody():
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR2})
sys.stdin.readline()
waits_for_nobody()
"""
        process = self.start(program)
        assert process.ask(b"go", "start", 60.0) == b"ready"
        with pytest.raises(EngineFailed, match="silent for too long and was killed") as caught:
            process.ask(b"and now?", "wait", 0.1)
        assert "waits_for_nobody" in str(caught.value)
        assert not process.is_alive

    def test_a_child_that_reads_nothing_is_given_up_too(self) -> None:
        process = self.start("import time; time.sleep(600)")
        with pytest.raises(EngineFailed, match="silent for too long"):
            process.ask(b"x" * 3_000_000, "a long line", 0.2)
        assert not process.is_alive
