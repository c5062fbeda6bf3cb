"""`kvhold verify` by set-up, several at a time."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target
from kvhold_lab.engines.engine import is_vllm_available

PART = "verify"
_LONGEST_S = 420.0
_TOGETHER = 12
_COMMAND = "from kvhold_lab.verify.command import command; command()"
_PATHS = "plain,no-prefix-caching,chunked-prefill,preemption,new-engine"
_SHORT = "plain,new-engine"
_SHARE = {"gpu_memory_utilization": 0.3}
# FlashInfer would compile its sampler; kernels of states tune for minutes
_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class _Setup:
    name: str
    classes: str
    paths: str = _PATHS
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"


_SMALL = (_Setup("CPU", "llama", "plain", dtype="float32"),)
_SETUPS = (
    _Setup("default", "llama", f"{_PATHS},async,ngram,fp8-kv,cuda-graphs"),
    _Setup("compiled", "llama", _SHORT, {"enforce_eager": False}),
    _Setup(
        "runner V1",
        "llama",
        f"{_PATHS},layerwise,draft",
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    _Setup("Triton", "llama", engine={"attention_backend": "TRITON_ATTN"}, dtype="float32"),
    _Setup("default", "qwen3,qwen3-moe"),
    _Setup("default", "gemma3,gpt-oss"),
    _Setup("default", "llama-lora,idefics3,lfm2", _SHORT),
    _Setup("MLA", "deepseek-v2", engine={"attention_config": {}, "block_size": 64}),
    _Setup("MLA by Triton", "deepseek-v2", _SHORT, {"attention_config": {"backend": "TRITON_MLA"}}),
    _Setup("states", "jamba", _SHORT),
    _Setup("states", "falcon-h1", _SHORT, {"enable_prefix_caching": True}),
    _Setup("states", "qwen3-next", _SHORT, {"gdn_prefill_backend": "triton"}),
)


def rows(target: Target) -> Iterator[GpuRow]:
    if not is_vllm_available():
        yield GpuRow(PART, "not run: vLLM is not installed", 0, "")
        return
    setups = _SMALL if target.small else _SETUPS
    share = {} if target.small else _SHARE
    cores = max(1, (os.cpu_count() or 1) // min(_TOGETHER, len(setups)))
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-gpu-") as folder,
        ThreadPoolExecutor(_TOGETHER) as pool,
    ):
        jobs = {
            pool.submit(_verify, setup, share, cores, Path(folder) / f"{number}.json"): setup
            for number, setup in enumerate(setups)
        }
        for job in as_completed(jobs):
            yield from _rows_of(jobs[job], *job.result())


def _verify(
    setup: _Setup, share: dict[str, Any], cores: int, file: Path
) -> tuple[list[dict[str, Any]], str]:
    arguments = {
        "--classes": setup.classes,
        "--paths": setup.paths,
        "--dtype": setup.dtype,
        "--config": json.dumps({"allow_unproven": True}),
        "--engine-args": json.dumps(share | setup.engine),
        "--threads": str(cores),
        "--timeout": str(_LONGEST_S),
        "--json": str(file),
    }
    words = [word for pair in arguments.items() for word in pair]
    with subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *words],
        env={**os.environ, **_ENVIRONMENT, **setup.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said = process.communicate(timeout=_LONGEST_S)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            said = f"{process.communicate()[0]}\nnot ended within {_LONGEST_S:g} s"
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return found, said


def _rows_of(setup: _Setup, found: list[dict[str, Any]], said: str) -> Iterator[GpuRow]:
    for row in found:
        title = f"{setup.name}: {row['model']}, {row['path']}"
        if row["outcome"] in ("off", "unsupported"):
            yield GpuRow(PART, f"{title}: {row['outcome']}", 0, "requests")
            continue
        ties = f", {row['ties']} ties" if row["ties"] else ""
        yield check(PART, f"{title}{ties}", row["outcome"] == "pass", row["requests"])
    wanted = len(setup.classes.split(",")) * len(setup.paths.split(","))
    if len(found) < wanted:
        last = said.strip().splitlines()[-1:] or ["no output"]
        yield check(PART, f"{setup.name}: {setup.classes}: {last[0][:120]}", passed=False)
