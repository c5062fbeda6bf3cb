"""`python -m kvhold_lab.bench.blend.vllm_child ARGS`: prompts of documents, in full and blended.

Prints a line of JSON for each.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvhold.node import NodeClient
from kvhold_lab.bench.blend.arms import f1
from kvhold_lab.engines.stepped import SteppedEngine
from kvhold_lab.retrieval.language import (
    ANSWER_TOKENS,
    END,
    NUM_DOCUMENTS,
    QUESTION_TOKENS,
    VOCAB_SIZE,
    Shape,
    draw,
)

_REPORTED_S = 60.0
_FULL = {"load": False, "store": False}


def main(engine: dict[str, Any], socket: str, *, tokens: int, prompts: int, seed: int) -> None:
    stepped = SteppedEngine(engine)
    shape = Shape.of((tokens - QUESTION_TOKENS) // NUM_DOCUMENTS)
    rng = np.random.default_rng(seed)
    size = shape.document_tokens
    spans = [[at * size, (at + 1) * size] for at in range(NUM_DOCUMENTS)]
    with NodeClient(Path(socket), name="bench") as client:
        for _ in range(prompts):
            exercise = draw(rng, shape, 1)
            order = rng.permutation(NUM_DOCUMENTS)
            question = exercise.questions[0, :QUESTION_TOKENS].tolist()
            right = exercise.questions[0, QUESTION_TOKENS:-1].tolist()
            earlier, now = (
                documents.reshape(-1).tolist() + question
                for documents in (exercise.documents[order], exercise.documents)
            )
            _report(client, _ask(stepped, earlier, {"spans": spans})["name"])
            full = _ask(stepped, now, _FULL)
            blended = _ask(stepped, now, {"spans": spans})
            report = _report(client, blended["name"])
            said = {
                "ttft_s": blended["ttft_s"],
                "full_s": full["ttft_s"],
                "f1": f1(blended["answer"], right),
                "f1_full": f1(full["answer"], right),
                "kl": _kl(full["logprobs"], blended["logprobs"]),
                "recomputed": report.recomputed_tokens,
                "reused": report.reused_tokens,
            }
            print(json.dumps(said), flush=True)
    stepped.close()


def _ask(engine: SteppedEngine, tokens: list[int], rules: dict[str, Any]) -> dict[str, Any]:
    assert engine.reset_prefix_cache()
    begun, first_s, last = time.perf_counter(), 0.0, None
    name = engine.add(
        {"prompt_token_ids": tokens},
        max_tokens=ANSWER_TOKENS,
        extra={"kv_transfer_params": {"kvhold": rules}},
        logprobs=VOCAB_SIZE,
    )
    while engine.is_busy():
        for output in engine.step():
            first_s = first_s or time.perf_counter() - begun
            last = output.outputs[0]
    engine.drain()
    assert last is not None
    answer = list(last.token_ids)
    found = {token: one.logprob for token, one in last.logprobs[0].items()}
    return {
        "name": engine.inner_name(name),
        "ttft_s": first_s,
        "answer": answer[: answer.index(END)] if END in answer else answer,
        "logprobs": found,
    }


def _kl(full: dict[int, float], blended: dict[int, float]) -> float:
    return sum(math.exp(one) * (one - blended[token]) for token, one in full.items())


def _report(client: NodeClient, name: str) -> Any:
    deadline = time.monotonic() + _REPORTED_S
    while time.monotonic() < deadline:
        for decision in client.explain(name):
            if decision.blend is not None:
                if decision.blend.result != "blended":
                    raise RuntimeError(f"vLLM does not blend: {decision.blend.note}")
                return decision.blend
        time.sleep(0.005)
    raise RuntimeError("vLLM has reported no blend")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
