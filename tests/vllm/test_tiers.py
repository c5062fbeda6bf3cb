"""A real vLLM and tiers below RAM: KV outlives engine and node on disk, hosts share through Redis,
and a tier that dies costs nothing.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvhold.core.config import ClientConfig
from kvhold.core.status import NodeStatus
from kvhold.node import NodeClient
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

pytestmark = pytest.mark.vllm

CHUNK = 64
OUTPUT_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return make_model("tiny")


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 250) for _ in range(rng.randrange(200, 1500))] for _ in range(count)]


ASKED = [prompts(6, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def expected(model: ModelInfo) -> list[list[list[int]]]:
    """What vLLM alone answers to each of ASKED."""
    with engine(model, None) as plain:
        return [plain.generate_many(asked, max_tokens=OUTPUT_TOKENS).token_ids for asked in ASKED]


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[Path]]:
    """One a host: each has a node of its own, which the test ends."""
    paths = [tmp_path / "a.sock", tmp_path / "b.sock"]
    yield paths
    for path in paths:
        stop_node(path)


def stop_node(path: Path) -> None:
    if path.exists():
        with NodeClient(path, ClientConfig(), name="test") as client:
            client.stop_node()


def status_of(path: Path) -> NodeStatus:
    with NodeClient(path, ClientConfig(), name="test") as client:
        return client.status()


def engine(model: ModelInfo, socket: Path | None, *tiers: str, role: str = "kv_both") -> Engine:
    """An engine on the host of that node, or without kvhold."""
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "ram_bytes": "64MiB",
            "tiers": list(tiers),
            "rules": {"plan": False},
            "hints": {"actions": "pin"},
            "node": {"socket": str(socket), "idle_exit_s": 300},
            "client": {"reconnect_interval_s": 0.1, "call_timeout_s": 30},
        },
    }
    settings = {
        "max_model_len": 2048,
        "block_size": 32,
        "kv_cache_bytes": 8 * 2048 * model.kv_bytes_per_token,
        "num_threads": 1,
    }
    return Engine(options_for(model, kv_transfer_config=connector if socket else None, **settings))


def flush(socket: Path) -> None:
    with NodeClient(socket, ClientConfig(), name="test") as client:
        assert client.flush(deadline_s=60)


def check_hints(engine: Engine, socket: Path, prompt: list[int], expected: list[int]) -> None:
    """A pin is carried out and answered, and what is not allowed is rejected."""
    pin = {"id": "it", "action": "pin", "ttl_s": 600}
    asked = engine.generate(
        prompt, max_tokens=OUTPUT_TOKENS, rules={"hints": [pin, {"action": "demote"}]}
    )
    assert asked.token_ids == expected
    rejected, accepted = asked.kv_transfer_params["kvhold_hints"]
    assert accepted == {
        "field": "kv_transfer_params.kvhold.hints[0]",
        "id": "it",
        "action": "pin",
        "outcome": "accepted",
        "num_tokens": len(prompt) // 32 * 32,
    }
    assert rejected["outcome"] == "rejected"
    assert "hints.actions" in rejected["reason"]
    assert status_of(socket)["retained_chunks"] == -(-accepted["num_tokens"] // CHUNK)


def test_kv_outlives_engine_and_node_on_disk(
    model: ModelInfo, expected: list[list[list[int]]], sockets: list[Path], tmp_path: Path
) -> None:
    disk = f"disk://{tmp_path}/kv?max_bytes=1GiB"
    with engine(model, sockets[0], disk) as first:
        assert first.generate_many(ASKED[0], max_tokens=OUTPUT_TOKENS).token_ids == expected[0]
        flush(sockets[0])
        check_hints(first, sockets[0], ASKED[0][0], expected[0][0])
    stop_node(sockets[0])
    with engine(model, sockets[0], disk) as second:
        again = second.generate_many(ASKED[0], max_tokens=OUTPUT_TOKENS)
    assert again.token_ids == expected[0]
    cached = again.num_cached_tokens
    assert all(
        n >= len(prompt) // CHUNK * CHUNK - 1 for n, prompt in zip(cached, ASKED[0], strict=True)
    ), cached


def test_a_producer_and_a_consumer_on_two_hosts_share_through_redis(
    model: ModelInfo, expected: list[list[list[int]]], sockets: list[Path]
) -> None:
    """Field report R1: the consumer's hits are of the producer's KV, and the outputs are those of
    vLLM alone.
    """
    with ExitStack() as running:
        try:
            server = running.enter_context(RedisServer())
        except NotInstalled as error:
            pytest.skip(str(error))
        with engine(model, sockets[0], server.url, role="kv_producer") as producer:
            assert (
                producer.generate_many(ASKED[1], max_tokens=OUTPUT_TOKENS).token_ids == expected[1]
            )
            flush(sockets[0])
        with engine(model, sockets[1], server.url, role="kv_consumer") as consumer:
            found = consumer.generate_many(ASKED[1], max_tokens=OUTPUT_TOKENS)
            assert found.token_ids == expected[1]
            assert (
                sum(found.num_cached_tokens) > 0.9 * sum(map(len, ASKED[1])) - len(ASKED[1]) * CHUNK
            )
            assert (
                status_of(sockets[1])["tier_counters"][
                    "kvhold_tier_items{tier=redis,operation=get,result=hit}"
                ]
                > 0
            )
            server.kill()  # nobody notices but the breaker
            for asked, tokens in zip(ASKED[1:], expected[1:], strict=True):
                assert consumer.generate_many(asked, max_tokens=OUTPUT_TOKENS).token_ids == tokens
