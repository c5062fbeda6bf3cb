"""A real vLLM caches the KV of adapters that were trained while it runs, and never that of another
state of their files.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvhold.node.start import end_node
from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.engines.process import LoggedProcess
from kvhold_lab.engines.stepped import environment_for

pytestmark = pytest.mark.vllm


def run(folder: Path, *socket: str) -> dict[str, Any]:
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.vllm.adapter_engine",
        str(make_checkpoint("llama-lora").path),
        str(folder),
        *socket,
    ]
    log = folder / "log"
    process = LoggedProcess(
        "the engine", command, log_path=log, environment=environment_for(1), preloads=True
    )
    try:
        assert process.wait(500), process.log_tail()
    finally:
        process.kill()
    lines = log.read_text().splitlines()
    line = next((line for line in lines if line.startswith('{"loaded')), "")
    assert line, "\n".join(lines[-40:])
    said: dict[str, Any] = json.loads(line)
    return said


def test_adapters_that_are_newer_than_the_engine_are_cached_once_its_workers_have_loaded_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    socket = tmp_path / "node.sock"
    try:
        cached = run(tmp_path / "cached", str(socket))
    finally:
        end_node(socket)
    plain = run(tmp_path / "plain")
    assert {name: said["tokens"] for name, said in cached.items()} == {
        name: said["tokens"] for name, said in plain.items()
    }
    assert len({tuple(said["tokens"]) for said in plain.values()}) == 3, (
        "each adapter's answer is its own"
    )

    counts = {
        name: (said["loads"], said["failed_loads"], said["stored_chunks"])
        for name, said in cached.items()
    }
    whole = -(-300 // 64)
    assert counts == {
        "loaded ahead": (0, 0, whole),
        "loaded ahead, again": (1, 0, 0),
        "loaded by its request": (0, 0, whole),
        "loaded by its request, again": (1, 0, 0),
        "evicted and loaded again": (1, 0, 0),
        "changed": (0, 0, 0),
        "changed, again": (0, 0, 0),
        "changed, another number": (0, 0, whole),
        "changed, another number, again": (1, 0, 0),
    }
