"""`kvhold bench quality`: questions have the answers they say, KV is taken out and put back as it
was, and harm is seen.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvhold.codecs import Raw, frame_chunk
from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, Namespace, make_key
from kvhold_lab.bench.command import command
from kvhold_lab.bench.quality import model as model_module
from kvhold_lab.bench.quality.measure import MeasuredChannels, measure, standard_error
from kvhold_lab.bench.quality.model import QualitySubject, find_weights, load_subject
from kvhold_lab.bench.quality.passing import through
from kvhold_lab.bench.quality.run import LONGEST, SHORTEST, evaluate, recall_batches, trained_kv
from kvhold_lab.bench.quality.tasks import (
    HOP,
    LOOKUP,
    NO_KIND,
    RUN,
    RUN_LETTERS,
    Asked,
    Exams,
    draw,
)
from kvhold_lab.bench.quality.writing import CONTINUED_TOKENS, continued, written_recall
from kvhold_lab.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow  # a model answers

ASKED = Asked(lookups=5, hops=2, runs=2)
FIELDS = {
    "codec",
    "ratio",
    "accuracy",
    "accuracy_drop",
    "accuracy_drop_se",
    "kl",
    "perplexity_ratio",
    "error",
}


class Zeroing(Raw):
    """Everything becomes 0."""

    name: ClassVar[str] = "test-zeroing"
    lossless: ClassVar[bool] = False
    error_bound: ClassVar[float] = 1.0

    def encode(self, plain: memoryview, out: memoryview, **place: Any) -> int:
        return 0

    def decode(self, encoded: memoryview, out: memoryview, **place: Any) -> None:
        out[:] = bytes(len(out))


class ShiftingTails(Raw):
    """Values of a tail stand one token further on; keys and whole chunks are as they were.

    Keys and values together may stand anywhere: keys have their positions in them, and attention
    has no order of its own.
    """

    name: ClassVar[str] = "test-shifting"

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Any,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        out[:] = encoded
        if num_tokens < layout.tokens_per_chunk:
            _, values = np.frombuffer(out, np.uint8).reshape(2, num_tokens, -1)
            values[:] = np.roll(values, 1, axis=0)


class Picky(Zeroing):
    """Accepts nothing, so nothing may come to it."""

    name: ClassVar[str] = "test-picky"

    def accepts(self, layout: Any, group: int) -> bool:
        return False


class Rounding(Raw):
    """Numbers of a token in one head are rounded to multiples of their largest / `steps`."""

    lossless: ClassVar[bool] = False
    error_bound: ClassVar[float] = 1.0

    def __init__(self, steps: int) -> None:
        self.name = f"test-{steps}"  # type: ignore[misc]  # one class for several
        self.steps = steps

    def decode(
        self,
        encoded: memoryview,
        out: memoryview,
        *,
        layout: Any,
        group: int,
        layer: int,
        num_tokens: int,
    ) -> None:
        bits = np.frombuffer(encoded, np.uint16).reshape(-1, layout.groups[group].head_dim)
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)
        unit = np.abs(numbers).max(axis=1, keepdims=True) / self.steps + np.float32(1e-30)
        rounded = np.rint(numbers / unit) * unit
        out[:] = (rounded.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other on busy cores cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def random_model() -> QualitySubject:
    """A Llama of random weights, which answers nothing, with a tokenizer of bytes."""
    return load_subject(make_checkpoint("llama").path, tokens_per_chunk=32)


@pytest.fixture(scope="module")
def trained() -> QualitySubject:
    folder = find_weights()
    assert folder is not None, "benchmarks/quality/model belongs to a checkout"
    return load_subject(folder, tokens_per_chunk=128)


@pytest.fixture(scope="module")
def script() -> Any:
    place = Path(__file__).resolve().parents[3] / "benchmarks" / "quality" / "train.py"
    spec = importlib.util.spec_from_file_location("train", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few() -> list[Exams]:
    """12 contexts of one to three chunks and a tail, in two batches."""
    rng = np.random.default_rng(5)
    return [draw(rng, num_exams=6, num_tokens=num_tokens, asked=ASKED) for num_tokens in (216, 300)]


def exams_for(subject: QualitySubject, num_tokens: int) -> Exams:
    """Tokens without meaning, every second one asked."""
    tokens = np.random.default_rng(3).integers(
        0, subject.model.config.vocab_size, (3, num_tokens + 9)
    )
    kinds = np.tile(np.arange(9) % 2 * LOOKUP, (3, 1))
    return Exams(tokens[:, :num_tokens], tokens[:, num_tokens:], kinds)


class TestQuestions:
    @pytest.mark.parametrize(
        ("num_tokens", "asked"),
        [(80, ASKED), (331, ASKED), (64, Asked(8, 2, 1)), (21, Asked(10, 0, 0))],
    )
    def test_answers_are_what_the_context_says(self, num_tokens: int, asked: Asked) -> None:
        exams = draw(np.random.default_rng(1), num_exams=20, num_tokens=num_tokens, asked=asked)
        assert exams.contexts.shape == (
            20,
            num_tokens,
        ) and exams.questions.shape == exams.kinds.shape == (20, asked.num_tokens)
        for context, questions, kinds in zip(
            exams.contexts.tolist(), exams.questions.tolist(), exams.kinds.tolist(), strict=True
        ):
            runs, pairs = self.read(context)
            assert not set(runs) & set(pairs)
            at, count = 0, {LOOKUP: 0, HOP: 0, RUN: 0}
            told: set[int] = set()
            while at < len(questions):
                mark, key = questions[at : at + 2]
                rights: dict[int, list[int] | list[int | None]] = {
                    LOOKUP: [pairs.get(key)],
                    HOP: [pairs.get(pairs.get(key, -1))],
                    RUN: runs.get(key, []),
                }
                right = rights[mark]
                assert questions[at + 2 : at + 2 + len(right)] == right
                assert kinds[at : at + 2 + len(right)] == [NO_KIND, NO_KIND] + [mark] * len(right)
                asks_about = {key, pairs[key]} if mark == HOP else {key}
                assert not asks_about & told, "a question tells another's answer"
                told |= asks_about
                at, count[mark] = at + 2 + len(right), count[mark] + 1
            assert count == {LOOKUP: asked.lookups, HOP: asked.hops, RUN: asked.runs}

    def read(self, context: list[int]) -> tuple[dict[int, list[int]], dict[int, int]]:
        """What a reader who knows the format finds; each key once."""
        at, runs, pairs = 0, {}, {}
        while context[at] == 0:
            at += 1
        while at < len(context):
            if context[at] == RUN:
                assert context[at + 1] not in runs
                runs[context[at + 1]] = context[at + 2 : at + 2 + RUN_LETTERS]
                at += 2 + RUN_LETTERS
            else:
                assert context[at] not in pairs
                pairs[context[at]] = context[at + 1]
                at += 2
        return runs, pairs

    def test_the_same_seed_asks_the_same(self) -> None:
        one, same, other = (
            draw(np.random.default_rng(seed), num_exams=3, num_tokens=90, asked=ASKED)
            for seed in (1, 1, 2)
        )
        assert np.array_equal(one.contexts, same.contexts) and np.array_equal(
            one.questions, same.questions
        )
        assert not np.array_equal(one.contexts, other.contexts)

    def test_a_context_too_short_or_too_long_is_refused(self) -> None:
        for num_tokens in (ASKED.least_context - 1, 1_000):
            with pytest.raises(ValueError, match="a context of"):
                draw(np.random.default_rng(0), num_exams=1, num_tokens=num_tokens, asked=ASKED)

    def test_lengths_go_from_the_shortest_to_the_longest_and_no_context_is_lost(self) -> None:
        shapes = [exams.contexts.shape for exams in recall_batches(21)]
        assert sum(count for count, _ in shapes) == 21
        assert (shapes[0][1], shapes[-1][1]) == (SHORTEST, LONGEST) and all(
            length % 128 for _, length in shapes
        )

    def test_a_text_is_cut_into_pieces_that_follow_their_context(self) -> None:
        step = 30 + CONTINUED_TOKENS
        pieces = list(continued(list(range(5 * step + 7)), num_contexts=3, num_tokens=30))
        assert [int(piece.contexts[0, 0]) for piece in pieces] == [0, 2 * step, 4 * step]
        for piece in pieces:
            assert piece.contexts.shape == (1, 30) and piece.questions.shape == (
                1,
                CONTINUED_TOKENS,
            )
            assert (
                piece.questions[0, 0] == piece.contexts[0, -1] + 1
                and not piece.kinds[0, 0]
                and piece.kinds[0, 1:].all()
            )
        with pytest.raises(ConfigError, match="a text of"):
            list(continued([1] * (step - 1), num_contexts=3, num_tokens=30))

    def test_written_numbers_stand_in_the_context(self, random_model: QualitySubject) -> None:
        for exams in written_recall(random_model.tokenizer, num_contexts=3, num_tokens=400, seed=1):
            context = random_model.tokenizer.decode(exams.contexts[0])
            lines = random_model.tokenizer.decode(exams.questions[0]).strip("\n").split("\n")
            answers = random_model.tokenizer.decode(
                exams.questions[0][exams.kinds[0] != NO_KIND]
            ).split()
            assert len(lines) == len(set(lines)) == len(answers) == 8
            for line, answer in zip(lines, answers, strict=True):
                assert line in context and line.endswith(f" is {answer}.")


class TestPassing:
    def test_chunks_are_framed_one_by_one_with_the_tail(self, random_model: QualitySubject) -> None:
        kv = random_model.prefill(exams_for(random_model, 32 + 32 + 11).contexts)
        assert kv.shape == (3, 4, 2, 75, 2, 32) and kv.dtype == np.uint16
        passed = through(Raw(), kv, random_model.layout)
        key = make_key(
            Namespace(model="", layout=random_model.layout).digest, bytes(HASH_BYTES), 0, 0
        )
        frames = 0
        for start, count in ((0, 32), (32, 32), (64, 11)):
            chunk = memoryview(np.ascontiguousarray(kv[0, :, :, start : start + count]).tobytes())
            frames += frame_chunk(
                chunk,
                Raw(),
                key=key,
                layout=random_model.layout,
                num_tokens=count,
                first_token=start,
            ).nbytes
        assert (passed.plain_bytes, passed.frame_bytes) == (kv.nbytes, 3 * frames)
        assert (
            np.array_equal(passed.bits, kv)
            and passed.error == 0
            and not np.shares_memory(passed.bits, kv)
        )

    def test_what_a_codec_does_not_accept_stays_raw(self, random_model: QualitySubject) -> None:
        kv = random_model.prefill(exams_for(random_model, 40).contexts)
        assert np.array_equal(through(Picky(), kv, random_model.layout).bits, kv)

    def test_the_error_is_of_the_worst_layer_of_the_worst_chunk(
        self, random_model: QualitySubject
    ) -> None:
        kv = random_model.prefill(exams_for(random_model, 40).contexts)
        assert through(Zeroing(), kv, random_model.layout).error == 1.0


class TestModel:
    def test_kv_out_and_back_is_as_never_having_left(self, random_model: QualitySubject) -> None:
        exams = exams_for(random_model, 75)
        kv = random_model.prefill(exams.contexts)
        before = random_model.answer(kv, exams.questions)
        after = random_model.answer(through(Raw(), kv, random_model.layout).bits, exams.questions)
        assert torch.equal(before, after)
        with torch.no_grad():
            whole = random_model.model(
                torch.from_numpy(np.concatenate([exams.contexts, exams.questions], axis=1))
            ).logits[:, 75:]
        apart = (before - whole).norm() / whole.norm()
        assert 0 < apart < 0.02, "KV in bfloat16, the rest in float32: near, and not the same"

    def test_what_it_cannot_answer_has_no_drop(self, random_model: QualitySubject) -> None:
        (row,) = measure(random_model, [exams_for(random_model, 75)], [Raw()])
        assert row.accuracy is not None and row.accuracy < 0.5
        assert (row.accuracy_drop, row.accuracy_drop_se, row.kl, row.perplexity_ratio) == (
            None,
            None,
            0.0,
            1.0,
        )

    def test_a_model_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_subject(tmp_path, tokens_per_chunk=32)


class TestTraining:
    def test_every_phase_can_be_drawn_at_both_ends(self, script: Any) -> None:
        for phase in script.PHASES:
            for num_tokens in (phase.shortest, phase.longest):
                draw(
                    np.random.default_rng(0),
                    num_exams=1,
                    num_tokens=num_tokens,
                    asked=phase.asked,
                    num_keys=phase.num_keys,
                )

    def test_the_committed_model_is_the_one_it_makes(
        self, script: Any, trained: QualitySubject
    ) -> None:
        fresh = script.model_of_seed(script.SEED)
        assert {name: tuple(weight.shape) for name, weight in fresh.named_parameters()} == {
            name: tuple(weight.shape) for name, weight in trained.model.named_parameters()
        }
        assert trained.recalls and trained.tokenizer is None
        assert trained.model.config.rope_parameters == fresh.config.rope_parameters

    def test_heads_begin_with_the_token_before(self, script: Any) -> None:
        """Layer 0's first head looks there; nothing else would let recall begin within the steps
        there are.
        """
        model = script.model_of_seed(script.SEED)
        model.set_attn_implementation("eager")
        exams = draw(np.random.default_rng(0), num_exams=2, num_tokens=60, asked=ASKED)
        with torch.no_grad():
            looks = model(torch.from_numpy(exams.contexts), output_attentions=True).attentions[0][
                :, 0
            ]
        assert (looks[:, 2:].argmax(-1) == torch.arange(1, 59)).float().mean() > 0.9


class TestMeasure:
    def test_a_channel_that_is_larger_than_the_others_is_told(self) -> None:
        kv = np.full((1, 3, 2, 10, 2, 8), 0x3F80, np.uint16)  # 1.0
        kv[0, 1, 0, :, 1, 3] = 0x4180  # 16.0
        kv[0, 2, 1, :, 0, 0] = 0xC080  # -4.0
        assert MeasuredChannels.of(kv) == MeasuredChannels(
            keys=[1.0, 16.0, 1.0], values=[1.0, 1.0, 4.0]
        )

    def test_raw_costs_nothing(self, trained: QualitySubject, few: list[Exams]) -> None:
        (row,) = measure(trained, few, [Raw()])
        assert (
            row.accuracy_drop,
            row.accuracy_drop_se,
            row.kl,
            row.perplexity_ratio,
            row.error,
        ) == (0.0, 0.0, 0.0, 1.0, 0.0)
        assert row.accuracy is not None and row.accuracy > 0.9
        assert 0.98 < row.ratio < 1, "headers are counted"
        assert (row.contexts, row.answers) == (12, 12 * (5 + 2 + 2 * RUN_LETTERS)) and set(
            row.by_kind
        ) == {"lookup", "hop", "run"}

    def test_without_kv_answers_are_chance(self, trained: QualitySubject, few: list[Exams]) -> None:
        (row,) = measure(trained, few, [Zeroing()])
        assert row.accuracy is not None and row.accuracy < 0.15
        assert row.accuracy_drop is not None and row.accuracy_drop > 80
        assert row.kl > 1 and row.perplexity_ratio > 5

    def test_one_chunk_one_token_off_is_seen(
        self, trained: QualitySubject, few: list[Exams]
    ) -> None:
        harmed, whole = measure(trained, few, [ShiftingTails(), Raw()])
        assert harmed.ratio == whole.ratio and harmed.error > 0.1
        assert harmed.accuracy_drop is not None and harmed.accuracy_drop > 3 * max(
            harmed.accuracy_drop_se or 0.0, 0.2
        )
        assert harmed.kl > 0.01 and harmed.perplexity_ratio > 1.01

    def test_coarser_is_worse(self, trained: QualitySubject, few: list[Exams]) -> None:
        rows = measure(trained, few, [Rounding(127), Rounding(7), Rounding(1)])
        for finer, coarser in itertools.pairwise(rows):
            assert (
                finer.error < coarser.error
                and finer.kl < coarser.kl
                and finer.perplexity_ratio < coarser.perplexity_ratio
            )
        assert rows[-1].accuracy_drop is not None and rows[-1].accuracy_drop > 1

    def test_the_standard_error_is_that_of_contexts(self) -> None:
        lost = [0, 2, 1, 0, -1, 4]
        of_shares = np.std(np.array(lost) / 10, ddof=1) / np.sqrt(len(lost))
        assert standard_error(lost, [10] * 6) == pytest.approx(100 * of_shares)
        assert standard_error([0, 0], [3, 5]) == 0 and np.isnan(standard_error([1], [3]))


class TestCommand:
    def invoke(self, tmp_path: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
        found = CliRunner().invoke(
            command,
            ["quality", *arguments, "--json", str(tmp_path / "rows.json")],
            catch_exceptions=False,
        )
        assert found.exit_code == 0, found.output
        return json.loads((tmp_path / "rows.json").read_text()), found.output

    def test_rows_are_written_and_drawn(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        pytest.importorskip("numba", reason="no numba in this environment")
        plot = tmp_path / "quality.svg"
        rows, shown = self.invoke(
            tmp_path, "--codecs", "raw,int8", "--contexts", "4", "--plot", str(plot)
        )
        assert [row["codec"] for row in rows] == ["raw", "int8"] and all(
            set(row) >= FIELDS for row in rows
        )
        assert (
            rows[0]["accuracy_drop"] == rows[0]["kl"] == 0 < rows[1]["kl"]
            and rows[1]["ratio"] > 1.8
        )
        assert "recall of keys" in shown and "\nint8 " in shown
        assert plot.read_text().count(">int8<") == 1

    def test_a_model_with_words_is_asked_numbers_or_how_a_text_goes_on(
        self, tmp_path: Path
    ) -> None:
        folder, text = str(make_checkpoint("llama").path), tmp_path / "text.txt"
        rows, shown = self.invoke(tmp_path, "--codecs", "raw", "--model", folder, "--contexts", "2")
        assert (
            rows[0]["accuracy_drop"] is None
            and rows[0]["kl"] == 0
            and "a drop would say nothing" in shown
        )
        text.write_text("What was said is said again, and again. " * 40)
        rows, shown = self.invoke(
            tmp_path, "--codecs", "raw", "--model", folder, "--text", str(text), "--contexts", "2"
        )
        assert (
            rows[0]["accuracy"] is None
            and rows[0]["perplexity_ratio"] == 1
            and "there is no accuracy" in shown
        )

    def test_an_unknown_codec_is_named(self) -> None:
        found = CliRunner().invoke(command, ["quality", "--codecs", "raw,rawr"])
        assert found.exit_code == 2 and "rawr: known are" in found.output

    def test_where_there_are_no_weights_it_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(model_module, "WEIGHTS", tmp_path)
        for ask in (lambda: evaluate(["raw"]), lambda: trained_kv(1)):
            with pytest.raises(ConfigError, match="in a checkout's benchmarks/quality/model"):
                ask()


@pytest.mark.slow
def test_what_the_trained_model_says_of_our_codecs() -> None:
    pytest.importorskip("numba", reason="no numba in this environment")
    rows = {row.codec: row for row in evaluate(["raw", "lossless", "int8"], num_contexts=72).rows}
    assert (
        rows["raw"].accuracy is not None
        and rows["raw"].accuracy >= 0.97
        and rows["raw"].answers >= 1_000
    )
    assert min(rows["raw"].by_kind.values()) >= 0.95
    for name in ("raw", "lossless"):
        assert (rows[name].accuracy_drop, rows[name].kl, rows[name].perplexity_ratio) == (
            0.0,
            0.0,
            1.0,
        )
    assert (
        rows["int8"].accuracy_drop is not None
        and rows["int8"].accuracy_drop < 1.0
        and rows["int8"].kl > 0
    )
