"""Engines that are forked from a process which has imported vLLM."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold_lab.engines import preloaded
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.preloaded import VARIABLE, ForkedProcess, spawn
from kvhold_lab.engines.process import EngineFailed, LoggedProcess
from kvhold_lab.engines.stepped import environment_for

pytestmark = pytest.mark.vllm

CHILD = "tests.lab.engines.what_it_sees"
PROMPT = list(range(100, 300))


@pytest.fixture(autouse=True)
def preloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture(scope="module")
def model() -> ModelInfo:
    return make_model("tiny")


@pytest.fixture
def engine(model: ModelInfo) -> Iterator[Engine]:
    with Engine(options_for(model, max_model_len=512)) as engine:
        assert isinstance(process_of(engine), ForkedProcess)
        yield engine


def process_of(engine: Engine) -> "ForkedProcess | subprocess.Popen[bytes]":
    assert engine._process is not None
    return engine._process._process


def environment(**others: str) -> dict[str, str]:
    return {**os.environ, **environment_for(2), "KVHOLD_TEST_CODE": "0", **others}


def run(log: Path, given: dict[str, str]) -> tuple[dict[str, Any], int]:
    with log.open("wb") as file:
        process = spawn(CHILD, given, file)
    assert process is not None
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
    with Engine(options_for(model, max_model_len=512)) as other:
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
    assert told["asked"] == "a question\n"
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
        others = [spawn(CHILD, environment(), file) for _ in range(3)]
    told, _ = run(tmp_path / "log", environment())
    assert len(told["open"]) == 3, told["open"]
    for other in others:
        assert other is not None
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


def test_what_vllm_reads_while_it_is_imported_has_a_server_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "log", environment())
    servers = dict(preloaded._servers)
    monkeypatch.setattr(preloaded, "_MOST_SERVERS", len(servers))
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, environment(OMP_NUM_THREADS="1"), file) is None
        assert spawn(CHILD, environment(VLLM_LOGGING_LEVEL="ERROR"), file) is None
    assert preloaded._servers == servers


def test_a_server_that_has_died_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloaded, "_servers", {})
    given = environment(PYTHONPATH="/nowhere", PYTHONHOME="/nowhere")
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, given, file) is None
        assert spawn(CHILD, given, file) is None


def test_without_the_variable_nothing_is_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with (tmp_path / "log").open("wb") as file:
        assert spawn(CHILD, environment(), file) is None
