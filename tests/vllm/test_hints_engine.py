"""A real vLLM: what is pinned outlives pressure, exactly, and the answers say what was done."""

import random
from pathlib import Path

import pytest

from kvhold.node.start import end_node
from kvhold_lab.engines.engine import Engine, kvhold_connector, options_for
from kvhold_lab.engines.models import make_model

pytestmark = pytest.mark.vllm

CHUNK, OUTPUT_TOKENS = 64, 4
PIN = {"id": "system prompt", "action": "pin", "ttl_s": 600}


def prompt_of(seed: int, num_tokens: int = 1024) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(num_tokens)]


def test_a_pinned_prompt_outlives_others(tmp_path: Path) -> None:
    model, socket = make_model("tiny"), tmp_path / "node.sock"
    ram_bytes = 8 * 1024 * model.kv_bytes_per_token
    connector = kvhold_connector(
        socket,
        ram_bytes,
        tokens_per_chunk=CHUNK,
        hints={"actions": "pin demote", "sessions": True},
        client={"call_timeout_s": 30},
    )
    options = options_for(
        model,
        max_model_len=2048,
        block_size=32,
        num_threads=1,
        kv_cache_bytes=2 * 2048 * model.kv_bytes_per_token,
        kv_transfer_config=connector,
    )
    pinned, plain = prompt_of(1), prompt_of(2)
    try:
        with Engine(options) as engine:
            first = engine.generate(
                pinned,
                max_tokens=OUTPUT_TOKENS,
                rules={"hints": [PIN, {"action": "retain", "ttl_s": 5}], "session_id": "s"},
            )
            accepted, rejected = first.kv_transfer_params["kvhold_hints"][::-1]
            assert accepted == {
                "field": "kv_transfer_params.kvhold.hints[0]",
                "id": "system prompt",
                "action": "pin",
                "outcome": "accepted",
                "num_tokens": 1024,
            }
            assert rejected["outcome"] == "rejected"
            assert "hints.actions" in rejected["reason"]
            other = engine.generate(plain, max_tokens=OUTPUT_TOKENS)
            assert other.kv_transfer_params == {}
            others = [prompt_of(seed) for seed in range(10, 30)]
            engine.generate_many(others, max_tokens=1)
            assert engine.reset_prefix_cache()
            again = engine.generate(pinned, max_tokens=OUTPUT_TOKENS)
            assert again.num_cached_tokens >= 1023
            assert again.token_ids == first.token_ids
            evicted = engine.generate(plain, max_tokens=OUTPUT_TOKENS)
            assert evicted.num_cached_tokens == 0
            assert evicted.token_ids == other.token_ids
    finally:
        end_node(socket)
