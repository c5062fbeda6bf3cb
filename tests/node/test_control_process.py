"""The API as the node's child: started, restarted, and ended with it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhold.cli.own_api import ApiError, ask_api
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.setting import apply
from kvhold.node.control_process import ControlProcess
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually, run_kvhold

pytest.importorskip("aiohttp")


@pytest.fixture
def start(tmp_path: Path, start_node: Callable[..., RunningNode]) -> Callable[..., RunningNode]:
    def start(*arguments: str, **settings: str) -> RunningNode:
        file = tmp_path / "kvhold.toml"
        lines = {"in_node": "true", "listen": '"127.0.0.1:0"'} | settings
        text = "".join(f"{name} = {value}\n" for name, value in lines.items())
        file.write_text(f"[control]\n{text}")
        return start_node("--config", str(file), *arguments)

    return start


def api_of(node: RunningNode) -> Any:
    with node.client() as client:
        return client.status()["control"]


def address_of(node: RunningNode) -> str:
    return str(eventually(lambda: api_of(node)["address"]))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def answers(node: RunningNode) -> bool:
    try:
        return bool(ask_api("GET", "/v1/status", socket=str(node.path))["pid"] == node.pid)
    except ApiError:
        return False


def test_it_answers_and_ends_with_the_node(
    start: Callable[..., RunningNode], tmp_path: Path
) -> None:
    folder = tmp_path / "a folder with spaces"
    folder.mkdir()
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o600)
    node = start(tenant_read_token_files=f'{{acme = "{folder}/token"}}')
    assert "http://127.0.0.1:" in address_of(node)
    assert answers(node)
    api = api_of(node)
    assert (api["restarts"], api["last_fault"]) == (0, "")
    assert os.getpriority(os.PRIO_PROCESS, api["pid"]) >= 10
    told = run_kvhold("status", "--socket", str(node.path)).stdout
    assert f"API       on {api['address']}" in told
    doctor = run_kvhold("doctor", "--json", KVHOLD_NODE_SOCKET=str(node.path))
    assert doctor.returncode == 0 and "its API on " in doctor.stdout, doctor.stdout
    with node.client() as client:
        client.stop_node()
    assert node.process.wait(PATIENT_S) == 0
    assert not is_running(api["pid"])
    assert not node.path.with_name("control.sock").exists()


def test_a_killed_one_starts_again(start: Callable[..., RunningNode]) -> None:
    node = start()
    address_of(node)
    before = api_of(node)["pid"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: api_of(node)["restarts"])
    address_of(node)
    after = api_of(node)
    assert after["pid"] != before and after["last_fault"].startswith("exit status -9")
    assert answers(node)
    told = run_kvhold("status", "--socket", str(node.path)).stdout
    assert "; 1 restarts, exit status -9" in told


def test_it_ends_with_a_node_that_was_killed(start: Callable[..., RunningNode]) -> None:
    node = start()
    address_of(node)
    pid = api_of(node)["pid"]
    os.kill(node.pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid))
    assert not node.path.with_name("control.sock").exists()


def test_one_that_cannot_start_leaves_the_node_to_its_engines(
    start: Callable[..., RunningNode],
) -> None:
    node = start(listen='"0.0.0.0:0"')
    fault = eventually(lambda: api_of(node)["last_fault"])
    assert "exit status 1" in fault and "control.read_token_file" in fault
    with node.client() as client:
        client.register(SPACE)
    doctor = run_kvhold("doctor", "--json", KVHOLD_NODE_SOCKET=str(node.path))
    [finding, *_] = json.loads(doctor.stdout)
    assert doctor.returncode == 1 and "its API does not run" in str(finding["says"])


def test_it_is_no_client_that_an_idle_node_waits_for(start: Callable[..., RunningNode]) -> None:
    node = start("--idle-exit-s", "3", history_interval_s="0.1")
    assert node.process.wait(PATIENT_S) == 0


def test_it_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = apply(Config(), {"control": {"in_node": True}}, source="test")
    monkeypatch.setattr("kvhold.node.control_process.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvhold\[control\]'"):
        ControlProcess(config, tmp_path / "node.sock")
