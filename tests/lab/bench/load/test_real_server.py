"""Workloads on a real vLLM server with the connector: whatever was cold is a hit when
it is warm.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvhold.cli import cli
from kvhold_lab.bench.load.demo_server import demo_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTEXT = 2_048  # the engine's own memory holds one such prompt


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with demo_server("tiny", context_tokens=CONTEXT, ram_bytes=256 << 20) as server:
        yield server.base_url


def run(base_url: str, lines: Path, *arguments: str) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(
        cli, ["bench", "load", *arguments, "--base-url", base_url, "--json", str(lines)]
    )
    summary: dict[str, Any] = json.loads(lines.read_text().splitlines()[-1])
    return result, summary


def long_docs(seed: int, *gates: str) -> list[str]:
    shape = [
        "--documents",
        "4",
        "--document-tokens",
        "1100",
        "--output-tokens",
        "4",
        "--max-in-flight",
        "2",
        "--order",
        "tile",
    ]
    return ["long-doc-qa", *shape, "--seed", str(seed), "--expect-max-errors", "0", *gates]


def test_long_documents_are_hits_in_the_warm_round(base_url: str, tmp_path: Path) -> None:
    result, summary = run(
        base_url, tmp_path / "lines", *long_docs(0, "--expect-ttft-gain", "0.0001")
    )
    assert result.exit_code == 0, result.output
    cold, warm = summary["groups"]["cold"], summary["groups"]["warm"]
    assert (cold["requests"], warm["requests"], summary["total"]["errors"]) == (4, 8, {})
    assert (cold["input_tokens"], cold["cached_tokens"]) == (4 * 1_132, 0)
    assert warm["cached_tokens"] == 8 * (1_100 // 128 * 128)
    hits = summary["hits"]
    assert hits["cold"]["by_tier"] == {}
    assert hits["warm"]["by_tier"]["ram"] == warm["cached_tokens"]
    assert hits["warm"]["loaded"] + hits["warm"]["own"] == warm["cached_tokens"]
    assert hits["warm"]["loaded"] > 0


def test_a_gain_that_nothing_has_is_not_reached(base_url: str, tmp_path: Path) -> None:
    result, _ = run(base_url, tmp_path / "lines", *long_docs(1, "--expect-ttft-gain", "1e9"))
    assert result.exit_code == 1
    assert "FAILED: the ttft gain of warm requests is" in result.output


def test_policies_get_equal_requests_and_their_hits_come_from_kvhold(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    chats = ["chats", "--chats-s", "1", "--think-s", "1", "--duration-s", "8"]
    compared = ["--compare-policy", "lru", "--compare-policy", "learned"]
    demo = ["--serve-demo", "tiny", "--demo-context", "2048", "--demo-ram", "64MiB"]
    demo += ["--demo-disk", "64MiB"]
    others = ["--most-tokens", "2000", "--expect-max-errors", "0", "--json", str(lines)]
    result = CliRunner().invoke(
        cli, ["bench", "load", *chats, *compared, *demo, *others], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    written = [json.loads(line) for line in lines.read_text().splitlines()]
    lru, learned = (line for line in written if line["type"] == "policy")
    difference = next(line for line in written if line["type"] == "difference")
    assert (lru["policy"], learned["policy"]) == ("lru", "learned")
    assert lru["prompt_tokens"] == learned["prompt_tokens"]
    assert difference["pairs"] == lru["requests"] == learned["requests"] > 0
    for row in (lru, learned):
        hits = row["hits"]["chats"]
        assert (hits["loaded"], hits["own"]) == (row["hit_tokens"], 0)
        assert row["hit_tokens"] > 0


def test_a_trace_is_replayed_with_its_sharing(base_url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        (0, [0, 1, 2]),
        (1_000, [3, 4]),
        (2_000, [0, 1, 5]),
        (3_000, [6, 7]),
        (4_000, [0, 1, 2]),
    ]
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids) - 12, "output_length": 3, "hash_ids": ids}
        for at, ids in requests
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--time-scale", "2", "--max-in-flight", "1", "--expect-max-errors", "0"]
    result, summary = run(base_url, tmp_path / "lines", "replay", str(trace), *arguments)
    assert result.exit_code == 0, result.output
    asked = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()[:-1]]
    assert [line["input_tokens"] for line in asked] == [512 * len(ids) - 12 for _, ids in requests]
    assert [line["cached_tokens"] for line in asked] == [0, 0, 1_024, 0, 1_524 // 128 * 128]
    assert summary["total"]["output_tokens"] == 15
