"""What the workloads ask, when, and what their prompts have in common."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import TextPrompts, TokenPrompts
from kvhold_lab.bench.load.work import COLD, WARM, Reply, Request, Workload
from kvhold_lab.bench.load.workloads import (
    Chats,
    LongDocQA,
    MultiDocQA,
    MultiRoundQA,
    Rag,
    Replay,
    TtftSweep,
)
from kvhold_lab.bench.load.workloads.dataset import f1, read_conversations, read_dataset, rouge_l
from kvhold_lab.bench.load.workloads.ttft_sweep import FILLER
from tests.lab.bench.load.driving import phases, prompt, requests, shared, well

TOKENS = TokenPrompts()


def write_trace(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recording(folder: Path, *conversations: list[tuple[str, str]]) -> Path:
    path = folder / "recorded.json"
    path.write_text(
        json.dumps(
            [
                {"id": 1, "conversations": [{"from": who, "value": what} for who, what in one]}
                for one in conversations
            ]
        )
    )
    return path


def line(timestamp: float, tokens: int, hash_ids: list[int], output: int = 5) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output,
        "hash_ids": hash_ids,
    }


@pytest.mark.parametrize(
    "workload",
    [
        LongDocQA(documents=3, document_tokens=50),
        MultiDocQA(
            separator=[1, 2],
            documents=6,
            documents_per_request=3,
            requests=5,
            document_tokens=40,
            sampling="zipf",
        ),
        MultiRoundQA(users=3, rounds=3, system_tokens=20, history_tokens=20, duration_s=20.0),
        Rag(requests=6, documents=4, document_tokens=30, storage_tokens=70, poisson=True),
        TtftSweep(lengths=(20, 60), following=2, flush_tokens=100),
        Chats(chats_s=1.0, duration_s=60.0),
    ],
    ids=lambda workload: type(workload).__name__,
)
def test_the_same_arguments_give_the_same_requests(workload: Workload) -> None:
    one, two = (requests(workload, TokenPrompts()) for _ in range(2))
    assert one
    assert [(prompt(r), r.group, r.at_s, r.labels, r.max_tokens) for r in one] == [
        (prompt(r), r.group, r.at_s, r.labels, r.max_tokens) for r in two
    ]
    assert prompt(one[0]) != prompt(requests(workload, TokenPrompts(seed=1))[0])


@pytest.mark.parametrize("text", [TextPrompts(), TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize(
    "workload",
    [
        LongDocQA(documents=3, document_tokens=50),
        MultiRoundQA(users=2, rounds=3, system_tokens=20, history_tokens=20),
        Rag(requests=3, documents=4, document_tokens=30, storage_tokens=70),
        TtftSweep(lengths=(20, 60)),
        Chats(chats_s=1.0, duration_s=60.0),
    ],
    ids=lambda workload: type(workload).__name__,
)
def test_a_phase_knows_how_many_requests_it_has(workload: Workload, text: TextPrompts) -> None:
    counted = {name: sum(map(len, sessions)) for name, sessions in phases(workload, text).items()}
    told = {phase.name: phase.total for phase in workload.phases(text)}
    assert all(told[name] in (None, count) for name, count in counted.items())
    assert any(told.values())


class TestLongDocQA:
    def test_warm_prompts_begin_with_a_document_that_was_cold_and_ask_something_else(self) -> None:
        asked = phases(
            LongDocQA(documents=4, document_tokens=300, question_tokens=8, repeats=3), TOKENS
        )
        cold, warm = ([request for [request] in asked[name]] for name in (COLD, WARM))
        assert [request.labels["document"] for request in cold] == [0, 1, 2, 3]
        assert Counter(request.labels["document"] for request in warm) == dict.fromkeys(range(4), 3)
        for request in warm:
            before = cold[int(request.labels["document"])]
            assert shared(prompt(request), prompt(before)) == 300
            assert len(prompt(request)) == 308
        assert all(shared(prompt(a), prompt(b)) == 0 for a, b in pairwise(cold))

    def test_without_a_question_the_prompt_is_the_same(self) -> None:
        asked = requests(
            LongDocQA(documents=2, document_tokens=40, question_tokens=0, repeats=1), TOKENS
        )
        assert {tuple(prompt(request)) for request in asked[:2]} == {
            tuple(prompt(request)) for request in asked[2:]
        }

    @pytest.mark.parametrize(
        ("order", "expected"), [("tile", [0, 1, 2, 0, 1, 2]), ("interleave", [0, 0, 1, 1, 2, 2])]
    )
    def test_order(self, order: str, expected: list[int]) -> None:
        workload = LongDocQA(documents=3, document_tokens=9, repeats=2, order=order)  # type: ignore[arg-type]
        assert [
            request.labels["document"] for [request] in phases(workload, TOKENS)[WARM]
        ] == expected

    def test_another_seed_is_another_order(self) -> None:
        one, two = (
            [
                request.labels["document"]
                for [request] in phases(
                    LongDocQA(documents=9, document_tokens=9, seed=seed), TOKENS
                )[WARM]
            ]
            for seed in (0, 1)
        )
        assert one != two
        assert sorted(map(int, one)) == sorted(map(int, two))


class TestMultiDocQA:
    def test_documents_stand_between_separators(self) -> None:
        workload = MultiDocQA(
            separator=[1, 2],
            documents=9,
            documents_per_request=4,
            requests=7,
            document_tokens=30,
            system_tokens=5,
            question_tokens=6,
        )
        asked = phases(workload, TOKENS)
        assert len(asked[COLD]) == 9
        system = TOKENS.piece("system", 0, 5)
        for [request] in asked[WARM]:
            documents = [int(number) for number in str(request.labels["documents"]).split()]
            assert len(set(documents)) == 4
            body = [
                token
                for number in documents
                for token in [*TOKENS.piece("document", number, 30), 1, 2]
            ]
            assert prompt(request)[:-6] == [*system, 1, 2, *body]
            assert len(prompt(request)) == 5 + 2 + 4 * 32 + 6

    def test_zipf_prefers_the_first(self) -> None:
        workload = MultiDocQA(
            separator=[1],
            documents=50,
            documents_per_request=1,
            requests=400,
            document_tokens=6,
            sampling="zipf",
        )
        drawn = Counter(request.labels["documents"] for [request] in phases(workload, TOKENS)[WARM])
        assert drawn["0"] > 2 * drawn["3"] > 0

    def test_more_documents_than_there_are_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="5 documents a request are more than all 3"):
            requests(MultiDocQA(separator=[1], documents=3, documents_per_request=5), TOKENS)


class TestMultiRoundQA:
    def test_each_prompt_goes_on_from_the_one_before_and_its_answer(self) -> None:
        workload = MultiRoundQA(
            users=2,
            rounds=4,
            system_tokens=10,
            history_tokens=12,
            question_tokens=6,
            staggered=False,
        )
        for conversation in phases(workload, TOKENS)["conversations"]:
            assert [request.group for request in conversation] == [
                "round 1",
                "round 2",
                "round 3",
                "round 4",
            ]
            for one, two in pairwise(conversation):
                assert prompt(two)[: len(prompt(one)) + 1] == [*prompt(one), *well(one).content]
            assert [request.needs_content for request in conversation] == [True, True, True, False]

    def test_users_share_the_system_prompt_and_nothing_else(self) -> None:
        workload = MultiRoundQA(
            users=3, rounds=1, system_tokens=10, history_tokens=12, staggered=False
        )
        first, second, _ = requests(workload, TOKENS)
        assert shared(prompt(first), prompt(second)) == 10

    @given(
        st.integers(1, 12),
        st.integers(1, 6),
        st.floats(0.1, 20),
        st.booleans(),
        st.floats(1.0, 40.0),
    )
    def test_requests_come_at_the_rate_that_was_asked(
        self, users: int, rounds: int, qps: float, staggered: bool, duration_s: float
    ) -> None:
        workload = MultiRoundQA(
            users=users,
            rounds=rounds,
            qps=qps,
            staggered=staggered,
            duration_s=duration_s,
            system_tokens=1,
            history_tokens=1,
            question_tokens=1,
        )
        times = sorted(
            request.at_s for request in requests(workload, TOKENS) if request.at_s is not None
        )
        assert times[0] == 0
        assert times[-1] < duration_s
        assert all(abs((b - a) * qps - 1) < 1e-6 for a, b in pairwise(times))
        assert abs(len(times) - duration_s * qps) <= 1 + 1e-6

    def test_first_users_are_in_the_midst_of_their_conversations(self) -> None:
        workload = MultiRoundQA(users=4, rounds=4, system_tokens=1, history_tokens=1)
        firsts = [session[0] for session in phases(workload, TOKENS)["conversations"]]
        assert [request.group for request in firsts] == ["round 1", "round 2", "round 3", "round 4"]
        assert [len(request.turns) for request in firsts] == [3, 5, 7, 9]

    def test_who_is_through_is_followed_by_a_new_user(self) -> None:
        workload = MultiRoundQA(users=2, rounds=2, qps=1.0, duration_s=12.0, staggered=False)
        users = Counter(request.labels["user"] for request in requests(workload, TOKENS))
        assert users == dict.fromkeys(range(6), 2)

    def test_a_request_that_failed_ends_the_conversation_alone(self) -> None:
        def fail_in_round_2(request: Request) -> Reply:
            return (
                Reply(latency_s=1.0, error="timeout")
                if request.group == "round 2"
                else well(request)
            )

        workload = MultiRoundQA(users=1, rounds=4, qps=1.0, duration_s=10.0, staggered=False)
        asked = [
            (request.labels["user"], request.group)
            for request in requests(workload, TOKENS, fail_in_round_2)
        ]
        assert asked == [(user, group) for user in range(3) for group in ("round 1", "round 2")]

    def test_recorded_questions_are_asked_and_those_of_before_were_answered_as_recorded(
        self, tmp_path: Path
    ) -> None:
        said = [
            ("human", "Why?"),
            ("gpt", "Be"),
            ("gpt", "cause."),
            ("system", "?"),
            ("human", "And?"),
            ("gpt", "So."),
            ("human", "More"),
        ]
        path = recording(
            tmp_path,
            said,
            [("human", "Too short")],
            [("user", "Who?"), ("assistant", "I."), ("user", "You?")],
        )
        recorded = read_conversations(path, rounds=2)
        workload = MultiRoundQA(
            users=3, rounds=2, system_tokens=0, history_tokens=0, recorded=recorded
        )
        asked = requests(
            workload, TextPrompts(), lambda request: replace(well(request), content=" Yes.")
        )
        assert ["".join(str(turn.content) for turn in request.turns) for request in asked] == [
            "\n\nWhy?",
            "\n\nWhy? Yes.\n\nAnd?",
            "\n\nWho?",
            "\n\nWho? Yes.\n\nYou?",
            "\n\nWhy?\n\nBecause.\n\nAnd?",
        ]

    def test_recorded_questions_need_text(self, tmp_path: Path) -> None:
        path = recording(tmp_path, [("human", "Why?")])
        with pytest.raises(ConfigError, match="--prompts text"):
            requests(
                MultiRoundQA(users=1, rounds=1, recorded=read_conversations(path, rounds=1)), TOKENS
            )

    def test_a_recording_that_is_none_or_too_short_is_an_error_that_names_the_file(
        self, tmp_path: Path
    ) -> None:
        path = recording(tmp_path, [("human", "Why?"), ("gpt", "Because.")])
        with pytest.raises(
            ConfigError,
            match=r"recorded\.json: none of its 1 conversations has 2 questions; ask for fewer "
            r"rounds",
        ):
            read_conversations(path, rounds=2)
        path.write_text('[{"conversations": [{"from": "human"}]}]')
        with pytest.raises(
            ConfigError, match=r"recorded\.json: .*`value`.*; it must be a JSON list of"
        ):
            read_conversations(path, rounds=1)


class TestChats:
    def test_another_seed_gives_other_times(self) -> None:
        one, two = (
            requests(Chats(seed=seed, chats_s=1.0, duration_s=60.0), TOKENS) for seed in (0, 1)
        )
        assert {request.at_s for request in one}.isdisjoint(request.at_s for request in two)

    def test_each_prompt_goes_on_from_the_one_before(self) -> None:
        chats = phases(Chats(chats_s=1.0, think_s=5.0, duration_s=60.0, system_tokens=10), TOKENS)[
            "chats"
        ]
        assert any(len(chat) > 2 for chat in chats)
        for chat in chats:
            for one, two in pairwise(chat):
                assert prompt(two)[: len(prompt(one))] == prompt(one)
                assert len(prompt(two)) > len(prompt(one))

    def test_chats_share_the_system_prompt_and_nothing_else(self) -> None:
        (first, *_), (second, *_) = phases(Chats(system_tokens=10), TOKENS)["chats"][:2]
        assert shared(prompt(first), prompt(second)) == 10

    def test_prompts_do_not_follow_from_the_answers(self) -> None:
        def silent(request: Request) -> Reply:
            return Reply(latency_s=1.0, error="timeout")

        workload = Chats(chats_s=1.0, duration_s=30.0)
        assert [prompt(request) for request in requests(workload, TOKENS, silent)] == [
            prompt(request) for request in requests(workload, TOKENS)
        ]

    @given(st.integers(0, 1_000), st.floats(0.1, 2.0), st.floats(0.0, 2.0), st.integers(400, 3_000))
    def test_no_prompt_is_too_long_and_no_question_too_late(
        self, seed: int, chats_s: float, think_sigma: float, most_tokens: int
    ) -> None:
        workload = Chats(
            seed=seed,
            chats_s=chats_s,
            think_sigma=think_sigma,
            most_tokens=most_tokens,
            duration_s=20.0,
        )
        for request in requests(workload, TextPrompts()):
            num_tokens = sum(len(str(turn.content).split()) for turn in request.turns)
            assert num_tokens + request.max_tokens <= most_tokens
            assert request.at_s is not None
            assert request.at_s < 20.0

    def test_think_times_and_numbers_of_questions_are_about_what_was_asked(self) -> None:
        workload = Chats(
            chats_s=2.0, think_s=5.0, questions=3.0, duration_s=1_000.0, most_tokens=1_000_000
        )
        chats = [
            chat
            for chat in phases(replace(workload, history_tokens=1), TOKENS)["chats"]
            if chat[0].at_s is not None and chat[0].at_s < 800.0
        ]
        thinking = [
            two.at_s - one.at_s
            for chat in chats
            for one, two in pairwise(chat)
            if one.at_s is not None and two.at_s is not None
        ]
        assert median(thinking) == pytest.approx(5.0, rel=0.15)
        assert fmean(map(len, chats)) == pytest.approx(3.0, rel=0.1)

    def test_prompts_without_room_for_a_chat_are_an_error(self) -> None:
        with pytest.raises(ConfigError, match="--most-tokens"):
            requests(Chats(most_tokens=300), TOKENS)


class TestRag:
    def test_questions_come_evenly_and_precomputed_documents_are_what_fits(self) -> None:
        def counted(request: Request) -> Reply:
            return Reply(latency_s=1.0, ttft_s=1.0, input_tokens=len(prompt(request)))

        workload = Rag(
            qps=4.0,
            requests=5,
            documents=10,
            document_tokens=100,
            system_tokens=10,
            storage_tokens=250,
        )
        asked = phases(workload, TOKENS, counted)
        [precomputed] = asked["precompute"]
        assert [request.labels["document"] for request in precomputed] == [0, 1, 2]
        assert [request.at_s for [request] in asked["query"]] == [0.0, 0.25, 0.5, 0.75, 1.0]

    def test_random_arrivals_have_the_rate_in_the_mean(self) -> None:
        times = [
            request.at_s
            for request in requests(
                Rag(qps=10.0, poisson=True, requests=2_000, document_tokens=1), TOKENS
            )
        ]
        assert 180 < (times[-1] or 0) < 220
        assert times == sorted(times, key=lambda at_s: at_s or 0)

    def test_a_data_set_gives_questions_contexts_and_scores(self, tmp_path: Path) -> None:
        path = tmp_path / "set.json"
        entries = [
            {
                "question": "Who?",
                "ctxs": [{"title": "One", "text": "It was Ada."}, "Or Bob."],
                "answers": ["Ada Lovelace"],
            }
        ]
        path.write_text(json.dumps(entries))
        [request] = requests(Rag(examples=read_dataset(path), score=f1), TextPrompts())
        text = "".join(str(turn.content) for turn in request.turns)
        assert "One\nIt was Ada." in text
        assert "Or Bob." in text
        assert "Question: Who?" in text
        assert request.score is not None
        assert request.score("the Ada.") == pytest.approx(2 / 3)

    def test_a_data_set_needs_text(self, tmp_path: Path) -> None:
        path = tmp_path / "set.json"
        path.write_text('[{"question": "?", "ctxs": ["a"]}]')
        with pytest.raises(ConfigError, match="--prompts text"):
            requests(Rag(examples=read_dataset(path)), TOKENS)

    @pytest.mark.parametrize(
        "content", ["", "{}", "[]", '[{"ctxs": []}]', "[1]", '["\xe9"]', "[" * 100_000]
    )
    def test_what_is_no_data_set_is_an_error_that_names_the_file(
        self, content: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "set.json"
        path.write_text(content, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"set\.json"):
            read_dataset(path)

    def test_scores(self) -> None:
        assert f1("a cat sat", ["dog", "The cat sat!"]) == 1.0
        assert f1("cat", ["dog"]) == f1("cat", []) == f1("", ["dog"]) == 0.0
        assert rouge_l("one two three four", ["one three five"]) == pytest.approx(2 * 2 / 7)
        assert f1("one two", ["two one"]) == 1.0
        assert rouge_l("one two", ["two one"]) == 0.5


class TestTtftSweep:
    def test_each_length_is_cold_once_and_then_warm(self) -> None:
        sessions = phases(TtftSweep(lengths=(30, 90), following=2, runs=2), TOKENS)["sweep"]
        assert [[request.group for request in session] for session in sessions] == [
            [COLD, WARM, WARM]
        ] * 4
        for cold, *warm in sessions:
            length = cold.labels["context_tokens"]
            assert all(shared(prompt(cold), prompt(request)) == length for request in warm)
        assert shared(prompt(sessions[0][0]), prompt(sessions[2][0])) == 0, (
            "another run is another text"
        )

    def test_other_text_comes_between(self) -> None:
        [session] = phases(TtftSweep(lengths=(40,), flush_tokens=100), TOKENS)["sweep"]
        assert [
            (request.group, len(prompt(request))) for request in session if request.group == FILLER
        ] == [
            (FILLER, 40),
            (FILLER, 40),
            (FILLER, 20),
        ]
        assert [request.group for request in session] == [COLD, FILLER, FILLER, FILLER, WARM]
        assert len({tuple(prompt(request)) for request in session}) == 5


class TestReplay:
    def test_equal_ids_are_equal_tokens_and_arrivals_are_scaled(self, tmp_path: Path) -> None:
        lines = [
            line(0, 1_100, [0, 5, 9]),
            line(500, 600, [0, 6]),
            line(2_000, 1_536, [0, 5, 9], output=0),
        ]
        one, two, three = requests(
            Replay(write_trace(tmp_path / "trace", lines), time_scale=2.0), TOKENS
        )
        assert [len(prompt(request)) for request in (one, two, three)] == [1_100, 600, 1_536]
        assert [request.at_s for request in (one, two, three)] == [0.0, 0.25, 1.0]
        assert [request.max_tokens for request in (one, two, three)] == [5, 5, 1]
        assert shared(prompt(one), prompt(two)) == 512
        assert shared(prompt(one), prompt(three)) == 1_100

    @given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4), min_size=1, max_size=8))
    def test_prompts_share_what_their_ids_share(
        self, tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]]
    ) -> None:
        path = write_trace(
            tmp_path_factory.mktemp("trace") / "trace",
            [line(0, 512 * len(row), row) for row in ids],
        )
        asked = [prompt(request) for request in requests(Replay(path), TOKENS)]
        for one, ids_of_one in zip(asked, ids, strict=True):
            for two, ids_of_two in zip(asked, ids, strict=True):
                assert shared(one, two) // 512 == shared(ids_of_one, ids_of_two)

    def test_limits_cut_the_ends(self, tmp_path: Path) -> None:
        path = write_trace(
            tmp_path / "trace", [line(n, 1_100, [0, n, 90 + n], output=50) for n in range(4)]
        )
        asked = requests(
            Replay(path, max_requests=2, max_input_tokens=600, max_output_tokens=3), TOKENS
        )
        assert [(len(prompt(request)), request.max_tokens) for request in asked] == [
            (600, 3),
            (600, 3),
        ]
        whole = requests(Replay(path), TOKENS)
        assert prompt(whole[0])[:600] == prompt(asked[0])

    def test_all_at_once(self, tmp_path: Path) -> None:
        path = write_trace(tmp_path / "trace", [line(1_000 * n, 10, [n]) for n in range(3)])
        assert [
            request.at_s for request in requests(Replay(path, time_scale=float("inf")), TOKENS)
        ] == [0.0] * 3

    def test_a_bad_line_is_found_before_anything_is_sent(self, tmp_path: Path) -> None:
        path = tmp_path / "trace"
        path.write_text(json.dumps(line(0, 10, [1])) + "\n{}\n")
        with pytest.raises(ConfigError, match="line 2"):
            next(iter(Replay(path).phases(TOKENS)))
