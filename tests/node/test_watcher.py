"""A node that was killed is started again by its watcher, at once; one that ended by
itself is not.
"""

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvhold.core.config import Config, NodeConfig
from kvhold.node import NodeClient, connect
from kvhold.node.paths import watch_path
from kvhold.node.start import end_node, ensure_node
from kvhold.testing.cache import a_prompt, read, store
from tests.node.nodes import PATIENT, PATIENT_S, SPACE, RunningNode, eventually, works
from tests.node.test_life import listening, starting


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where a node listens that an engine has started; the engine is gone."""
    path = tmp_path / "node.sock"
    ensure_node(config_at(path), path)
    yield path
    end_node(path)


def config_at(path: Path) -> Config:
    return Config(ram_bytes=4 << 20, node=NodeConfig(socket=str(path)), client=PATIENT)


def node_of(client: NodeClient) -> psutil.Process:
    eventually(lambda: works(client))
    return psutil.Process(client.status()["pid"])


def kill(node: psutil.Process) -> None:
    node.kill()
    eventually(lambda: is_dead(node))


def is_dead(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_node_is_started_again_without_an_engine_and_clients_notice_by_themselves(
    path: Path,
) -> None:
    with NodeClient(path, PATIENT) as client:
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        first = node_of(client)
        watcher, link = first.parent(), client._link
        assert watcher is not None
        kill(first)
        eventually(lambda: client._link is not link)  # without a call
        second = node_of(client)
        assert second.parent() == watcher
        assert read(client, a_prompt(SPACE, 64)) == 0, "its memory went with it"
        store(client, a_prompt(SPACE, 64))
        assert read(client, a_prompt(SPACE, 64)) == 64
        assert client.status()["arena_bytes"] == 4 << 20
        assert os.sched_getaffinity(second.pid) == os.sched_getaffinity(0)
        assert f"{second.pid}" in Path(f"{path}.lock").read_text()
    assert "was killed: starting it again" in path.with_suffix(".log").read_text()


def test_one_that_is_killed_again_soon_is_left_to_the_engines(path: Path) -> None:
    with NodeClient(path, PATIENT) as client:
        watcher = node_of(client).parent()
        assert watcher is not None
        kill(node_of(client))
        kill(node_of(client))
        watcher.wait(PATIENT_S)
        eventually(lambda: not client.connected)
        with connect(config_at(path)) as engine:
            assert node_of(engine).parent() != watcher


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_one_that_ends_by_itself_takes_its_watcher_along(
    path: Path, number: signal.Signals | None
) -> None:
    with NodeClient(path, PATIENT) as client:
        node = node_of(client)
        watcher = node.parent()
        assert watcher is not None
        if number is None:
            client.stop_node()
        else:
            node.send_signal(number)
        node.wait(PATIENT_S)
        watcher.wait(PATIENT_S)
    assert not path.exists()


def test_it_holds_no_descriptor_of_the_nodes(path: Path) -> None:
    with NodeClient(path, PATIENT) as client:
        watcher = node_of(client).parent()
        assert watcher is not None
        held = {
            os.readlink(f"/proc/{watcher.pid}/fd/{fd}")  # noqa: PTH115
            for fd in os.listdir(f"/proc/{watcher.pid}/fd")  # noqa: PTH208
        }
    assert not [
        what for what in held if "socket:" in what or "memfd" in what or what.endswith(".lock")
    ], held


def test_while_it_has_the_place_no_engine_starts_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.sock"
    monkeypatch.setattr("sys.executable", "/bin/false")  # a start would fail
    with watch_path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with starting(path) as engine, listening(path):
            engine.result()


def test_a_client_notices_that_its_node_was_killed_though_it_never_calls(node: RunningNode) -> None:
    client = node.client()
    assert client.connected
    node.kill()
    eventually(lambda: not client.connected)
