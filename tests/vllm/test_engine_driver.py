"""A real vLLM in a child process, without a connector: what every test and demo on top of it relies
on.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhold_lab.engines.engine import Engine, is_vllm_available, options_for
from kvhold_lab.engines.messages import EngineOptions
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.preloaded import VARIABLE
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.engines.prompts import make_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not is_vllm_available(), reason="no vLLM in this environment"),
]

_MAX_MODEL_LEN = 2_048


@pytest.fixture(scope="module")
def tiny() -> ModelInfo:
    return make_model("tiny")


@pytest.fixture(scope="module")
def engine(tiny: ModelInfo) -> Iterator[Engine]:
    with Engine(options_for(tiny, max_model_len=_MAX_MODEL_LEN)) as engine:
        yield engine


def test_the_same_prompt_gives_the_same_tokens_and_the_second_time_comes_from_the_prefix_cache(
    engine: Engine, tiny: ModelInfo
) -> None:
    assert engine.ready is not None
    block = engine.ready.tokens_per_block
    prompt = make_prompt(tiny.path, 5 * block + 7, seed=1)
    first, second = (engine.generate(prompt, max_tokens=16) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 16
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 5 * block)
    assert 0 < first.ttft_s <= first.total_s


def test_a_reset_makes_the_engine_compute_again(engine: Engine, tiny: ModelInfo) -> None:
    prompt = make_prompt(tiny.path, 700, seed=2)
    first = engine.generate(prompt, max_tokens=4)
    assert engine.reset_prefix_cache()
    again = engine.generate(prompt, max_tokens=4)
    assert again.num_cached_tokens == 0
    assert again.token_ids == first.token_ids


def test_a_prompt_that_is_too_long_is_refused_and_the_engine_goes_on(
    engine: Engine, tiny: ModelInfo
) -> None:
    with pytest.raises(EngineFailed, match="refused"):
        engine.generate(make_prompt(tiny.path, 2 * _MAX_MODEL_LEN, seed=3), max_tokens=4)
    assert len(engine.generate(make_prompt(tiny.path, 50, seed=3), max_tokens=4).token_ids) == 4


def test_pieces_of_a_prompt_and_no_prefix_cache_give_the_same_tokens(
    engine: Engine, tiny: ModelInfo
) -> None:
    prompt = make_prompt(tiny.path, 700, seed=4)
    options = options_for(
        tiny,
        max_model_len=_MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        block_size=32,
        prefix_caching=False,
    )
    with Engine(options) as other:
        assert other.ready is not None
        assert other.ready.tokens_per_block == 32
        runs = [other.generate(prompt, max_tokens=16) for _ in range(2)]
    assert [run.num_cached_tokens for run in runs] == [0, 0]
    assert (
        runs[0].token_ids == runs[1].token_ids == engine.generate(prompt, max_tokens=16).token_ids
    )


def test_an_engine_that_is_killed_is_reported_as_dead_and_its_log_is_quoted(
    tiny: ModelInfo, tmp_path: Path
) -> None:
    log_path = tmp_path / "engine.log"
    engine = Engine(options_for(tiny, max_model_len=_MAX_MODEL_LEN), log_path=log_path).start()
    try:
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="died by SIGKILL") as caught:
            engine.generate([1, 2, 3], max_tokens=1)
        assert str(log_path) in str(caught.value)
        assert log_path.read_text()[-40:] in str(caught.value)
        with pytest.raises(EngineFailed, match="died by SIGKILL"):
            engine.reset_prefix_cache()
    finally:
        engine.stop()


def test_an_engine_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    engine = Engine(
        EngineOptions(
            model_path=str(tmp_path / "nothing"), max_model_len=512, kv_cache_bytes=1 << 24
        )
    )
    with pytest.raises(EngineFailed, match="nothing"):
        engine.start()
    _assert_gone(engine.pid)


def test_an_engine_that_is_silent_for_too_long_is_ended(tiny: ModelInfo) -> None:
    engine = Engine(options_for(tiny, max_model_len=_MAX_MODEL_LEN))
    with pytest.raises(EngineFailed, match="silent for too long"):
        engine.start(timeout_s=0.01)
    _assert_gone(engine.pid)


def test_the_server_streams_the_same_tokens_counts_its_hits_and_ends_when_told(
    engine: Engine, tiny: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its users start it: in other tests servers are forked."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert engine.ready is not None
    block = engine.ready.tokens_per_block
    prompt = make_prompt(tiny.path, 5 * block + 7, seed=5)
    with OpenAIServer(options_for(tiny, max_model_len=_MAX_MODEL_LEN)) as server:
        first, second = (server.complete(prompt, max_tokens=8) for _ in range(2))
        assert (
            first.token_ids == second.token_ids == engine.generate(prompt, max_tokens=8).token_ids
        )
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 5 * block)
        assert 0 < first.ttft_s < first.total_s
        assert server.metric("vllm:prefix_cache_hits_total") == 5 * block
        assert server.metric("vllm:external_prefix_cache_hits_total") == 0
        assert server.complete("import os\n", max_tokens=2).text
        with pytest.raises(EngineFailed, match="answered 400"):
            server.complete([1] * (2 * _MAX_MODEL_LEN), max_tokens=2)
        pid = server.pid
    _assert_gone(pid)


def _assert_gone(pid: int) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
