"""A real vLLM that carries out hints."""

from typing import Any

from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import make_model
from tests.node.nodes import RunningNode

CHUNK = 64


def engine_on(node: RunningNode) -> Engine:
    model = make_model("tiny")
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": CHUNK,
            "rules": {"plan": False},
            "hints": {"actions": "pin retain prefetch demote share fetch", "sessions": True},
            "node": {"socket": str(node.path)},
            "client": {"reconnect_interval_s": 0.1, "call_timeout_s": 30},
        },
    }
    return Engine(
        options_for(
            model,
            kv_transfer_config=connector,
            max_model_len=2048,
            block_size=32,
            kv_cache_bytes=8 * 2048 * model.kv_bytes_per_token,
            num_threads=1,
        )
    )


def ask(engine: Engine, prompt: list[int], *hints: dict[str, Any], **rules: Any) -> list[Any]:
    """The answers without their fields, from the first request that the node answers in time."""
    rules["hints"] = list(hints)
    for attempt in range(20):
        output = engine.generate(prompt, max_tokens=2 + 8 * attempt, rules=rules)
        answers: list[Any] = list(output.kv_transfer_params.get("kvhold_hints", []))
        if not any(answer.get("reason") == "the node has not answered yet" for answer in answers):
            break
    for answer in answers:
        answer.pop("field")
    return answers
