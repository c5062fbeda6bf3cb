"""A real vLLM over tiers with codecs: lossless changes no token, and what one with a loss changes
stays small.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold_lab.bench.link import COLD, rows
from kvhold_lab.bench.quality.model import find_weights
from kvhold_lab.bench.quality.tasks import NO_KIND, Asked, draw
from kvhold_lab.engines.engine import Engine
from kvhold_lab.engines.messages import EngineOptions, Generated
from kvhold_lab.engines.models import make_model
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

pytestmark = pytest.mark.vllm

PATIENT_S = 120.0
PATIENT = f"probe_timeout_s={PATIENT_S}&get_timeout_s={PATIENT_S}&put_timeout_s={PATIENT_S}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small trained model, with a tokenizer beside it, which vLLM wants and nobody uses."""
    weights, folder = find_weights(), tmp_path_factory.mktemp("model")
    assert weights is not None, "this is a checkout"
    for file in (*weights.iterdir(), *make_model("tiny").path.glob("token*")):
        shutil.copy(file, folder)
    return folder


@dataclass(frozen=True)
class Question:
    """A context and the beginning of a question, and the token that answers it."""

    prompt: list[int]
    answer: int


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    exams = draw(
        np.random.default_rng(5),
        num_exams=12,
        num_tokens=450,
        asked=Asked(lookups=1, hops=0, runs=0),
    )
    first = [int(np.flatnonzero(kinds != NO_KIND)[0]) for kinds in exams.kinds]
    given = zip(exams.contexts, exams.questions, first, strict=True)
    return [
        Question([*map(int, context), *map(int, question[:at])], int(question[at]))
        for context, question, at in given
    ]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    try:
        with RedisServer() as server:
            yield server
    except NotInstalled as error:
        pytest.skip(str(error))


def stop_node(path: Path) -> None:
    with NodeClient(path, ClientConfig(call_timeout_s=PATIENT_S), name="test") as client:
        client.stop_node()


def ask(
    model: Path,
    questions: list[Question],
    socket: Path | None,
    *tiers: str,
    memory_codec: str = "none",
    **rules: Any,
) -> list[Generated]:
    """What an engine of its own answers, with a node of its own; what it stores is in the tiers by
    then.
    """
    extra = {
        "ram_bytes": "64MiB",
        "memory_codec": memory_codec,
        "tiers": list(tiers),
        "rules": {"plan": False} | rules,
        "node": {"socket": str(socket), "idle_exit_s": 300},
        "client": {"call_timeout_s": 30, "arrival_timeout_s": PATIENT_S},
    }
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    transfer = connector if socket else None
    options = EngineOptions(
        model_path=str(model),
        max_model_len=512,
        kv_cache_bytes=32 << 20,
        block_size=32,
        kv_transfer_config=transfer,
        num_threads=1,
    )
    with Engine(options) as engine:
        answers = [
            engine.generate(question.prompt, max_tokens=1, first_logprobs=True)
            for question in questions
        ]
        if socket:
            with NodeClient(socket, ClientConfig(call_timeout_s=PATIENT_S), name="test") as client:
                assert client.flush(deadline_s=PATIENT_S)
                counters = client.status()["tier_counters"]
                encoded.update(
                    {
                        name.partition("codec=")[2][:-1]
                        for name in counters
                        if name.startswith("kvhold_encoded_chunks")
                    }
                )
    if socket:
        stop_node(socket)
    return answers


encoded: set[str] = set()


@pytest.fixture(autouse=True)
def nothing_encoded() -> None:
    encoded.clear()


@pytest.fixture(scope="module")
def computed(model: Path, questions: list[Question]) -> list[Generated]:
    """What vLLM alone answers."""
    answers = ask(model, questions, None)
    assert [one.token_ids for one in answers] == [[question.answer] for question in questions], (
        "it knows them all"
    )
    return answers


def kl(one: Generated, other: Generated) -> float:
    pairs = zip(one.first_logprobs, other.first_logprobs, strict=True)
    return sum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)


def test_a_disk_with_cachegen_and_a_redis_with_lossless(
    model: Path,
    questions: list[Question],
    computed: list[Generated],
    redis: RedisServer,
    tmp_path: Path,
) -> None:
    disk = f"disk://{tmp_path}/kv?max_bytes=1GiB&codec=cachegen&{PATIENT}"
    below = f"{redis.url}?codec=lossless&{PATIENT}"
    stored = ask(model, questions, tmp_path / "a.sock", disk, below, max_error=1)
    assert [one.token_ids for one in stored] == [one.token_ids for one in computed]
    assert encoded == {"cachegen", "lossless"}

    exact = ask(model, questions, tmp_path / "b.sock", below, max_error=1)
    assert [one.token_ids for one in exact] == [one.token_ids for one in computed]
    assert all(one.num_cached_tokens >= 384 for one in exact)
    assert max(kl(one, other) for one, other in zip(computed, exact, strict=True)) < 1e-6

    lossy = ask(model, questions, tmp_path / "c.sock", disk, max_error=1)
    assert all(one.num_cached_tokens >= 384 for one in lossy)
    assert (
        sum(one.token_ids == other.token_ids for one, other in zip(computed, lossy, strict=True))
        >= 11
    )
    divergences = [kl(one, other) for one, other in zip(computed, lossy, strict=True)]
    assert max(divergences) > 1e-6, "it did come through the codec"
    assert np.mean(divergences) < 0.05


def test_an_engine_that_allows_no_loss_gets_none_from_a_disk_with_a_lossy_codec(
    model: Path, questions: list[Question], computed: list[Generated], tmp_path: Path
) -> None:
    disk = f"disk://{tmp_path}/kv?max_bytes=1GiB&codec=cachegen&{PATIENT}"
    ask(model, questions, tmp_path / "a.sock", disk, max_error=1)
    assert encoded == {"cachegen"}
    stored = ask(model, questions, tmp_path / "b.sock", disk)
    assert all(one.num_cached_tokens == 0 for one in stored), "approximate KV is not exact KV"
    again = ask(model, questions, tmp_path / "c.sock", disk)
    assert all(one.num_cached_tokens >= 384 for one in again)
    assert [one.token_ids for one in again] == [one.token_ids for one in computed]
    assert max(kl(one, other) for one, other in zip(computed, again, strict=True)) < 1e-6


def test_a_budget_of_an_engine_is_kept_below(
    model: Path, questions: list[Question], computed: list[Generated], tmp_path: Path
) -> None:
    disk = f"disk://{tmp_path}/kv?max_bytes=1GiB&codec=fp8&{PATIENT}"
    ask(model, questions, tmp_path / "a.sock", disk, max_error=0.01)
    assert encoded == {"int8"}, "of vLLM's own packing, undone and done again"
    loose = ask(model, questions, tmp_path / "b.sock", disk)
    assert all(one.num_cached_tokens == 0 for one in loose), "another budget, another namespace"
    again = ask(model, questions, tmp_path / "c.sock", disk, max_error=0.01)
    assert all(one.num_cached_tokens >= 384 for one in again)
    assert [one.token_ids for one in again] == [one.token_ids for one in computed]
    assert max(kl(one, other) for one, other in zip(computed, again, strict=True)) < 0.01


def test_a_codec_of_memory_changes_little_and_shares_with_its_like_alone(
    model: Path, questions: list[Question], computed: list[Generated], tmp_path: Path
) -> None:
    disk = f"disk://{tmp_path}/kv?max_bytes=1GiB&codec=int8&{PATIENT}"
    rules: dict[str, Any] = {"memory_codec": "int8", "max_error": 1}
    stored = ask(model, questions, tmp_path / "a.sock", disk, **rules)
    assert [one.token_ids for one in stored] == [one.token_ids for one in computed]
    assert encoded == {"lossless"}, "nothing is lost a second time below"
    plain = ask(model, questions[:3], tmp_path / "b.sock", disk, max_error=1)
    assert all(one.num_cached_tokens == 0 for one in plain)
    again = ask(model, questions, tmp_path / "c.sock", disk, **rules)
    assert all(one.num_cached_tokens >= 384 for one in again)
    assert [one.token_ids for one in again] == [one.token_ids for one in computed]
    divergences = [kl(one, other) for one, other in zip(computed, again, strict=True)]
    assert 1e-9 < max(divergences) < 0.01, "it did come through the codec"


def test_the_bench_of_a_slow_link_measures_what_it_says(redis: RedisServer) -> None:
    model = make_model("tiny")
    cold, found = rows(["int8"], model, num_tokens=640, num_prompts=1, gbit_s=0.05, num_threads=1)
    assert (cold.codec, cold.ratio, cold.link_s, cold.cached_share) == (COLD, None, None, 0)
    assert found.codec == "int8"
    assert found.cached_share > 0.9
    assert found.ratio is not None and found.link_s is not None
    assert found.ratio > 2, "small chunks have a header of a page"
    plain_bytes = 640 * model.kv_bytes_per_token
    assert 0.8 * plain_bytes < found.link_s * 0.05e9 / 8 * found.ratio < 1.6 * plain_bytes
    assert found.ttft_p50_s > 0.8 * found.link_s, "nothing is faster than the link"
    assert 0 <= found.kl < 0.05
