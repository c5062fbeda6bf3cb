"""Two vLLM engines share this host's node: the second one loads the prompt that the first computed.

    python examples/two_vllm_engines.py          # a small model with random weights (kvhold-lab)
    python examples/two_vllm_engines.py MODEL    # a folder, or a name on the Hugging Face hub

The first engine starts the node, a process that owns the cached KV; the second one joins. Here the
node's socket is in a temporary folder; without `node.socket`, all engines of this user share one
node.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvhold.node import end_node

PROMPT = list(range(3, 203)) * 4  # 800 tokens

engine: Any = None  # in its own process


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    num_cached_tokens: int
    seconds: float


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    model = sys.argv[1] if len(sys.argv) > 1 else random_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "node.sock"
        try:
            with engine_process(model, socket) as first:
                expected = report("first", first)
                with engine_process(model, socket) as second:  # while the first is alive
                    answer = report("second", second)
        finally:
            end_node(socket)
    print(f"the same answer: {answer.token_ids == expected.token_ids}")


def report(name: str, process: Executor) -> Answer:
    answer = process.submit(ask).result()
    print(
        f"{name} engine: {answer.num_cached_tokens} of {len(PROMPT)} prompt tokens loaded, "
        f"answer after {answer.seconds:.2f} s"
    )
    return answer


def random_checkpoint() -> str:
    from kvhold_lab.checkpoints import make_checkpoint

    return str(make_checkpoint("llama").path)


@contextmanager
def engine_process(model: str, socket: Path) -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(start_engine, model, socket).result()
        try:
            yield process
        finally:
            process.submit(stop_engine).result()


# In an engine's process.


def start_engine(model: str, socket: Path) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    global engine
    engine = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVHoldConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "ram_bytes": "256MiB",
                "node": {"socket": str(socket), "idle_exit_s": 60},
            },
        ),
    )


def ask() -> Answer:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    began = time.perf_counter()
    output = engine.generate(
        TokensPrompt(prompt_token_ids=PROMPT),
        SamplingParams(temperature=0, max_tokens=8),
        use_tqdm=False,
    )[0]
    return Answer(
        list(output.outputs[0].token_ids),
        output.num_cached_tokens or 0,
        time.perf_counter() - began,
    )


def stop_engine() -> None:
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
