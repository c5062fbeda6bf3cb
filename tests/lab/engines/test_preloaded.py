"""Engines that are forked from a process which has imported vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhold_lab.engines import preloaded
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.fork_server import READY, Fork, is_owned
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.preloaded import VARIABLE, ForkedProcess, preloading, spawn
from kvhold_lab.engines.process import EngineFailed, LoggedProcess
from kvhold_lab.engines.stepped import environment_for

pytestmark = pytest.mark.vllm

CHILD = "tests.lab.engines.what_it_sees"
PROMPT = list(range(100, 300))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """That of all tests, unless they run without."""
    given = Path(os.environ.get(VARIABLE, ""))
    if given.is_absolute():
        yield given
    else:
        with preloading() as made:
            yield made


@pytest.fixture(autouse=True)
def preloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(folder))


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return make_model("tiny")


@pytest.fixture
def engine(model: ModelInfo) -> Iterator[Engine]:
    with Engine(options_for(model, max_model_len=512, num_threads=1)) as engine:
        assert isinstance(process_of(engine), ForkedProcess)
        yield engine


def process_of(engine: Engine) -> "ForkedProcess | subprocess.Popen[bytes]":
    assert engine._process is not None
    return engine._process._process


def environment(**others: str) -> dict[str, str]:
    return {**os.environ, **environment_for(1), "KVHOLD_TEST_CODE": "0", **others}


def run(log: Path, given: dict[str, str]) -> tuple[dict[str, Any], int]:
    with log.open("wb") as file:
        process = spawn(CHILD, ["one", "two"], given, file)
    assert process is not None
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(b"a question\n")
        told = json.loads(process.stdout.read())
    assert told["pid"] == process.pid
    return told, process.wait(timeout=60)


def test_a_forked_engine_answers_as_another_process_does(
    model: ModelInfo, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = engine.generate(PROMPT, max_tokens=8).token_ids
    monkeypatch.delenv(VARIABLE)
    with Engine(options_for(model, max_model_len=512, num_threads=1)) as other:
        assert isinstance(process_of(other), subprocess.Popen)
        assert other.generate(PROMPT, max_tokens=8).token_ids == answered


def test_an_engine_ends_as_another_process_does(engine: Engine) -> None:
    process = process_of(engine)
    engine.stop()
    assert process.returncode == 0


def test_a_killed_engine_is_told_from_one_that_ended(engine: Engine) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="died by SIGKILL"):
        engine.generate(PROMPT, max_tokens=1)


def test_a_program_sees_its_own_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, cores = Path.cwd(), os.sched_getaffinity(0)
    log = tmp_path / "log"
    run(log, environment())  # in this folder, which the server stays in
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVHOLD_TEST_GONE", raising=False)
    given = environment(KVHOLD_TEST_CODE="7", XDG_STATE_HOME="/elsewhere")
    os.sched_setaffinity(0, {min(cores)})
    try:
        told, code = run(log, given)
    finally:
        os.sched_setaffinity(0, cores)
    assert (told["arguments"], told["asked"]) == (["one", "two"], "a question\n")
    assert told["environment"] == given
    assert (told["folder"], told["cores"]) == (str(tmp_path), [min(cores)])
    assert told["group"] == told["pid"]
    assert told["has_vllm"]
    assert told["frozen"] > 100_000
    assert log.read_text() == "to the log\n"
    assert code == 7
    assert here != tmp_path


def test_a_program_has_no_descriptor_of_the_server_or_of_other_programs(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        others = [spawn(CHILD, [], environment(), file) for _ in range(3)]
    told, _ = run(tmp_path / "log", environment())
    assert len(told["open"]) == 3, told["open"]
    for other in others:
        assert other is not None
        assert other.stdin is not None
        assert other.stdout is not None
        with other.stdin, other.stdout:
            pass
        assert isinstance(other.wait(timeout=60), int)


def test_a_process_that_nobody_has_waited_for_is_killed_with_its_group(tmp_path: Path) -> None:
    process = LoggedProcess(
        "the child",
        ["python", "-m", CHILD],
        log_path=tmp_path / "log",
        environment=environment(),
        pipes=True,
        preloads=True,
    )
    assert isinstance(process._process, ForkedProcess)
    assert process.is_alive
    process.kill()
    assert process._process.returncode == -signal.SIGKILL


def test_without_pipes_what_it_prints_is_in_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        process = spawn(CHILD, [], environment(), file, pipes=False)
    assert process is not None
    assert (process.stdin, process.stdout) == (None, None)
    assert process.wait(timeout=60) == 0
    first, told = (tmp_path / "log").read_text().splitlines()
    assert first == "to the log"
    assert json.loads(told)["asked"] == ""


def test_what_vllm_reads_while_it_is_imported_has_a_server_of_its_own(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "log", environment())
    servers = set(folder.glob("*.sock"))
    monkeypatch.setattr(preloaded, "_MOST_SERVERS", len(servers))
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, [], environment(OMP_NUM_THREADS="3"), file) is None
        assert spawn(CHILD, [], environment(VLLM_LOGGING_LEVEL="ERROR"), file) is None
    assert set(folder.glob("*.sock")) == servers


def test_a_server_that_has_died_is_done_without(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "_servers", {})
    monkeypatch.setattr(preloaded, "_MOST_SERVERS", 99)
    servers = set(folder.glob("*.sock"))
    given = environment(PYTHONPATH="/nowhere", PYTHONHOME="/nowhere")
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, [], given, file) is None
        assert spawn(CHILD, [], given, file) is None
    assert set(folder.glob("*.sock")) == servers


@pytest.mark.parametrize("value", ["", "0", None])
def test_without_a_folder_nothing_is_preloaded(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, [], environment(), file) is None


_WITHOUT_VLLM = """
import sys
from kvhold_lab.engines import fork_server
fork_server._MODULES = ()
sys.exit(fork_server.main())
"""


def test_several_processes_fork_from_one_server_which_ends_with_its_owner(tmp_path: Path) -> None:
    path = str(tmp_path / "server")
    with preloading() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        owner = folder / "owner"
        assert is_owned(owner)
        listening.bind(path)
        listening.listen()
        arguments = [str(listening.fileno()), str(owner)]
        server = subprocess.Popen(
            [sys.executable, "-c", _WITHOUT_VLLM, *arguments], pass_fds=[listening.fileno()]
        )
        forked = [fork_alone(path, tmp_path / f"log{number}") for number in range(2)]
        assert len(set(forked)) == 2
        for number, pid in enumerate(forked):
            told = json.loads((tmp_path / f"log{number}").read_text().splitlines()[-1])
            assert (told["pid"], told["group"]) == (pid, pid)
            assert len(told["open"]) == 3, told["open"]
        assert server.poll() is None
    assert not is_owned(owner)
    assert server.wait(timeout=60) == 0


def fork_alone(path: str, log: Path) -> int:
    """Fork `CHILD` over a connection of its own, wait for its end, and return its number."""
    with log.open("wb") as file, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(path)
        assert client.recv(64) == READY
        ours, theirs = os.pipe()
        given = [os.open(os.devnull, os.O_RDONLY), file.fileno(), file.fileno(), theirs]
        cores = sorted(os.sched_getaffinity(0))
        fork = Fork(CHILD, [], environment(), str(Path.cwd()), cores)
        socket.send_fds(client, [msgspec.json.encode(fork)], given)
        for descriptor in (given[0], theirs):
            os.close(descriptor)
        pid = int(client.recv(64))
        with os.fdopen(ours, "rb") as end:
            assert end.read() == b"0"
    return pid
