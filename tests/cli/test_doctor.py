"""`kvhold doctor`: it finds nothing wrong with what works, says in plain words what is wrong with
what does not, and exits accordingly.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvhold.cli.doctor import command

PATIENT = (
    "probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60"  # a busy machine is no fault of the tier
)


def look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *tiers: str
) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what was found of each tier (the node's finding is the first)."""
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(tmp_path / "node.sock"))
    monkeypatch.setenv("KVHOLD_TIERS", " ".join(tiers))
    result = CliRunner().invoke(command, ["--json"])
    return result.exit_code, json.loads(result.stdout)


def test_what_works_is_well_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, (node, disk) = look(
        tmp_path, monkeypatch, f"disk://{tmp_path}/d?max_bytes=64MiB&{PATIENT}"
    )
    assert (status, node["ok"], disk["ok"], disk["says"]) == (0, True, True, [])
    assert set(disk["ms"]) == {"check", "put", "probe", "get", "get a layer", "delete"}
    assert not [path for path in (tmp_path / "d").rglob("*") if path.stat().st_size > 4096]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("faults+disk://{}/d?faults=get:corrupt:1", "comes back damaged"),
        ("faults+disk://{}/d?faults=get:truncate:1", "cannot be read|damaged"),
        ("faults+disk://{}/d?faults=put:error:1", "a chunk cannot be put|put"),
        ("faults+disk://{}/d?faults=probe:hang:1&probe_timeout_s=0.05", "no answer within 0.05 s"),
        ("redis://127.0.0.1:1/0", "127.0.0.1:1"),
        ("redi://127.0.0.1:1/0", "did you mean 'redis'"),
        ("disk://{}/d?max_byte=5", "did you mean 'max_bytes'"),
        ("kvhold://:hush@127.0.0.1:1", "127.0.0.1:1"),
        ("null://", "probe finds nothing"),
        ("lm://127.0.0.1:1", "the scheme 'lm' is LMCache's; here write kvhold://HOST:PORT"),
        ("mooncakestore://127.0.0.1:1", "here write mooncake://"),
        ("external://x", "here write plugin://module:Class"),
        ("blackhole://x", "here write null://"),
        ("fs:///a,/b", "a tier is one folder; name several tiers: fs:///a fs:///b"),
    ],
)
def test_what_does_not_work_is_said_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, told: str
) -> None:
    good = f"disk://{tmp_path}/good?{PATIENT}"
    status, (_, bad, disk) = look(tmp_path, monkeypatch, url.format(tmp_path), good)
    assert (status, bad["ok"], disk["ok"]) == (1, False, True)
    assert any(re.search(told, said) for said in bad["says"]), bad["says"]
    assert "hush" not in json.dumps(bad)


@pytest.mark.parametrize("max_error", [None, "0", "1"])
def test_a_lossy_codec_that_the_rules_do_not_allow_is_told_and_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_error: str | None
) -> None:
    pytest.importorskip("numba", reason="no numba in this environment")
    if max_error is not None:
        monkeypatch.setenv("KVHOLD_RULES_MAX_ERROR", max_error)
    status, (_, disk) = look(tmp_path, monkeypatch, f"disk://{tmp_path}/d?codec=int8&{PATIENT}")
    assert (status, disk["ok"]) == (0, True)
    told = [said for said in disk["says"] if "codec=int8 loses precision" in said]
    assert len(told) == (max_error != "1")
    assert all("set rules.max_error" in said for said in told)


def test_a_socket_that_nobody_serves_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.sock").touch()
    status, (node, _) = look(tmp_path, monkeypatch)
    assert (status, node["ok"]) == (1, False)


def test_people_read_a_line_a_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(tmp_path / "node.sock"))
    result = CliRunner().invoke(command, ["--tier", f"disk://{tmp_path}/d?{PATIENT}"])
    assert result.exit_code == 0
    assert [line[:5] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        "ok   ",
        "ok   ",
    ]


def test_variables_of_lmcache_are_answered_with_the_names_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LMCACHE_CHUNK_SIZE", "LMCACHE_NOBODY_KNOWS"):
        monkeypatch.setenv(name, "256")
    status, (_, _, environment) = look(tmp_path, monkeypatch)
    assert (status, environment["ok"]) == (0, True), "LMCache may be there, too"
    assert [said.partition(";")[0] for said in environment["says"]] == [
        "LMCACHE_CHUNK_SIZE is a variable of LMCache and has no effect here",
        "LMCACHE_NOBODY_KNOWS is a variable of LMCache and has no effect here",
    ]
    assert environment["says"][0].endswith("in kvhold it is KVHOLD_TOKENS_PER_CHUNK")
