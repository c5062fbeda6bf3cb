"""`kvhold bench compare` on real engines and a real Redis, short: whether they agree, where hits
came from, what is written down.

LMCache is left out by a folder that is no environment of its own: making one takes 2 GB. Its rows
have that error.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_lab.bench.compare.names import (
    AGAIN,
    ALONE,
    KVHOLD,
    LMCACHE,
    OFFLOADING,
    PLAIN,
    RECOMPUTE,
)

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.slow, pytest.mark.alone]

CACHED = {0: 0, 25: 256, 50: 512, 75: 768, 100: 1_024}  # of 1,100 tokens, whole blocks
KEYS = {
    "workload",
    "tier",
    "reuse",
    "system",
    "ttft_p50_s",
    "ttft_p99_s",
    "throughput",
    "ratio_to_best_peer",
}


def test_systems_agree_and_hits_come_from_the_tier(tmp_path: Path) -> None:
    figures, no_environment = tmp_path / "rows.json", tmp_path / "something-else"
    (no_environment / "there").mkdir(parents=True)
    arguments = [
        "--model-size",
        "tiny",
        "--rounds",
        "1",
        "--threads",
        "1",
        "--tier",
        "redis",
        "--workload",
        "2x",
        "--json",
        str(figures),
    ]
    command = [
        sys.executable,
        "-m",
        "kvhold",
        "bench",
        "compare",
        *arguments,
        "--lmcache-env",
        str(no_environment),
    ]
    # a late answer would be a shorter hit
    patient = {"KVHOLD_CLIENT_CALL_TIMEOUT_S": "60", "KVHOLD_CLIENT_ARRIVAL_TIMEOUT_S": "60"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | patient, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(figures.read_text())
    assert {(row["workload"], row["tier"]) for row in rows} == {("working set 2x", "redis")}
    assert all(row.keys() >= KEYS for row in rows)
    by_place = {(row["system"], row["reuse"]): row for row in rows}
    for name in (RECOMPUTE, PLAIN, OFFLOADING, KVHOLD, ALONE):
        for reuse, cached in CACHED.items():
            row = by_place[name, reuse]
            assert (
                not row["error"]
                and row["ttft_p99_s"] >= row["ttft_p50_s"] > 0
                and row["throughput"] > 0
            )
            assert row["cached_tokens"] == (0 if name in (RECOMPUTE, PLAIN) else cached), (
                name,
                reuse,
            )
            assert row["best_peer"] not in (KVHOLD, ALONE) or name not in (KVHOLD, ALONE)
    assert {reuse for name, reuse in by_place if name == AGAIN} == {0, 25, 50, 75, 100}
    found = [
        by_place[name, reuse]["sources"] for name in (KVHOLD, ALONE) for reuse in (25, 50, 75, 100)
    ]
    of_redis = sum(sources.get("redis", 0) for sources in found)
    assert of_redis > 0.3 * sum(sum(sources.values()) for sources in found), (
        "memory has room for two of the four"
    )
    errors = {row["system"]: row["error"] for row in rows if row["error"]}
    assert errors.keys() == {LMCACHE}
    assert all("no virtual environment" in error for error in errors.values())
    assert "cannot run: lmcache, redis\n" in done.stdout
    assert "at most 1.02" in done.stdout
    assert "prompts are of 1,100, for about" in done.stdout
