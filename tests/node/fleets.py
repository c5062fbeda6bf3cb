"""Nodes that serve each other, and what their clients see, for tests."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.keys import Namespace
from kvhold.node import NodeClient
from kvhold.testing.cache import read
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# so that a busy machine does not give a tier up
PATIENT = {"get_timeout_s": PATIENT_S, "answer_timeout_s": PATIENT_S, "probe_timeout_s": 5.0}
PATIENT_PAIRS = "&".join(f"{name}={value}" for name, value in PATIENT.items())


def peers(*ports: int, **options: object) -> str:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    pairs = "&".join(f"{name}={value}" for name, value in (PATIENT | options).items())
    return f"peers://{hosts}?{pairs}"


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[RunningNode] = []

    def start(
        self,
        name: str,
        *tiers: str,
        port: int | None = None,
        channel: str = "",
        serving: Mapping[str, object] | None = None,
        **more: Any,
    ) -> RunningNode:
        """A node that serves peers on `port`, if given, over these tiers."""
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
        listen = "[peers]\n"
        if port is not None:
            listen += f'listen = "127.0.0.1:{port}"\n'
        if channel:
            listen += f'channel = "{channel}"\n'
        for key, value in (serving or {}).items():
            listen += f"{key} = {json.dumps(value)}\n"
        path = self.folder / f"{name}-{len(self.nodes)}.toml"
        path.write_text(f"tiers = {json.dumps(list(tiers))}\n{settings}{listen}")
        self.nodes.append(
            RunningNode(
                self.folder / f"{name}.sock",
                "--config",
                str(path),
            )
        )
        return self.nodes[-1]


@pytest.fixture
def fleet(nothing_is_left: None, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for node in fleet.nodes:
        node.close()


def joined(node: RunningNode, namespace: Namespace = SPACE) -> NodeClient:
    client = node.client()
    client.register(namespace)
    return client


def port_of(node: RunningNode) -> int:
    found = re.search(r"peers on 127\.0\.0\.1:(\d+)", node.ready)
    assert found is not None, node.ready
    return int(found[1])


def tier_of(client: NodeClient) -> Any:
    return client.status()["tiers"][-1]


def served(client: NodeClient) -> Any:
    return client.status()["served_peers"]


def peer_of(client: NodeClient) -> Any:
    [peer] = tier_of(client)["followed_peers"]["peers"]
    return peer


def reason_of(client: NodeClient, prompt: Any) -> Any:
    with client.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        return hit.reason


def found_tokens(client: NodeClient, prompt: Any) -> int:
    with client.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        return hit.num_tokens


def eventually_read(client: NodeClient, prompt: Any) -> None:
    """Wait until the other node's events have come, then compare every byte."""
    eventually(lambda: read(client, prompt) == prompt.num_tokens)
