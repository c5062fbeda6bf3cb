"""Child of `test_naming_engines.py`: starts real engines one after another in this process, and
says what each names and computes.

In: a JSON list of {"label", "arguments", "environment"}, then the node's socket, as the two
    arguments. Out: a line of JSON for each.
"""

import hashlib
import json
import os
import sys
from typing import Any

from kvhold_lab.engines.stepped import environment_for

TOKENS = [
    [(7 * i * i + 13 * i + at) % 8000 + 1 for i in range(length)]
    for at, length in enumerate((200, 90))
]


def main() -> None:
    os.environ.update(environment_for(1) | {"VLLM_LOGGING_LEVEL": "ERROR"})
    import vllm.v1.engine.llm_engine  # noqa: F401 - once for all

    for start in json.loads(sys.argv[1]):
        if (child := os.fork()) == 0:  # a process takes one engine
            os.environ.update(start["environment"])
            print(
                json.dumps(
                    {"label": start["label"]} | run(start["label"], start["arguments"], sys.argv[2])
                ),
                flush=True,
            )
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{start['label']}: ended with {os.waitstatus_to_exitcode(status)}")


def run(label: str, arguments: dict[str, Any], socket: str) -> dict[str, Any]:
    from kvhold_lab.engines.stepped import SteppedEngine

    transfer = {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": arguments.pop("kv_role", "kv_both"),
        "kv_connector_extra_config": {
            "tokens_per_chunk": 64,
            "node": {"socket": socket, "autostart": False},
            "client": {"call_timeout_s": 60},
        },
    }
    base = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 1 << 24,
        "block_size": 32,
    }
    base |= {"max_num_seqs": 8, "seed": 0, "kv_transfer_config": transfer}
    engine = SteppedEngine(base | arguments)
    try:
        for (
            tokens
        ) in TOKENS:  # one at a time, so that every engine computes them in the same batches
            engine.add({"prompt_token_ids": tokens, "cache_salt": label}, max_tokens=2)
            while engine.is_busy():
                engine.step()
            engine.drain()
        side = engine.core.scheduler.connector.scheduler
        facts = dict(side._configured.facts.items)
        return {
            "digest": side._configured.digest.hex(),
            "facts": facts,
            "kv": [kv_of(side, tokens, label) for tokens in TOKENS],
        }
    finally:
        engine.close()


def kv_of(side: Any, tokens: list[int], salt: str) -> str:
    """A hash of the KV that was stored of a prompt, and how many tokens it covers."""
    state = hashlib.sha256()
    namespace = side._configured.narrowed(cache_salt=salt)
    with side._cache.lookup(namespace.prompt(tokens).query(), wait_s=5) as hit:
        lease = side._cache.claim(hit.ticket)
        assert lease is not None
        with lease:
            for group in range(len(namespace.layout.groups)):
                chunks = lease.chunks(group)
                for offset, count in zip(
                    chunks.offsets.tolist(), chunks.num_tokens.tolist(), strict=True
                ):
                    state.update(
                        lease.buffer[
                            offset : offset + namespace.layout.chunk_bytes(group, count)
                        ].tobytes()
                    )
        return f"{hit.num_tokens} {state.hexdigest()}"


if __name__ == "__main__":
    main()
