"""A real vLLM that publishes KV events, in a process of its own: `python events_engine.py MODEL
PROMPTS SOCKET PUBLISH REPLAY`.

Computes the prompts of a file in its order, then says in one line of JSON what the node's memory
holds of them: `[[group, tokens up to the block's end], ...]`, and waits to be told to end.
"""

import json
import os
import sys
import time
from pathlib import Path

from kvhold_lab.engines.stepped import SteppedEngine, environment_for


def main(model: str, prompts_file: str, socket: str, publish: str, replay: str) -> None:
    os.environ.update(environment_for(1))
    from vllm.config import KVEventsConfig

    from kvhold.core.keys import make_key
    from kvhold.node import NodeClient

    engine = SteppedEngine(
        {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 4,
            "block_size": 32,
            "seed": 0,
            "kv_events_config": KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=publish,
                replay_endpoint=replay,
            ),
            "kv_transfer_config": {
                "kv_connector": "KVHoldConnector",
                "kv_connector_module_path": "kvhold.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "tokens_per_chunk": 64,
                    "ram_bytes": "4MiB",
                    "rules": {"plan": False},
                    "node": {"socket": socket, "idle_exit_s": 300},
                    "client": {"call_timeout_s": 30},
                },
            },
        }
    )
    prompts = json.loads(Path(prompts_file).read_text())
    for prompt in prompts:
        run(engine, prompt)
        # so that it asks for it again, and what it has of its own is forgotten
        engine.reset_prefix_cache()
    side = engine.core.scheduler.connector.scheduler
    with NodeClient(Path(socket), name="test") as client:
        while any(client.status()["held"].values()):
            time.sleep(0.01)  # what is being stored and let go of is not there, or gone, yet
        there = client.snapshot()
    follows = side._announcer
    while follows._next != there.next or (
        follows._pending_events is not None and not follows._pending_events.done()
    ):
        run(engine, [1])  # too short to be stored: with its steps, events are asked for and go out
    run(engine, [1])
    keys = {event.key for event in there.events}
    present = set()
    for prompt in prompts:
        named = side._namespace.prompt(prompt)
        names = named.chunks()
        end = 0
        for chunk, num_tokens in enumerate(names.num_tokens(side._namespace.layout).tolist()):
            begin, end = end, end + num_tokens
            for group, part in enumerate(side._geometry.parts):
                if (
                    make_key(names.namespace, names.hashes[20 * chunk : 20 * chunk + 20], group, 0)
                    in keys
                ):
                    size = part.group.block_tokens
                    present |= {
                        (part.table, tuple(prompt[:stop]))
                        for stop in range(begin + size, end + 1, size)
                    }
    print(json.dumps(sorted(present)), flush=True)
    sys.stdin.readline()
    engine.close()


def run(engine: SteppedEngine, prompt: list[int]) -> None:
    engine.add({"prompt_token_ids": prompt}, max_tokens=2)
    while engine.is_busy():
        engine.step()
    engine.drain()


if __name__ == "__main__":
    main(*sys.argv[1:])
