"""What the tables call harmless leaves every byte of KV as it is on a real engine, and does not
split the cache.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from kvhold.integrations.vllm.naming import environment, tables
from kvhold_lab.engines.models import make_model
from tests.vllm.scheduling import NodeProcess

pytestmark = pytest.mark.vllm

MODEL = make_model("tiny")
ROOT = Path(__file__).parents[2]

GROUPS: dict[str, dict[str, Any]] = {
    tables.MEMORY: {
        "arguments": {"kv_cache_memory_bytes": 1 << 25},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    },
    tables.SCHEDULING: {
        "arguments": {
            "max_num_seqs": 3,
            "max_num_batched_tokens": 1024,
            "scheduling_policy": "priority",
        }
    },
    tables.PLACES: {
        "arguments": {"served_model_name": "another", "model": "COPY"},
        "environment": {"VLLM_PORT": "29999"},
    },
    tables.LOGS: {
        "arguments": {"kv_cache_metrics": True},
        "environment": {"VLLM_LOGGING_PREFIX": "x", "VLLM_LOG_STATS_INTERVAL": "3"},
    },
    tables.SAMPLING: {
        "arguments": {"generation_config": "vllm", "max_logprobs": 3, "logprobs_mode": "raw_logits"}
    },
    tables.INPUTS: {
        "arguments": {"skip_tokenizer_init": True},
        "environment": {"VLLM_IMAGE_FETCH_TIMEOUT": "7"},
    },
    tables.CACHING: {
        "arguments": {"enable_prefix_caching": False},
        "environment": {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1"},
    },
    tables.LAUNCHING: {
        "arguments": {"cudagraph_capture_sizes": [1, 2]},
        "environment": {"VLLM_DISABLE_COMPILE_CACHE": "1"},
    },
    tables.LOADING: {
        "arguments": {"safetensors_load_strategy": "eager", "use_tqdm_on_load": False}
    },
    tables.ELSEWHERE: {"arguments": {"seed": 5, "max_model_len": 1024}},
    environment.BUILD: {"environment": {"MAX_JOBS": "1"}},
    environment.SECRETS: {"environment": {"VLLM_API_KEY": "hush"}},
    environment.SERVING: {"environment": {"VLLM_MAX_N_SEQUENCES": "5"}},
}


def test_every_group_of_harmless_fields_is_shown() -> None:
    reasons = {
        reason for table in tables.TABLES.values() for reason in table.harmless.values()
    } | environment.HARMLESS.keys()
    assert reasons <= GROUPS.keys()


def test_each_group_leaves_the_name_and_every_byte_of_kv_as_they_are(tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    copied.mkdir()
    for file in MODEL.path.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    starts = [
        {"label": "base"},
        {"label": "started again"},
        *({"label": reason} | change for reason, change in GROUPS.items()),
    ]
    for start in starts:
        start["arguments"] = {"model": str(MODEL.path)} | start.get("arguments", {})
        if start["arguments"]["model"] == "COPY":
            start["arguments"]["model"] = str(copied)
        start.setdefault("environment", {})
    found = {row["label"]: row for row in run(starts, tmp_path)}
    base = found["base"]
    assert [kv.split()[0] for kv in base["kv"]] == ["192", "64"]
    for label, row in found.items():
        assert row["digest"] == base["digest"], label
        assert row["kv"] == base["kv"], label
    assert len(found) == len(starts)


def run(starts: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    node = NodeProcess(folder / "node.sock")
    try:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [
            sys.executable,
            "-m",
            "tests.vllm.named_engine",
            json.dumps(starts),
            str(node.socket),
        ]
        done = subprocess.run(
            command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    finally:
        node.kill()
