"""One host's part of a real vLLM engine whose two tensor parallel workers are on two hosts.

    python -m tests.vllm.span_engine '{"node_rank": 0, ...}'

The arguments are those of vLLM's EngineArgs. Rank 0 answers lines of JSON: a list of token ids is a
prompt, and the answer has the tokens, how many were cached, and how many were missed for which
reason; an empty list only waits for the start. Before each prompt, vLLM's own prefix cache is
emptied. Rank 1 has only a worker, as `vllm serve --headless` has.
"""

import json
import os
import sys
from collections import Counter
from typing import Any

from kvhold_lab.engines.stepped import SteppedEngine, environment_for


def lead(arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's workers print
    engine = SteppedEngine(arguments)
    missed = _missed(engine)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if prompt := json.loads(line):
            missed.clear()
            answer = {**_ask(engine, prompt), "missed": dict(missed)}
        print(json.dumps(answer), file=answers)
    engine.close()


def _ask(engine: SteppedEngine, prompt: list[int]) -> dict[str, Any]:
    assert engine.reset_prefix_cache()
    engine.add({"prompt_token_ids": prompt}, max_tokens=8)
    outputs: list[Any] = []
    while engine.is_busy():
        outputs += engine.step()
    engine.drain()
    last = outputs[-1]
    return {"tokens": list(last.outputs[0].token_ids), "cached": last.num_cached_tokens}


def _missed(engine: SteppedEngine) -> Counter[str]:
    """Count the connector's missed tokens, by reason."""
    missed: Counter[str] = Counter()

    def count(num_tokens: int, *, sources: dict[str, int], reason: str) -> None:
        missed[reason] += num_tokens - sum(sources.values())

    engine.core.scheduler.get_kv_connector().scheduler.tally.looked_up = count
    return missed


def follow(arguments: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    config = EngineArgs(**arguments).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)


if __name__ == "__main__":
    os.environ.update(environment_for(1))
    given = json.loads(sys.argv[1])
    (lead if given["node_rank"] == 0 else follow)(given)
