"""`kvhold bench vllm` on real engines, all six of them, short: whether they agree, what they reuse,
and what is written down.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_lab.bench.compare.names import (
    AGAIN,
    CHECKED_AGAIN,
    KVHOLD,
    LEFT_AGAIN,
    LEFT_ALONE,
    LIMIT,
    OFFLOADING,
    PLAIN,
    RECOMPUTE,
    UNCHECKED,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

TOKENS = 1_100  # 8 blocks of 128, and a rest that is always computed


def test_systems_agree_and_rows_have_what_others_read(tmp_path: Path) -> None:
    figures, curve = tmp_path / "rows.json", tmp_path / "curve.png"
    arguments = [
        "--model-size",
        "tiny",
        "--tokens",
        str(TOKENS),
        "--rounds",
        "1",
        "--unchecked",
        "--json",
        str(figures),
        "--plot",
        str(curve),
    ]
    command = [sys.executable, "-m", "kvhold", "bench", "vllm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # 1 where answers differ
    rows = {(row["reuse"], row["system"]): row for row in json.loads(figures.read_text())}
    everyone = {RECOMPUTE, OFFLOADING, KVHOLD, LIMIT}
    few = {(0, name) for name in (PLAIN, AGAIN, LEFT_ALONE, LEFT_AGAIN)}
    few |= {(100, name) for name in (PLAIN, UNCHECKED, CHECKED_AGAIN)}
    assert (
        rows.keys() == {(reuse, name) for reuse in (0, 25, 50, 75, 100) for name in everyone} | few
    )
    for (reuse, name), row in rows.items():
        assert {"ttft_p50_s", "ttft_p99_s", "throughput", "ratio_to_best_peer"} <= row.keys()
        assert row["ttft_p99_s"] >= row["ttft_p50_s"] > 0
        # of which PLAIN shows that the working set exceeds the engine's memory
        if name in (RECOMPUTE, PLAIN) or not reuse:
            assert row["cached_tokens"] == 0, (reuse, name)
        elif name in (
            KVHOLD,
            UNCHECKED,
            CHECKED_AGAIN,
        ):  # of a text that goes on otherwise, its whole chunks
            assert row["cached_tokens"] == {25: 256, 50: 512, 75: 768, 100: 1_024}[reuse]
        else:
            assert row["cached_tokens"] == TOKENS * reuse // 100 // 128 * 128, (reuse, name)
    assert "at most 1.02" in done.stdout
    assert "at most 1.03" in done.stdout
    assert curve.read_bytes().startswith(b"\x89PNG")
