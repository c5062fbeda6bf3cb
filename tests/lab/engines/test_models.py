"""The models the demo makes: their promise of size, the same bytes every time, prompts of exact
length.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvhold_lab.engines.models import SIZES, ModelInfo, make_model
from kvhold_lab.engines.prompts import VOCAB_SIZE, make_prompt

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return make_model("tiny", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("size", "promised"), [("tiny", 5e6), ("small", 50e6), ("mid", 206e6)])
def test_a_size_is_within_a_tenth_of_its_promise(size: str, promised: float) -> None:
    assert SIZES[size].num_parameters == pytest.approx(promised, rel=0.1)


@pytest.mark.parametrize("size", list(SIZES))
def test_heads_are_shared_and_fit_the_kernels_of_vllm_on_cpus(size: str) -> None:
    geometry = SIZES[size]
    assert geometry.num_kv_heads < geometry.num_heads
    assert geometry.num_heads % geometry.num_kv_heads == 0
    assert geometry.head_dim in (32, 64, 80, 96, 112, 128)


def test_the_kv_of_a_long_prompt_of_the_mid_model_is_as_large_as_a_real_one_of_its_size() -> None:
    assert 50e6 < 4_000 * SIZES["mid"].kv_bytes_per_token < 100e6


def test_an_unknown_size_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny, small, mid"):
        make_model("huge", tmp_path)


def test_a_model_is_the_same_bytes_wherever_it_is_made(tiny: ModelInfo, tmp_path: Path) -> None:
    other = make_model("tiny", tmp_path)
    assert other.path != tiny.path
    assert other.path.name == tiny.path.name
    assert _digests(other.path) == _digests(tiny.path)


def test_a_model_that_is_there_is_not_made_again(tiny: ModelInfo) -> None:
    before = (tiny.path / "model.safetensors").stat().st_mtime_ns
    again = make_model("tiny", tiny.path.parent)
    assert again == tiny
    assert (again.path / "model.safetensors").stat().st_mtime_ns == before


def test_two_makers_at_once_leave_one_whole_model_and_nothing_else(
    tiny: ModelInfo, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make_model, ["tiny", "tiny"], [tmp_path, tmp_path])
    assert first == second
    assert [entry.name for entry in tmp_path.iterdir()] == [first.path.name]
    assert _digests(first.path) == _digests(tiny.path)


def test_the_cache_folder_of_the_user_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make_model("tiny").path.parent == tmp_path / "kvhold" / "models"


def test_any_text_survives_the_tokenizer(tiny: ModelInfo) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    text = "def f(x):\n\treturn x  # größer als 30 °C ☃ \x00\x7f 漢字\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (
        tokenizer.get_vocab_size()
        == VOCAB_SIZE
        == json.loads((tiny.path / "config.json").read_text())["vocab_size"]
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 40, 127, 4_000, 16_000])
def test_a_prompt_has_exactly_the_tokens_asked_for(tiny: ModelInfo, num_tokens: int) -> None:
    prompt = make_prompt(tiny.path, num_tokens, seed=3)
    assert len(prompt) == num_tokens
    assert all(0 < token_id < VOCAB_SIZE for token_id in prompt), (
        "no special token, nothing beyond the vocabulary"
    )


def test_a_prompt_is_the_same_every_time_and_longer_ones_begin_with_shorter_ones(
    tiny: ModelInfo,
) -> None:
    prompt = make_prompt(tiny.path, 500, seed=1)
    assert make_prompt(tiny.path, 500, seed=1) == prompt
    assert make_prompt(tiny.path, 300, seed=1) == prompt[:300]


def test_prompts_of_different_seeds_part_at_once(tiny: ModelInfo) -> None:
    prompts = [make_prompt(tiny.path, 300, seed=seed) for seed in range(50)]
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 50


def test_prompts_share_exactly_what_is_asked_for(tiny: ModelInfo) -> None:
    first, second = (
        make_prompt(tiny.path, 600, seed=seed, num_shared_tokens=256) for seed in (1, 2)
    )
    assert first[:256] == second[:256]
    assert first[256:264] != second[256:264]
    with pytest.raises(ValueError, match="do not fit"):
        make_prompt(tiny.path, 100, num_shared_tokens=101)


def test_transformers_reads_the_checkpoint_and_its_output_depends_on_all_of_the_prompt(
    tiny: ModelInfo,
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path)
    assert tokenizer.decode(tokenizer.encode("import os\n")) == "import os\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == tiny.num_parameters

    def greedy(prompt: list[int]) -> list[int]:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None
        )
        return list(output[0, len(prompt) :].tolist())

    outputs = [greedy(make_prompt(tiny.path, 300, seed=seed)) for seed in range(4)]
    assert all(len(set(output)) > 16 for output in outputs), (
        "a model that repeats itself would hide wrong KV"
    )
    assert len({tuple(output) for output in outputs}) == 4
    prompt = make_prompt(tiny.path, 300, seed=0)
    assert greedy([prompt[0] + 1, *prompt[1:]]) != outputs[0]


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
