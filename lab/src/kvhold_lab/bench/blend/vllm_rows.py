"""The same prompts in vLLM on the CPU, one engine for each selector."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from os import environ
from pathlib import Path
from statistics import mean, median
from typing import Any

from kvhold.blend.selection import parse_selector, selector_text
from kvhold.core.errors import NodeError
from kvhold.node import end_node
from kvhold_lab.bench.blend.intervals import interval
from kvhold_lab.bench.blend.run import BlendRow
from kvhold_lab.bench.blend.trial_permit import grant_trial
from kvhold_lab.engines.stepped import bound_environment
from kvhold_lab.retrieval.language import ANSWER_TOKENS, NUM_DOCUMENTS, VOCAB_SIZE
from kvhold_lab.retrieval.model import make_retrieval_model

_BLOCK, _MODEL = 32, "retrieval"
_NAMES = {
    "none": "none",
    **{f"first-{n}": f"first ratio={n / 100}" for n in (5, 10, 15)},
    **{f"query-{n}": f"query ratio={n / 100}" for n in (5, 10, 15, 19, 19.8)},
    **{f"deviation@1-{n}": f"deviation check_layer=1 ratio={n / 100}" for n in (5, 10, 15)},
}


def vllm_rows(
    model: Path | None,
    *,
    num_tokens: int,
    num_prompts: int,
    only: tuple[str, ...] = (),
    seed: int = 1_000_003,
) -> Iterator[BlendRow]:
    """Raises NodeError: the engine failed."""
    folder = model or make_retrieval_model()
    for name, selector in _NAMES.items():
        if only and not name.startswith(only):
            continue
        tries = _run(folder, selector, num_tokens, num_prompts, seed)
        low, high = interval([one["f1"] - one["f1_full"] for one in tries])
        yield BlendRow(
            engine="vllm",
            selector=name,
            recomputed=mean(
                one["recomputed"] / (one["recomputed"] + one["reused"]) for one in tries
            ),
            ttft_s=median(one["ttft_s"] for one in tries),
            ttft_ratio=median(one["ttft_s"] for one in tries)
            / median(one["full_s"] for one in tries),
            f1=mean(one["f1"] for one in tries),
            f1_full=mean(one["f1_full"] for one in tries),
            f1_low=low,
            f1_high=high,
            kl=mean(one["kl"] for one in tries),
            reused_tokens=mean(one["reused"] for one in tries),
            prompts=len(tries),
        )


def _run(
    folder: Path, selector: str, num_tokens: int, num_prompts: int, seed: int
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="kvhold-blend-") as made:
        socket = Path(made) / "node.sock"
        given = {
            "engine": _engine(folder, socket, Path(made), selector, num_tokens),
            "socket": str(socket),
            "tokens": num_tokens,
            "prompts": num_prompts,
            "seed": seed,
        }
        try:
            found = subprocess.run(
                [sys.executable, "-m", "kvhold_lab.bench.blend.vllm_child", json.dumps(given)],
                env=environ | bound_environment(1),
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            end_node(socket)
    if found.returncode:
        raise NodeError(f"vLLM ended with {found.returncode}: {found.stderr[-2000:]}")
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith('{"ttft_s"')]


def _engine(
    folder: Path, socket: Path, permits: Path, selector: str, num_tokens: int
) -> dict[str, Any]:
    chosen = parse_selector(selector)
    grant_trial(permits, _MODEL, selector_text(chosen))
    blend = {"selector": chosen.name, "permits": str(permits), "canary_share": 0.0}
    if chosen.name != "none":
        blend |= {"ratio": chosen.budgets[0].ratio, "check_layer": chosen.check_layer}
    longest = num_tokens + ANSWER_TOKENS + NUM_DOCUMENTS
    settings = {
        "tokens_per_chunk": 4 * _BLOCK,
        "ram_bytes": "2GiB",
        "model_id": _MODEL,
        "rules": {"plan": False},
        "node": {"socket": str(socket), "idle_exit_s": 600},
        "client": {"call_timeout_s": 60},
        "blend": blend,
    }
    return {
        "model": str(folder),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_logprobs": VOCAB_SIZE,
        "kv_cache_memory_bytes": 1 << 29,
        "max_num_seqs": 2,
        "block_size": _BLOCK,
        "seed": 0,
        "kv_transfer_config": {
            "kv_connector": "KVHoldConnector",
            "kv_connector_module_path": "kvhold.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        },
    }
