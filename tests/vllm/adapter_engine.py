"""A real vLLM whose adapters are trained while it runs: `python adapter_engine.py MODEL FOLDER
[SOCKET]`.

Without a socket it has no connector. It says in one line of JSON, for each request, its tokens, and
how many loads have ended well, how many have failed, and how many chunks were stored.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvhold_lab.checkpoints.files import save_adapter
from kvhold_lab.checkpoints.recipes import RECIPES
from kvhold_lab.engines.stepped import SteppedEngine, environment_for

PROMPT = [7 + 13 * number % 400 for number in range(300)]
SETTINGS = RECIPES["llama-lora"].settings


def main(model: str, folder: str, socket: str = "") -> None:
    os.environ.update(environment_for(1))
    from vllm.lora.request import LoRARequest

    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": 64,
            "ram_bytes": "16MiB",
            "node": {"socket": socket, "idle_exit_s": 300},
            "client": {"call_timeout_s": 30},
        },
    }
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
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": 8,
            "kv_transfer_config": connector if socket else None,
        }
    )
    counts = counted(engine) if socket else Counter()
    said: dict[str, Any] = {}

    def ask(name: str, adapter: LoRARequest) -> None:
        before = counts.copy()
        asked = engine.add({"prompt_token_ids": PROMPT}, max_tokens=6, lora=adapter)
        tokens: list[int] = []
        while engine.is_busy():
            for output in engine.step():
                assert output.request_id == asked
                tokens = list(output.outputs[0].token_ids)
        engine.drain()
        if socket:
            wait_for_commits(Path(socket))
        engine.reset_prefix_cache()
        said[name] = {
            "tokens": tokens,
            **{
                kind: counts[kind] - before[kind]
                for kind in ("loads", "failed_loads", "stored_chunks")
            },
        }

    one, two = LoRARequest("one", 1, f"{folder}/one"), LoRARequest("two", 2, f"{folder}/two")
    save_adapter(Path(one.lora_path), SETTINGS, seed=1)
    engine.engine.add_lora(one)  # as /v1/load_lora_adapter does
    ask("loaded ahead", one)
    ask("loaded ahead, again", one)
    save_adapter(Path(two.lora_path), SETTINGS, seed=2)
    ask("loaded by its request", two)
    ask("loaded by its request, again", two)
    ask("evicted and loaded again", one)
    shutil.rmtree(one.lora_path)
    save_adapter(Path(one.lora_path), SETTINGS, seed=3)
    ask("changed", one)
    ask("changed, again", one)
    changed = LoRARequest("changed", 3, one.lora_path)
    ask("changed, another number", changed)
    ask("changed, another number, again", changed)
    print(json.dumps(said), flush=True)
    engine.close()


def counted(engine: SteppedEngine) -> Counter[str]:
    """What the worker's side counts from now on."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    counts: Counter[str] = Counter()
    tally = get_kv_transfer_group().worker.tally
    add = tally.add

    def count(name: str, value: float, *labels: str) -> None:
        counts[name] += int(value)
        add(name, value, *labels)

    tally.add = count
    return counts


def wait_for_commits(socket: Path) -> None:
    """Until what was stored beside the passes is there."""
    from kvhold.node import NodeClient

    with NodeClient(socket, name="test") as client:
        while any(client.status()["held"].values()):
            time.sleep(0.01)  # a commit by another client tells nobody


if __name__ == "__main__":
    main(*sys.argv[1:])
