"""`kvhold bench micro`: what it measures and how it is written down.

How fast anything is, is for the command to say, not for a test.
"""

import json
from math import inf, isfinite
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvhold.cli import cli
from kvhold.core.errors import NodeError
from kvhold.core.layout import Group
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn
from kvhold_lab.bench.servers import running_node

NAMES = {
    "hashing": {"naming 1,000 tokens"},
    "index": {
        f"{what}, {size} in the index"
        for what in ("hit of 10 chunks", "miss at the first chunk", "reserve and commit 10 chunks")
        for size in (10, 30)
    },
    "policies": {
        f"learned: {what} 10 chunks, {size} in the index"
        for what in (
            "hit of",
            "reserve and commit",
            "miss, reserve and commit",
            "miss, evict, reserve and commit",
        )
        for size in (10, 30)
    }
    | {
        f"learned on a disk: {what} 10 chunks, {size} in the index"
        for what in ("use", "evict and write")
        for size in (10, 30)
    },
    "lookup": {"lookup 32,000 tokens through the node", "lookup 128,000 tokens through the node"},
    "frames": {"framing, raw", "checking a frame, raw"},
    "gather": {
        f"{verb}{checked}, {threads}"
        for verb in ("gather", "scatter")
        for checked in ("", " with checksums")
        for threads in ("1 thread", "2 threads")
    },
    "rope": {
        f"turn keys, {layout}, {dtype}{place}"
        for layout in ("half", "interleaved")
        for dtype in ("bfloat16", "float16", "float32")
        for place in ("", ", in place")
    },
    "memory": {
        f"{verb}, {checked}"
        for verb in ("store", "retrieve")
        for checked in ("with checksums", "without")
    },
    "wire": {
        "smallest call to the node",
        "lookup of 1,000 names by the node, a miss",
        "get of 4 KiB from a central cache",
        "get of 1 MiB from a central cache",
    },
    "startup": {
        "interpreter with import kvhold",
        "node, from start to ready",
        "node, memory beside the arena",
    },
}
OF_SERVERS = ("lookup", "memory", "wire", "startup")
TINY = {
    "profiles.SECONDS": 0,
    "hashing.NUM_TOKENS": 1_000,
    "index.SIZES": (10, 30),
    "index.PROMPT_CHUNKS": 10,
    "index.MISSES": 2,
    "policies.SIZES": (10, 30),
    "frames.GROUP": Group(layers=2, planes=2, heads=1, head_dim=8, dtype="bfloat16"),
    "frames.NUM_CHUNKS": 1,
    "gather.NUM_CHUNKS": 1,
    "rope.TOKENS": 3,
    "memory.NUM_CHUNKS": 1,
    "wire.CALLS": 2,
    "wire.LARGE_CALLS": 1,
    "wire.LARGE_BYTES": 1 << 20,
} | {f"{part}.ROUNDS": 1 for part in (*NAMES, "disk_policies")}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setattr(f"kvhold_lab.bench.{name}", value)


def micro(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "micro", *arguments])


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.server if part in OF_SERVERS else ()) for part in NAMES],
)
def test_each_row_stands_beside_a_limit_of_the_same_run_and_a_profile_if_it_is_to_have_one(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold_lab.bench.profiles.KEPT_UNDER", inf)
    result = micro(
        "--only",
        part,
        "--profile",
        str(tmp_path / "profiles"),
        "--json",
        str(tmp_path / "micro.json"),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "micro.json").read_text())
    assert {row["name"] for row in rows} == NAMES[part]
    assert {frozenset(row) for row in rows} == {
        frozenset({"name", "value", "unit", "limit", "ratio", "profile"})
    }
    assert all(row["name"] in result.output and row["profile"] in result.output for row in rows)
    assert all(
        isfinite(row[number]) and row[number] > 0
        for row in rows
        for number in ("value", "limit", "ratio")
    )
    texts = [Path(row["profile"]).read_text() for row in rows]
    assert len({row["profile"] for row in rows}) == len(rows)
    if part in ("wire", "lookup"):
        sides = [text.partition("The server") for text in texts]
        assert all("/kvhold/" in client and "/kvhold/" in server for client, _, server in sides)
    elif part == "startup":
        assert all("kvhold" in text for text in texts)
    else:
        assert all("function calls" in text for text in texts)


def test_all_parts_are_measured_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in NAMES:
        monkeypatch.setattr(
            f"kvhold_lab.bench.{part}.rows",
            lambda _, part=part: [Row(f"row of {part}", 1.0, "ms", 1.0, 1.0)],
        )
    assert [part for part in NAMES if f"row of {part}" in micro().output] == list(NAMES)
    named = micro("--only", "wire", "--only", "index").output
    assert [part for part in NAMES if f"row of {part}" in named] == ["index", "wire"]
    assert "profile" not in named


def test_a_part_that_is_none_is_refused_and_those_that_are_one_are_named() -> None:
    result = micro("--only", "teleport")
    assert result.exit_code == 2
    assert "teleport" in result.output
    assert all(part in result.output for part in NAMES)


def test_only_what_is_under_the_mark_is_profiled(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path / "kept")
    slow, fast = Row("Slow, 1,000 chunks", 2.0, "ms", 1.0, 0.79), Row("fast", 1.0, "ms", 1.0, 0.8)
    kept = profiles.of(slow, lambda: "where it went")
    assert kept.name == slow.name
    assert Path(kept.profile).read_text() == "where it went"
    assert profiles.of(fast, lambda: pytest.fail("was looked at")) is fast
    assert Profiles().of(slow, lambda: pytest.fail("was looked at")) is slow
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_profile_leaves_out_what_only_clears_up() -> None:
    text = of_calls(lambda: sorted([2, 1]), after=lambda: sum([1, 2]))
    assert "builtins.sorted" in text
    assert "builtins.sum" not in text


def test_work_takes_turns_and_is_cleared_up_after() -> None:
    done: list[str] = []
    seconds = in_turn(
        {"a": lambda: done.append("a"), "b": lambda: done.append("b")},
        rounds=2,
        after={"a": lambda: done.append("-")},
    )
    assert "".join(done) == "a-b" + "ba-" + "a-b"  # the first of them is not counted
    assert set(seconds) == {"a", "b"}


def test_a_server_that_does_not_start_is_an_error() -> None:
    with pytest.raises(NodeError, match="did not start"), running_node(("-c", "pass")):
        pytest.fail("there is no node")
