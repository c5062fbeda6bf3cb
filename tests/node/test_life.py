"""A node's life: who may start one, where it may listen, how engines start it by themselves, and
how it ends.
"""

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvhold.core.config import ClientConfig, Config, NodeConfig
from kvhold.core.errors import CapacityError, NodeError
from kvhold.node import NodeClient, connect
from kvhold.node.paths import clears_path, default_socket, lock_path, prepare_folder, socket_path
from kvhold.node.server import Node
from kvhold.node.socket_lock import SocketLock
from kvhold.node.start import end_node, ensure_node
from kvhold.testing.cache import a_prompt, read, store
from kvhold.tiers.journal import ClearsJournal
from tests.node.nodes import (
    PATIENT,
    PATIENT_S,
    SPACE,
    RunningNode,
    clean_environ,
    eventually,
    run_kvhold,
    works,
)

StartNode = Callable[..., RunningNode]


def config_at(path: Path, **settings: Any) -> Config:
    return Config(
        ram_bytes=4 << 20,
        node=NodeConfig(socket=str(path), **settings),
        client=PATIENT,
    )


# Where it listens


async def test_a_node_is_refused_a_place_it_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked.lock").mkdir()
    places = {
        tmp_path / "file" / "node.sock": "cannot make the folder",
        Path("/proc/kvhold/node.sock"): "cannot make the folder",
        Path("/proc/node.sock"): "cannot write",
        tmp_path / ("x" * 120): "at most 107 bytes",
        tmp_path / "locked": "cannot write",
        tmp_path / "file": "not a socket",
        tmp_path / "folder": "not a socket",
    }
    for place, reason in places.items():
        with pytest.raises(NodeError, match=reason) as caught:
            await asyncio.wait_for(Node(config_at(place)).serve(), PATIENT_S)
        assert str(place.parent) in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious", "a mistyped path costs nobody a file"


async def test_a_node_whose_arena_does_not_fit_leaves_its_place_free(tmp_path: Path) -> None:
    config = Config(ram_bytes=100 << 40, node=NodeConfig(socket=str(tmp_path / "node.sock")))
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"100\.0 TiB"):
            Node(config)


def test_engines_are_told_why_there_can_be_no_node_at_a_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for place in ("file/node.sock", "folder", "file", "x" * 120):
        with pytest.raises(NodeError, match="node"):
            connect(config_at(tmp_path / place))
    with pytest.raises(NodeError, match="not a socket"):
        connect(config_at(tmp_path / "folder"))


def test_the_default_place_is_this_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == socket_path("") == tmp_path / "kvhold" / "node.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert socket_path("") == tmp_path / f"kvhold-{os.getuid()}" / "node.sock"
    prepare_folder(socket_path(""))
    assert socket_path("").parent.stat().st_mode & 0o777 == 0o700


def test_clears_are_remembered_where_they_outlive_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "made yet"))
    one, other = clears_path(Path("/run/one.sock")), clears_path(Path("/run/other.sock"))
    assert one != other
    assert one == clears_path(Path("/run/one.sock"))
    asyncio.run(ClearsJournal(one).add("disk", b""))
    assert ClearsJournal(one).pending("disk") == [b""]
    assert ClearsJournal(other).pending("disk") == []
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert clears_path(Path("/run/one.sock")).parent == tmp_path / ".local" / "state" / "kvhold"


def test_clears_are_remembered_beside_the_socket_where_the_state_folder_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "kvhold").touch()
    assert clears_path(tmp_path / "node.sock") == tmp_path / "node.sock.clears"
    assert "clears_file" in caplog.text


@pytest.mark.parametrize(
    "taken_by", ["a file", "a link", "a folder that all may write to", "another user's folder"]
)
def test_when_somebody_has_taken_the_default_place_all_engines_agree_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, taken_by: str
) -> None:
    if taken_by == "another user's folder" and os.getuid() != 0:
        pytest.skip("only root can give a folder to somebody else")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    usual = tmp_path / f"kvhold-{os.getuid()}"
    match taken_by:
        case "a file":
            usual.touch()
        case "a link":
            usual.symlink_to(tmp_path / "home")
        case _:
            usual.mkdir()
            usual.chmod(0o777)
            if taken_by == "another user's folder":
                os.chown(usual, 65534, 65534)
                usual.chmod(0o755)
    chosen = default_socket()
    assert chosen.parent != usual
    prepare_folder(chosen)
    assert chosen.parent.stat().st_mode & 0o777 == 0o700
    assert default_socket() == chosen
    assert f"{usual} is not this user's alone" in caplog.text


# What others may have put there


@pytest.mark.parametrize("suffix", [".lock", ".start", ".log"])
def test_a_link_in_the_place_of_a_file_of_the_nodes_is_not_followed(
    tmp_path: Path, suffix: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    place = tmp_path / "run" / "node.sock"
    place.parent.mkdir(mode=0o700)
    planted = place.with_suffix(suffix) if suffix == ".log" else Path(f"{place}{suffix}")
    planted.symlink_to(precious)
    with pytest.raises(NodeError, match="is a symbolic link"):
        connect(config_at(place))
    planted.unlink()
    planted.hardlink_to(precious)
    with pytest.raises(NodeError, match="has another name elsewhere"):
        connect(config_at(place))
    assert precious.read_text() == "precious"


def test_a_folder_that_others_can_write_to_holds_no_socket(tmp_path: Path) -> None:
    place = tmp_path / "open" / "node.sock"
    place.parent.mkdir()
    place.parent.chmod(0o777)
    for attempt in (lambda: connect(config_at(place)), lambda: Node(config_at(place))):
        with pytest.raises(NodeError, match=r"can be written to by every user .*chmod it to 700"):
            attempt()
    assert list(place.parent.iterdir()) == []
    with connect(replace(config_at(place, any_owner=True), tiers=("null://",))) as client:
        assert works(client), "unless that is said, as for a pod's emptyDir"
    end_node(place)
    place = tmp_path / "open" / "mine" / "node.sock"
    place.parent.mkdir(mode=0o700)
    with pytest.raises(NodeError, match=r"who could replace its content; chmod o-w it"):
        connect(config_at(place))
    place.parent.parent.chmod(0o1777)
    prepare_folder(place)


# One node a socket


def test_a_second_node_on_the_same_socket_is_refused_and_names_the_first(node: RunningNode) -> None:
    second = run_kvhold("serve", "--socket", str(node.path), "--ram-bytes", "4MiB")
    assert second.returncode == 1
    assert f"already (pid {node.pid})" in second.stderr
    assert "Traceback" not in second.stderr
    with node.client() as client:
        assert client.status()["pid"] == node.pid


def test_the_socket_of_a_killed_node_is_taken_over(start_node: StartNode) -> None:
    first = start_node()
    first.kill()
    assert first.path.is_socket()
    second = start_node()
    with second.client() as client:
        assert client.status()["pid"] == second.pid


# How it ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_cleanly_under_its_clients(
    node: RunningNode, number: signal.Signals
) -> None:
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64))
    node.process.send_signal(number)
    assert node.process.wait(PATIENT_S) == 0
    assert not node.path.exists()
    with pytest.raises(NodeError):
        client.status()


def test_an_idle_node_ends_but_not_under_a_client(start_node: StartNode) -> None:
    node, client = eventually(lambda: _joined_in_time(start_node("--idle-exit-s", "0.1")))
    with client:
        eventually(lambda: client.status()["uptime_s"] > 1.5)
    assert node.process.wait(PATIENT_S) == 0
    assert not node.path.exists()
    assert "no clients" in node.log.read_text()


def _joined_in_time(node: RunningNode) -> tuple[RunningNode, NodeClient] | None:
    """The node and a client; None if it has ended before the client came, as it does within a
    second.
    """
    try:
        return node, node.client()
    except NodeError:
        node.process.wait(PATIENT_S)
        return None


# Started by engines

RACE = """
import os, sys
from kvhold.core.config import load_config
from kvhold.node import connect
client = {"connect_timeout_s": 60, "call_timeout_s": 60}
config = load_config({"ram_bytes": "4MiB", "node": {"socket": sys.argv[1]}, "client": client})
wait, go = os.pipe()
stay, leave = os.pipe()
children = []
for _ in range(8):
    if pid := os.fork():
        children.append(pid)
        continue
    os.close(go)
    os.close(leave)
    os.read(wait, 1)  # ends for all of them when the last writer has closed
    with connect(config) as client:
        os.write(1, b"%d\\n" % client.status()["pid"])
        os.read(stay, 1)
    os._exit(0)
os.close(go)
sys.stdin.read()
os.close(leave)
assert {os.waitpid(child, 0)[1] for child in children} == {0}
"""


def test_of_engines_that_start_at_once_one_starts_the_node_and_all_join_it(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    command = [sys.executable, "-c", RACE, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environ()
    ) as race:
        assert race.stdout is not None
        pids = {race.stdout.readline().strip() for _ in range(8)}
        assert len(pids) == 1, f"one node, and nobody was turned away: {pids}"
        with NodeClient(path, PATIENT) as client:
            status = client.status()
            assert {str(status["pid"])} == pids
            assert len(status["clients"]) == 9
            race.communicate("")
            assert race.returncode == 0
            client.stop_node()
    eventually(lambda: not _runs(status["pid"]))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("executed")
def test_a_detached_node_listens_where_it_was_told_to_from_where_it_was_started(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "kvhold",
        "serve",
        "--detach",
        "--socket",
        "here.sock",
        "--ram-bytes",
        "4MiB",
    ]
    done = subprocess.run(  # over pipes: it would not end if the node kept them open
        command,
        cwd=tmp_path,
        env=clean_environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"kvhold node ready on {tmp_path}/here.sock: 4.0 MiB in ")
    assert done.stdout.endswith(f"its log is {tmp_path}/here.log\n")
    with NodeClient(tmp_path / "here.sock", PATIENT) as client:
        pid = client.status()["pid"]
        open_there = {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)}
        client.stop_node()
    eventually(lambda: not _runs(pid))
    assert open_there == {"/dev/null", f"{tmp_path}/here.log"}, "nothing of the terminal"
    assert "kvhold node ready" in (tmp_path / "here.log").read_text()


def test_a_detached_node_that_cannot_start_says_so_with_its_exit_status(tmp_path: Path) -> None:
    done = run_kvhold("serve", "--detach", "--socket", str(tmp_path / "s"), "--ram-bytes", "100TiB")
    assert done.returncode == 1
    assert "100.0 TiB does not fit" in done.stderr


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[NodeClient]:
    """A client that started its node by itself."""
    with connect(config_at(tmp_path / "node.sock")) as client:
        yield client
        pid = eventually(lambda: works(client) and client.status()["pid"])
        client.close()
        with NodeClient(tmp_path / "node.sock", PATIENT) as last:
            last.stop_node()
        eventually(lambda: not _runs(pid))


def test_an_engine_starts_its_node_with_its_own_settings_and_another_finds_the_cache_warm(
    joined: NodeClient, tmp_path: Path
) -> None:
    assert joined.status()["arena_bytes"] == 4 << 20
    joined.register(SPACE)
    store(joined, a_prompt(SPACE, 64))
    with connect(config_at(tmp_path / "node.sock")) as other:
        assert other.status()["pid"] == joined.status()["pid"]
        other.register(SPACE)
        assert read(other, a_prompt(SPACE, 64)) == 64


def test_an_engine_has_a_new_node_when_its_own_was_killed(joined: NodeClient) -> None:
    pid = joined.status()["pid"]
    joined.register(SPACE)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not _runs(pid))
    eventually(lambda: works(joined) and joined.status()["pid"] != pid)
    store(joined, a_prompt(SPACE, 64))
    assert read(joined, a_prompt(SPACE, 64)) == 64


def test_a_setting_the_node_cannot_have_is_told_to_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with pytest.raises(NodeError, match=r"ended while starting.*100\.0 TiB does not fit"):
        connect(ram_bytes="100TiB", node={"socket": str(path)})
    assert not path.exists()


def test_a_start_has_a_time_of_its_own_which_is_not_that_of_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    ensure_node(replace(config_at(path), client=ClientConfig(connect_timeout_s=0.01)), path)
    with NodeClient(path, PATIENT) as client:
        client.stop_node()


@pytest.fixture
def start_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Have nodes be started by another program, in the shell's language."""

    def use(script: str) -> None:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))

    return use


def test_a_start_that_takes_too_long_is_given_up(
    start_with: Callable[[str], None], tmp_path: Path
) -> None:
    start_with(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    with pytest.raises(
        NodeError,
        match=r"the node was started, but does not listen yet; its log ",
    ):
        connect(config_at(tmp_path / "node.sock", start_timeout_s=0.05))
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("script", "told"),
    [("echo no more memory; exit 1", "ends with: no more memory"), ("kill -9 $$", "is empty")],
)
def test_a_node_that_dies_while_it_starts_is_known_without_waiting(
    start_with: Callable[[str], None], tmp_path: Path, script: str, told: str
) -> None:
    start_with(script)
    with pytest.raises(NodeError, match=f"ended while starting; its log .*{told}"):
        connect(config_at(tmp_path / "node.sock", start_timeout_s=1e6))


def test_who_waits_for_another_ones_start_gives_up_in_time(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with Path(f"{path}.start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            NodeError, match=r"within node\.start_timeout_s: another process is starting"
        ):
            connect(config_at(path, start_timeout_s=0.05))


@contextmanager
def starting(path: Path) -> Iterator[Future[None]]:
    """An engine that wants a node on `path`."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(ensure_node, config_at(path, start_timeout_s=PATIENT_S), path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """As if a node had `path` that does not listen."""
    with lock_path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_a_node_that_goes_on_starting_after_it_was_given_up_is_waited_for(
    start_with: Callable[[str], None], tmp_path: Path
) -> None:
    path = tmp_path / "node.sock"
    start_with(f"touch {tmp_path}/second; exit 1")
    with locked(path):
        with pytest.raises(
            NodeError, match=r"within node\.start_timeout_s: another node has the socket's lock"
        ):
            connect(config_at(path, start_timeout_s=0.05))
        with starting(path) as engine, listening(path):
            engine.result()
    assert not (tmp_path / "second").exists()


def test_who_looks_whether_there_is_a_node_keeps_none_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.sock"
    lock_path(path).touch()
    with lock_path(path).open("rb") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr(
            "kvhold.node.socket_lock.time.sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN)
        )
        SocketLock(path).close()


def test_who_starts_a_node_too_many_waits_for_the_first(
    start_with: Callable[[str], None], tmp_path: Path
) -> None:
    path, pid = tmp_path / "node.sock", tmp_path / "pid"
    start_with(
        f"echo $$ > {pid}; while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo a node "
        "is running already; exit 1"
    )
    with starting(path) as engine:
        second = int(eventually(lambda: pid.exists() and pid.read_text()))
        with locked(path):
            (tmp_path / "go").touch()
            eventually(lambda: not _runs(second))
            with listening(path):
                engine.result()


def test_a_client_is_closed_without_waiting_for_the_node_it_would_have(
    start_with: Callable[[str], None], start_node: StartNode, tmp_path: Path
) -> None:
    node = start_node()
    client = connect(config_at(node.path, start_timeout_s=1e6))
    start_with(f"echo $$ > {tmp_path}/pid; exec sleep 600")
    node.kill()
    with pytest.raises(NodeError):
        client.status()
    pid = int(eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    client.close()
    assert not client._keeper.is_alive()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_where_engines_may_not_start_a_node_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="no node runs on"):
        connect(config_at(tmp_path / "node.sock", autostart=False))
    assert list(tmp_path.iterdir()) == []
