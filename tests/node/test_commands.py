"""`kvhold serve`, `status` and `stop`, as people and scripts use them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvhold.cli.status import command as status
from kvhold.cli.stop import command as stop
from kvhold.net.messages import PROTOCOL_VERSION
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt, store
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually, run_kvhold


def run(command: click.Command, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, too, wait for a busy machine."""
    for name in [name for name in os.environ if name.startswith("KVHOLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVHOLD_CLIENT_CALL_TIMEOUT_S", str(PATIENT_S))
    monkeypatch.setenv("KVHOLD_CLIENT_CONNECT_TIMEOUT_S", str(PATIENT_S))


@pytest.fixture
def engine(shared_node: RunningNode, patient: None) -> Iterator[NodeClient]:
    with shared_node.client(name="engine") as client:
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        with client.lookup(a_prompt(SPACE, 64).query()):
            yield client
        client.clear()


def test_status_shows_people_the_node_its_arena_its_clients_and_what_it_counted(
    engine: NodeClient, shared_node: RunningNode
) -> None:
    shown = run(status, "--socket", str(shared_node.path))
    assert f"pid {shared_node.pid}" in shown
    assert "of 16.0 MiB used" in shown
    assert "chunks    4, 4 of them pinned" in shown
    assert "held      1 hits, 0 leases, 0 reservations" in shown
    assert f"client    engine (pid {os.getpid()})" in shown
    assert "kvhold_stored_chunks 4" in shown


def test_status_as_json_is_one_object_of_the_same(
    engine: NodeClient, shared_node: RunningNode
) -> None:
    shown = json.loads(run(status, "--json", "--socket", str(shared_node.path)))
    same = engine.status()
    for name in (
        "pid",
        "socket",
        "version",
        "protocol",
        "arena_bytes",
        "used_bytes",
        "chunks",
        "held",
        "huge_pages",
    ):
        assert shown[name] == same[name]
    assert {c["name"] for c in shown["clients"]} == {"engine", "kvhold status"}


def test_a_second_after_its_start_a_node_faults_its_arena_in(engine: NodeClient) -> None:
    """It is found, and answers, before that."""
    eventually(lambda: engine.status()["arena_touched_bytes"] == engine.status()["arena_bytes"])


def test_status_finds_the_node_through_the_settings(
    engine: NodeClient, shared_node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHOLD_NODE_SOCKET", str(shared_node.path))
    assert f"pid {shared_node.pid}" in run(status)


def test_stop_ends_the_node(node: RunningNode, patient: None) -> None:
    assert run(stop, "--socket", str(node.path)) == f"stopped the node on {node.path}\n"
    assert node.process.wait(PATIENT_S) == 0
    assert not node.path.exists()


def test_serve_says_when_it_is_ready_and_what_it_has(shared_node: RunningNode) -> None:
    assert (
        shared_node.ready
        == f"kvhold node ready on {shared_node.path}: 16.0 MiB in normal pages, protocol "
        f"{PROTOCOL_VERSION}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "fault"),
    [
        pytest.param(
            ["status", "--socket", "{folder}/none"],
            {},
            "no node runs on {folder}/none",
            id="no node for status",
        ),
        pytest.param(
            ["stop", "--socket", "{folder}/none"],
            {},
            "no node runs on {folder}/none",
            id="no node to stop",
        ),
        pytest.param(
            ["serve", "--policy", "lrv", "--socket", "{folder}/s"],
            {},
            "did you mean 'lru'",
            id="a bad setting",
        ),
        pytest.param(
            ["serve", "--ram-bytes", "100TiB", "--socket", "{folder}/s"],
            {},
            "100.0 TiB does not fit",
            id="too much memory",
        ),
        pytest.param(
            ["serve", "--socket", "{folder}"],
            {},
            "{folder} exists, and is not a socket",
            id="a folder as socket",
        ),
        pytest.param(
            ["status"], {"KVHOLD_LOG_LEVEL": "loud"}, "KVHOLD_LOG_LEVEL", id="a bad log level"
        ),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_status_1(
    tmp_path: Path, arguments: list[str], environ: dict[str, str], fault: str
) -> None:
    done = run_kvhold(*(argument.format(folder=tmp_path) for argument in arguments), **environ)
    assert done.returncode == 1
    complaint = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(complaint) == 1, done.stderr
    assert complaint[0].startswith("kvhold: ")
    assert fault.format(folder=tmp_path) in complaint[0]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("statsu", "There is no command 'statsu'. Did you mean 'status'?"),
        ("xyzzy", "There is no command 'xyzzy'."),
    ],
)
def test_a_command_that_is_unknown_is_answered_with_the_nearest(word: str, says: str) -> None:
    done = run_kvhold(word)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"Error: {says}"


def test_a_node_can_be_started_again_right_after_stop(
    start_node: Callable[..., RunningNode], patient: None
) -> None:
    first = start_node()
    run(stop, "--socket", str(first.path))
    second = start_node()
    assert second.pid != first.pid
