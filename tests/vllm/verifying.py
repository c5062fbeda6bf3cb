"""Runs of `kvhold verify`, and what this vLLM does with each class of models."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvhold_lab.checkpoints import RECIPES

# What this vLLM does with each class in float32 on CPUs; a change of it is news. Refused: kvhold
# says why it does not serve them here.
REFUSED = {
    "falcon-h1": "mamba_cache_mode is none",
    "deepseek-v2": "MLA on CPUs gives other answers",
}
UNSUPPORTED = {"jamba": "selective_scan_fwd"}
HAS_FP8_KV = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
if not HAS_FP8_KV:
    UNSUPPORTED["llama-fp8"] = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
UNSTEADY = {"lfm2"}  # answers by what else is in the batch
PASSING = sorted(RECIPES.keys() - REFUSED.keys() - UNSUPPORTED.keys() - UNSTEADY)
# what is computed together decides near ties, and busy cores decide what is: it runs by itself
IN_BFLOAT16 = "qwen3-next"
# then vLLM keeps its states at no block's end
REFUSED_PATHS = {("qwen3-next", "no-prefix-caching"): "mamba_cache_mode is none"}

# The fewest blocks that a path loads. How many exactly, busy cores decide: a request of a batch
# finds in the engine what one before it has just loaded, or asks before that and loads it again.
# qwen3-next, whose blocks are the largest, has 10 or 9.
LEAST_BLOCKS = 6


@dataclass(frozen=True)
class Verified:
    """A run of the command, or several. rows: by model and path."""

    exit_codes: list[int]
    output: str
    rows: dict[tuple[str, str], dict[str, Any]]

    @property
    def exit_code(self) -> int:
        (code,) = self.exit_codes
        return code


def verify(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Verified:
    return verify_beside(folder, [arguments], environment=environment)


def verify_beside(
    folder: Path,
    lots: Sequence[Sequence[str]],
    *,
    at_once: int = 2,
    environment: Mapping[str, str] | None = None,
) -> Verified:
    """The command with each of the arguments, `at_once` at the same time."""
    with ThreadPoolExecutor(at_once) as pool:
        ran = list(
            pool.map(
                lambda number: _run(folder / f"{number}.json", lots[number], environment or {}),
                range(len(lots)),
            )
        )
    rows = [
        row
        for number in range(len(lots))
        for row in json.loads((folder / f"{number}.json").read_text())
    ]
    output = "\n".join(one.stdout + one.stderr for one in ran)
    return Verified(
        [one.returncode for one in ran], output, {(row["model"], row["path"]): row for row in rows}
    )


def _run(
    rows: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "kvhold",
        "verify",
        *arguments,
        "--threads",
        "1",
        "--json",
        str(rows),
    ]
    return subprocess.run(
        argv, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def assert_passed(row: dict[str, Any], output: str) -> None:
    assert row["outcome"] == "pass", output
    assert row["kv_exact"] is True
    assert row["tokens_equal"] is True
    assert row["ties"] == 0 or row["model"] == IN_BFLOAT16, output
    assert row["requests"] >= 12
    assert row["blocks"] >= LEAST_BLOCKS
