"""A real vLLM gets its KV back: exactly, in the same engine and in others, and whatever dies on the
way.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.status import NodeStatus
from kvhold.node import NodeClient
from kvhold.testing.damage import OpenArena
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.process import EngineFailed

pytestmark = pytest.mark.vllm

BLOCK = 32
CHUNK = (
    64  # two blocks, so that tails, whole chunks and chunk boundaries all happen in short prompts
)
OUTPUT_TOKENS = 6
RAM = "256MiB"


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return make_model("tiny")


@pytest.fixture(scope="module")
def plain(model: ModelInfo) -> Iterator[Engine]:
    """An engine without a connector and without vLLM's own prefix cache."""
    with engine(model, None, prefix_caching=False) as one:
        yield one


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Where the test's node will listen; the engines start it, the test ends it."""
    path = tmp_path / "node.sock"
    yield path
    if path.exists():
        with NodeClient(path, ClientConfig(), name="test") as client:
            client.stop_node()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    folder.mkdir()
    return folder


def engine(
    model: ModelInfo,
    socket: Path | None,
    ledger: Path | None = None,
    *,
    pause: str = "",
    **options: Any,
) -> Engine:
    """An engine with the watched connector, or without any when `socket` is None."""
    connector = {
        "kv_connector": "WatchedConnector",
        "kv_connector_module_path": "tests.vllm.instrumented",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "ram_bytes": RAM,
            "rules": {"plan": False},
            "node": {"socket": str(socket), "idle_exit_s": 300},
            # Busy cores must not turn a hit into a miss here; a dead node is noticed at once
            # whatever the deadline.
            "client": {"reconnect_interval_s": 0.1, "call_timeout_s": 30},
        },
    }
    settings = {
        "max_model_len": 2048,
        "block_size": BLOCK,
        "kv_cache_bytes": 8 * 2048 * model.kv_bytes_per_token,
        "num_threads": 1,  # more wait for each other on busy cores
    } | options
    return Engine(
        options_for(model, kv_transfer_config=connector if socket else None, **settings),
        environment={
            "TEST_LEDGER": str(ledger),
            "TEST_PAUSE": pause,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        },
    )


def random_prompts(count: int, seed: int) -> list[list[int]]:
    """Lengths around every boundary, some long; about half of them share a prefix with an earlier
    one.
    """
    rng = random.Random(seed)
    edges = [
        1,
        2,
        BLOCK - 1,
        BLOCK,
        BLOCK + 1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        3 * CHUNK - 1,
        3 * CHUNK,
        3 * CHUNK + 1,
        5 * CHUNK + BLOCK,
    ]
    prompts: list[list[int]] = []
    for _ in range(count):
        length = rng.choice(edges) if rng.random() < 0.6 else rng.randrange(1, 1200)
        prefix: list[int] = []
        if prompts and rng.random() < 0.5:
            earlier = rng.choice(prompts)
            prefix = earlier[: rng.choice([len(earlier), rng.randrange(len(earlier) + 1)])]
        prompts.append(
            (prefix + [rng.randrange(1, 8000) for _ in range(length)])[: max(length, len(prefix))]
        )
    return prompts


def batches(prompts: list[list[int]], size: int = 8) -> list[list[list[int]]]:
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def answers_of(one: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [
        tokens
        for batch in batches(prompts)
        for tokens in one.generate_many(batch, max_tokens=OUTPUT_TOKENS).token_ids
    ]


def status(socket: Path) -> NodeStatus:
    with NodeClient(socket, ClientConfig(), name="test") as client:
        return client.status()


def until(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def test_200_random_prompts_in_two_engines_give_the_tokens_of_vllm_alone_and_the_kv_that_was_stored(
    model: ModelInfo, plain: Engine, socket: Path, ledger: Path
) -> None:
    prompts = random_prompts(200, seed=7)
    expected = answers_of(plain, prompts)
    with pytest.raises(EngineFailed):
        plain.generate([], max_tokens=1)

    reused = [0, 0]
    with (
        engine(model, socket, ledger, prefix_caching=False, max_num_batched_tokens=512) as first,
        engine(model, socket, ledger, prefix_caching=True) as second,
    ):
        # the second round finds everything
        for number, engines in enumerate(((first, second), (second, first))):
            for at, batch in enumerate(batches(prompts)):
                answer = engines[at % 2].generate_many(batch, max_tokens=OUTPUT_TOKENS)
                assert answer.token_ids == expected[8 * at : 8 * at + len(batch)], (
                    f"round {number}, batch {at}"
                )
                reused[number] += sum(answer.num_cached_tokens)
        with pytest.raises(EngineFailed):
            second.generate([], max_tokens=1)
        until(lambda: not any(status(socket)["held"].values()), "everything to be given back")
        assert status(socket)["pinned_chunks"] == 0

    assert not (ledger / "mismatches").exists(), (ledger / "mismatches").read_text()
    assert sum(map(int, (ledger / "compared").read_text().split())) > 500, (
        "blocks were loaded and compared"
    )
    assert reused[1] > 0.9 * sum(len(p) // BLOCK * BLOCK for p in prompts)


def test_an_arena_too_small_for_the_prompts_changes_no_token(
    model: ModelInfo, plain: Engine, socket: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.RAM", "2MiB")  # four chunks of the tiny model in each MiB
    prompts = random_prompts(48, seed=11)
    expected = answers_of(plain, prompts)
    with engine(model, socket, ledger, prefix_caching=False) as small:
        for _ in range(2):
            assert answers_of(small, prompts) == expected
        assert status(socket)["counters"]["kvhold_evicted_chunks{tier=ram}"] > 0
    assert not (ledger / "mismatches").exists()


def test_a_damaged_chunk_is_computed_what_is_before_it_is_loaded_and_no_token_changes(
    model: ModelInfo, plain: Engine, socket: Path, ledger: Path
) -> None:
    prompt = list(range(1, 900))
    expected = plain.generate(prompt, max_tokens=OUTPUT_TOKENS).token_ids
    with engine(model, socket, ledger, prefix_caching=False) as warm:
        warm.generate(prompt, max_tokens=OUTPUT_TOKENS)
        until(lambda: not any(status(socket)["held"].values()), "everything to be stored")
        stored = status(socket)
        with OpenArena(stored["pid"]) as arena:
            arena.flip(stored["used_bytes"] // 2)
        for _ in range(2):  # the second finds what the first has computed
            assert warm.generate(prompt, max_tokens=OUTPUT_TOKENS).token_ids == expected
            until(lambda: not any(status(socket)["held"].values()), "everything to be given back")
        assert status(socket)["counters"]["kvhold_damaged_chunks{found_by=reader}"] == 1
    blocks = len(prompt) // BLOCK
    assert (ledger / "compared").read_text().split() == [str(blocks - CHUNK // BLOCK), str(blocks)]
    assert not (ledger / "mismatches").exists()


@pytest.mark.parametrize("moment", ["store", "load"])
def test_an_engine_killed_in_the_middle_leaves_nothing_and_disturbs_nobody(
    model: ModelInfo, socket: Path, ledger: Path, moment: str
) -> None:
    prompt, other = random_prompts(40, seed=3)[-1] + list(range(1, 700)), list(range(100, 600))
    with engine(model, socket, ledger, prefix_caching=False) as survivor:
        expected = survivor.generate(other, max_tokens=OUTPUT_TOKENS).token_ids
        if moment == "load":
            survivor.generate(prompt, max_tokens=1)
        before = status(socket)
        victim = engine(model, socket, ledger, pause=moment, prefix_caching=False).start()
        try:
            with pytest.raises(EngineFailed):
                victim.generate(
                    prompt, max_tokens=1, timeout_s=kill_when(ledger / "paused", victim)
                )
        finally:
            victim.kill()
        until(lambda: not any(status(socket)["held"].values()), "the node to notice")
        after = status(socket)
        assert after["chunks"] == before["chunks"], "no partial chunk is there"
        assert after["used_bytes"] == before["used_bytes"]
        assert after["pinned_chunks"] == 0
        again = survivor.generate(other, max_tokens=OUTPUT_TOKENS)
        assert again.token_ids == expected
        assert again.num_cached_tokens > 0
    assert not (ledger / "mismatches").exists()


@pytest.mark.parametrize("moment", ["store", "load"])
def test_an_engine_whose_node_is_killed_in_the_middle_answers_rightly_and_joins_the_next_node(
    model: ModelInfo, plain: Engine, socket: Path, ledger: Path, moment: str
) -> None:
    prompt = list(range(1, 900))
    expected = plain.generate(prompt, max_tokens=OUTPUT_TOKENS).token_ids
    if moment == "load":
        with engine(model, socket, ledger, prefix_caching=False) as first:
            first.generate(prompt, max_tokens=1)
    with engine(model, socket, ledger, pause=moment, prefix_caching=False) as orphan:
        run_while(ledger, lambda: kill_node(socket))
        answer = orphan.generate(prompt, max_tokens=OUTPUT_TOKENS, timeout_s=60)
        assert answer.token_ids == expected
        assert (ledger / "resume").exists(), "the node was killed in the middle"
        until(lambda: is_up(socket), "a new node")
        until(lambda: orphan_stores(orphan, socket, prompt), "the orphan to use it")
        again = orphan.generate(prompt, max_tokens=OUTPUT_TOKENS)
        assert again.token_ids == expected
        assert again.num_cached_tokens >= len(prompt) // BLOCK * BLOCK - BLOCK
    assert not (ledger / "mismatches").exists()


def kill_when(marker: Path, victim: Engine) -> float:
    """Kill the engine from a thread as soon as the marker is there; returns a time-out for the call
    that it dies in.
    """

    def wait_and_kill() -> None:
        until(marker.exists, "the engine to pause")
        os.kill(victim.pid, signal.SIGKILL)

    threading.Thread(target=wait_and_kill, daemon=True).start()
    return 120.0


def run_while(ledger: Path, action: Any) -> None:
    """When the engine pauses, do `action`, then let it go on."""

    def wait_and_act() -> None:
        until((ledger / "paused").exists, "the engine to pause")
        action()
        (ledger / "resume").touch()

    threading.Thread(target=wait_and_act, daemon=True).start()


def kill_node(socket: Path) -> None:
    os.kill(status(socket)["pid"], signal.SIGKILL)


def is_up(socket: Path) -> bool:
    try:
        status(socket)
    except KVHoldError:
        return False
    return True


def orphan_stores(orphan: Engine, socket: Path, prompt: list[int]) -> bool:
    orphan.generate(prompt, max_tokens=1)
    return bool(status(socket)["chunks"] > 0)
