"""`kvhold verify --blend` end to end on few prompts; its questions, intervals and permits."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from kvhold.blend.permits import BlendRefusal, Permit, Permits
from kvhold.blend.selection import make_selector
from kvhold.cache import open_cache
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.integrations.transformers import Blend, Reuse
from kvhold_lab.bench.blend.intervals import change_interval, interval, prompts_needed
from kvhold_lab.retrieval.training import TrainingPhase, train
from kvhold_lab.verify.blend.questions import Speech, made_questions, read_questions, words_of
from kvhold_lab.verify.blend.stories import stories
from kvhold_lab.verify.command import command
from tests.blend.permits import grant

LOOSE = {"max_f1_loss": 1.0}
LINE = {"documents": [[10, 11, 12], [20, 21]], "question": [1, 9, 9, 2], "answers": [[4, 5]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train(folder, (TrainingPhase(2, 2, 8, 9, 2, 64),), lambda said: None)
    return folder


def verify(*options: str, folder: Path, blend: dict[str, Any] = LOOSE) -> Result:
    config = json.dumps({"blend": {"permits": str(folder), **blend}})
    arguments = ["--blend", *options, "--tokens", "200", "--config", config]
    return CliRunner().invoke(command, arguments)


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


def byte_tokenizer() -> Any:
    """Each byte is a token, and 256 begins a text."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE({chr(number): number for number in range(256)} | {"<s>": 256}, [])
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


class TestCommand:
    def test_measures_each_selector_and_writes_permits(self, model: Path, tmp_path: Path) -> None:
        file, folder = tmp_path / "rows.json", tmp_path / "permits"
        options = (str(model), "--prompts", "3", "--ratio", "0.1", "--ratio", "1")
        result = verify(*options, "--json", str(file), folder=folder)
        assert result.exit_code == 0, result.output
        rows = {row["selector"]: row for row in json.loads(file.read_text())}
        assert list(rows) == [
            "deviation check_layer=1 ratio=0.1",
            "deviation check_layer=1 ratio=1.0",
            "first ratio=0.1",
            "first ratio=1.0",
            "query ratio=0.1",
            "query ratio=1.0",
            "none",
        ]
        for name, row in rows.items():
            is_full = "ratio=1.0" in name
            assert (row["recomputed"] == 1) == is_full
            assert (row["kl"] < 1e-9) == is_full
            assert row["f1_low"] < 0 < row["f1_high"]
            assert row["kl"] <= row["kl_high"] and row["kl_usual"] >= row["kl"]
            assert row["prompts"] == 3 and row["data"] == "kvhold's retrieval language"
        assert result.stdout.count("\npermitted: ") == 7
        # one name for transformers, one for vLLM
        assert len(list(folder.glob("*.json"))) == 14

    def test_few_prompts_do_not_make_a_permit(self, model: Path, tmp_path: Path) -> None:
        result = verify(
            *(str(model), "--prompts", "3", "--selector", "query ratio=1.0"),
            folder=tmp_path,
            blend={},
        )
        assert result.exit_code == 1
        assert re.search(
            r"not permitted: query ratio=1.0: F1 may be \d+\.\d points lower; blend.max_f1_loss is "
            r"1 points; some 2\d\d prompts like these suffice",
            result.stdout,
        )
        assert "kvhold verify: no permit" in result.stderr
        assert not list(tmp_path.iterdir())

    def test_a_worse_selector_loses_its_permit(self, model: Path, tmp_path: Path) -> None:
        options = (str(model), "--prompts", "4", "--selector", "none", "--model-id", "mine")
        grant(tmp_path, model="mine", selector="none", kl_high=0.0)
        permits = Permits(tmp_path, max_f1_loss=1)
        assert isinstance(permits.find("mine", "none"), Permit)
        strict = verify(*options, folder=tmp_path, blend=LOOSE | {"max_kl": 1e-9})
        assert strict.exit_code == 1
        assert "; worse with 95 % confidence\nwithdrawn: the permit of 20" in strict.stdout
        found = permits.find("mine", "none")
        assert isinstance(found, BlendRefusal)
        assert "withdrawn: kvhold verify: the KL may be" in found.reason
        assert verify(*options, folder=tmp_path).exit_code == 0
        assert isinstance(permits.find("mine", "none"), Permit)

    def test_data_of_the_user(self, model: Path, tmp_path: Path) -> None:
        """Without answers the full prefill's count."""
        unlabelled = {name: LINE[name] for name in ("documents", "question")}
        data = lines(tmp_path / "mine.jsonl", LINE, unlabelled, unlabelled | {"before": [7]})
        file = tmp_path / "rows.json"
        options = (str(model), "--data", str(data), "--selector", "none", "--json", str(file))
        assert verify(*options, folder=tmp_path).exit_code == 0
        (row,) = json.loads(file.read_text())
        assert (row["data"], row["prompts"]) == ("mine.jsonl", 3)
        assert row["f1_full"] >= 2 / 3
        assert row["kl"] > 0

    def test_the_settings_selector_is_the_default(self, model: Path, tmp_path: Path) -> None:
        blend = LOOSE | {"selector": "first", "ratio": 0.3}
        result = verify(str(model), "--prompts", "2", folder=tmp_path, blend=blend)
        assert result.stdout.count("permitted: ") == 1
        assert "permitted: first ratio=0.3: " in result.stdout

    def test_reuse_blends_by_its_permit(self, model: Path, tmp_path: Path) -> None:
        options = (str(model), "--prompts", "2", "--selector", "query", "--ratio", "0.5")
        assert verify(*options, folder=tmp_path).exit_code == 0
        blend = LOOSE | {"permits": str(tmp_path), "canary_share": 0}
        config = load_config({"tokens_per_chunk": 16, "blend": blend}, environ={})
        loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
        prompt = torch.randint(6, 400, (1, 100))
        for ratio, is_blended in ((0.5, True), (0.4, False)):
            selector = Blend(make_selector("query", ratio=ratio))
            with open_cache(ram_bytes="16MiB") as cache:
                reuse = Reuse(loaded, cache, config=config, blend=selector)
                reuse.forward(prompt, spans=[(0, 40), (40, 90)])
                assert bool(reuse.last.num_blended) == is_blended
                assert ("query ratio=0.4" in reuse.last.reason) != is_blended

    def test_a_model_with_a_tokenizer_answers_texts(self, tmp_path: Path) -> None:
        config = transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=4_096,
        )
        folder, file = tmp_path / "model", tmp_path / "rows.json"
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        mine = {"documents": ["One.", "Two."], "question": "Which?", "answers": ["one", "two"]}
        data = lines(tmp_path / "data.jsonl", mine)
        for options in (("--prompts", "1"), ("--data", str(data))):
            result = verify(
                *(str(folder), *options, "--selector", "none", "--json", str(file)),
                folder=tmp_path / "permits",
            )
            assert result.exit_code == 0, result.output
            (row,) = json.loads(file.read_text())
            assert row["kl"] > 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--selector", "quer"), "selector is 'quer'; known are"),
            (("--selector", "query ratio=2"), "ratio is 2.0"),
            (("--dtype", "x"), "--dtype x: not a type"),
        ],
    )
    def test_a_bad_option_is_named(
        self, model: Path, tmp_path: Path, options: tuple[str, ...], message: str
    ) -> None:
        result = verify(str(model), *options, folder=tmp_path)
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)

    def test_options_of_the_other_verify_are_refused(self, model: Path, tmp_path: Path) -> None:
        result = verify(str(model), "--paths", "plain", folder=tmp_path)
        assert result.exit_code == 2 and "No such option '--paths'" in result.output

    def test_a_folder_without_a_model_is_named(self, tmp_path: Path) -> None:
        result = verify(str(tmp_path), folder=tmp_path)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(f"MODEL {tmp_path} cannot be loaded: ")


class TestData:
    @pytest.fixture
    def speech(self) -> Speech:
        config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=30)
        return Speech(None, config, [3], limit=4)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"documents": []}, "documents is empty"),
            ({"documents": [[1, 2], [3]]}, "documents[1] has 1 tokens; it needs 2 or more"),
            ({"documents": "text"}, "Expected `array`, got `str` - at `$.documents`"),
            ({"documents": [[1, 2], 5]}, "at `$.documents[1]`"),
            ({"documents": [[1, "2"]]}, "at `$.documents[0][1]`"),
            ({"documents": [[1, 50]]}, "documents[0]: token 50 is not in the model's vocabulary"),
            ({"documents": ["a text"]}, "documents[0] is text, and the model has no tokenizer"),
            ({"question": []}, "question has 0 tokens"),
            ({"question": [-1]}, "question: token -1 is not in"),
            ({"answers": ["word"]}, "answers must be token ids"),
            ({"answers": [[1], "word"]}, "answers must be token ids"),
            ({"answer": [1]}, "unknown field `answer`"),
            ({"documents": [[1] * 23]}, "with its answer, the prompt has 31 tokens"),
            ({"before": "text"}, "before is text"),
        ],
    )
    def test_an_error_names_line_and_field(
        self, speech: Speech, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        data = lines(tmp_path / "data.jsonl", LINE, LINE | change)
        with pytest.raises(ConfigError, match=re.escape(message)) as caught:
            read_questions(data, speech, None)
        assert str(caught.value).startswith(f"{data}, line 2: ")
        assert len(read_questions(data, speech, 1)) == 1

    @pytest.mark.parametrize("raw", [b"{", b"[1]", b'"text"', b'\xff{"documents"', b"[" * 5_000])
    def test_a_line_that_is_no_object_is_named(
        self, speech: Speech, tmp_path: Path, raw: bytes
    ) -> None:
        data = tmp_path / "data.jsonl"
        data.write_bytes(b"\n" + raw + b"\n")
        with pytest.raises(ConfigError, match=re.escape(f"{data}, line 2: ")):
            read_questions(data, speech, None)

    def test_a_missing_question_and_an_empty_file(self, speech: Speech, tmp_path: Path) -> None:
        data = lines(tmp_path / "data.jsonl", {"documents": [[1, 2]]})
        with pytest.raises(ConfigError, match=r"line 1: .*required field `question`"):
            read_questions(data, speech, None)
        data.write_text("\n")
        with pytest.raises(ConfigError, match="has no lines"):
            read_questions(data, speech, None)

    def test_a_prompt_is_before_documents_and_question(
        self, speech: Speech, tmp_path: Path
    ) -> None:
        data = lines(tmp_path / "data.jsonl", LINE | {"before": [8]})
        (question,) = read_questions(data, speech, None)
        assert question.tokens == [8, 10, 11, 12, 20, 21, 1, 9, 9, 2]
        best = speech.score([5, 4], question, [])
        assert (best.f1, best.is_exact) == (1, False)
        assert speech.score([4, 5], question, []).is_exact
        assert speech.ends(question)([4, 3]) and not speech.ends(question)([3, 4])

    def test_without_a_tokenizer_there_are_no_made_texts(self, speech: Speech) -> None:
        with pytest.raises(ConfigError, match="no tokenizer; give --data FILE with token ids"):
            made_questions(speech, 2, num_tokens=200)


class TestTexts:
    @pytest.fixture
    def speech(self) -> Speech:
        config = transformers.LlamaConfig(vocab_size=257, max_position_embeddings=9_000)
        return Speech(byte_tokenizer(), config, [0], limit=20)

    def test_documents_and_question_are_tokenized_apart(self, speech: Speech) -> None:
        name, (question, *_) = made_questions(speech, 3, num_tokens=200)
        assert name == "kvhold's texts"
        assert len(question.documents) == 5 and question.is_text
        assert bytes(question.documents[0]).startswith(b"Note on the ")
        assert bytes(question.question).endswith(b"?\nAnswer:")
        (answer,) = question.answers
        assert len(answer) == 2

    def test_an_answer_is_one_line_of_words(self, speech: Speech) -> None:
        question = made_questions(speech, 1, num_tokens=200)[1][0]
        question = type(question)(**vars(question) | {"answers": [["ada", "dorn"]]})
        ends = speech.ends(question)
        assert not ends(list(b"\n Ada"))
        assert ends(list(b" Ada\n")) and ends([*b" Ada", 0])
        assert speech.score(list(b" Ada DORN."), question, []).is_exact
        assert speech.score(list(b" Dorn"), question, []).f1 == pytest.approx(2 / 3)
        assert words_of("The  Mill's key") == ["the", "mill", "s", "key"]

    def test_each_answer_follows_from_one_or_two_documents(self) -> None:
        found = stories(np.random.default_rng(0))
        needed = set()
        for _ in range(200):
            story = next(found)
            asks = re.search(r"Who (.*) the (\w+) of", story["question"])
            assert asks
            duty, place = asks.groups()
            text = "".join(story["documents"])
            (answer,) = story["answers"]
            direct = re.findall(rf"(\w+ \w+) {duty} the {place}\.", text)
            through = re.search(rf"The person who (.*) the (\w+) also {duty} the {place}\.", text)
            if through is None:
                assert direct == [answer]
            else:
                assert re.findall(rf"(\w+ \w+) {through[1]} the {through[2]}\.", text) == [answer]
            needed.add(1 if through is None else 2)
            assert len({len(document) > 100 for document in story["documents"]}) == 1
        assert needed == {1, 2}


class TestIntervals:
    def test_few_prompts_without_a_change_prove_nothing(self) -> None:
        assert change_interval([0.0] * 5)[0] < -0.3
        low, high = change_interval([0.0] * 400)
        assert -0.01 < low < -0.004 and 0.004 < high < 0.01

    def test_the_interval_holds_in_95_of_100_samples(self) -> None:
        rng, held = np.random.default_rng(0), 0
        for _ in range(200):
            changes = rng.choice([-1.0, 0.0, 0.5], 150, p=[0.05, 0.85, 0.1])
            low, high = change_interval(changes.tolist())
            held += low <= 0 <= high
        assert held >= 186

    def test_that_of_many_is_near_the_normal_one(self) -> None:
        values = np.random.default_rng(1).normal(1, 2, 1_000)
        low, high = interval(values.tolist())
        middle, half = values.mean(), 1.96 * values.std() / 1_000**0.5
        assert (low, high) == pytest.approx((middle - half, middle + half), abs=0.02)

    def test_the_number_of_prompts_that_is_needed_suffices(self) -> None:
        for changes, loss in (([0.0], 0.01), ([0.0] * 98 + [-1.0, 1.0], 0.02)):
            needed = prompts_needed(changes, loss)
            repeated = (changes * needed)[: max(needed, len(changes))]
            assert change_interval(repeated)[0] == pytest.approx(-loss, rel=0.15)
        assert 250 < prompts_needed([0.0], 0.01) < 300
        assert prompts_needed([-0.5, 0.0], 0.01) == 0
