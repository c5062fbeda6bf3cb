"""A node that an engine started belongs to nobody: engines that end kill all their descendants."""

import os
from pathlib import Path

import psutil

from kvhold.core.config import load_config
from kvhold.node import connect
from kvhold.node.start import _as_environ, end_node
from tests.node.nodes import PATIENT_S


def test_a_node_started_by_an_engine_is_not_its_child(tmp_path: Path) -> None:
    patient = {"connect_timeout_s": PATIENT_S, "call_timeout_s": PATIENT_S}
    path = tmp_path / "node.sock"
    with connect(ram_bytes="4MiB", node={"socket": str(path)}, client=patient) as client:
        node = psutil.Process(client.status()["pid"])
        assert node.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
        assert os.getsid(node.pid) != os.getsid(0)
    end_node(path)  # a client that lives would start another node
    node.wait(timeout=PATIENT_S)


def test_a_started_node_gets_the_settings_of_its_engine() -> None:
    config = load_config({"blend": {"separator": [3, 4]}}, environ={})
    assert load_config(environ=_as_environ(config)) == config
