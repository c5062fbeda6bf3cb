"""Nodes that follow each other, in a network that can be cut."""

import json
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold_lab.bench.relay import RelayedNetwork
from kvhold_lab.bench.servers import serve_command
from kvhold_lab.bench.switched_hosts import SwitchedHosts
from kvhold_lab.servers.base import free_port

_RAM_BYTES = 32 << 20
_PORT = 7711
_STOP_S = 20.0
_TIER_OPTIONS = "answer_timeout_s=1&forget_s=5&probe_timeout_s=2&insecure=true"


class FleetNetwork(Protocol):
    kind: str

    def enter(self, number: int) -> tuple[str, ...]: ...

    def listens(self, number: int) -> str: ...

    def peers(self, number: int) -> list[str]: ...

    def split(self, side: Collection[int]) -> None:
        """From the other nodes."""

    def mend(self) -> None: ...

    def forget(self, number: int) -> bool:
        """Lose its connections silently. False: impossible here."""


class _Namespaces:
    kind = "namespaces"

    def __init__(self, hosts: SwitchedHosts, nodes: int) -> None:
        self._hosts = hosts
        self._nodes = nodes
        self.enter, self.split, self.mend = hosts.enter, hosts.split, hosts.mend

    def listens(self, number: int) -> str:
        return f"{self._hosts.address(number)}:{_PORT}"

    def peers(self, number: int) -> list[str]:
        return [self.listens(peer) for peer in range(self._nodes)]

    def forget(self, _: int) -> bool:
        return False


class _Relays:
    kind = "relays"

    def __init__(self, network: RelayedNetwork, nodes: int) -> None:
        self._ports = [free_port() for _ in range(nodes)]
        self._links = {
            (source, target): network.link(("127.0.0.1", self._ports[target]))
            for source in range(nodes)
            for target in range(nodes)
            if source != target
        }

    def enter(self, _: int) -> tuple[str, ...]:
        return ()

    def listens(self, number: int) -> str:
        return f"127.0.0.1:{self._ports[number]}"

    def peers(self, number: int) -> list[str]:
        return [
            f"127.0.0.1:{link.port}"
            for (source, _), link in self._links.items()
            if source == number
        ]

    def split(self, side: Collection[int]) -> None:
        for (source, target), link in self._links.items():
            if (source in side) != (target in side):
                link.cut()

    def mend(self) -> None:
        for link in self._links.values():
            link.mend()

    def forget(self, number: int) -> bool:
        for pair, link in self._links.items():
            if number in pair:
                link.forget()
        return True


@contextmanager
def namespaces_network(nodes: int) -> Iterator[FleetNetwork]:
    """Raises NoSecondHost."""
    with SwitchedHosts(nodes) as hosts:
        yield _Namespaces(hosts, nodes)


@contextmanager
def relays_network(nodes: int) -> Iterator[FleetNetwork]:
    with RelayedNetwork() as network:
        yield _Relays(network, nodes)


class SoakNode:
    def __init__(self, number: int, network: FleetNetwork, folder: Path, token: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._enter = network.enter(number)
        self.socket = folder / "node.sock"
        peers = ",".join(network.peers(number))
        settings = {"listen": network.listens(number), "token_file": str(token), "insecure": True}
        (folder / "kvhold.toml").write_text(
            f"tiers = {json.dumps([f'peers://{peers}?{_TIER_OPTIONS}&token_file={token}'])}\n"
            "[peers]\n"
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._baseline: int | None = None

    def start(self) -> None:
        command = serve_command("--socket", str(self.socket), "--ram-bytes", str(_RAM_BYTES))
        command += ["--config", str(self._folder / "kvhold.toml")]
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith("KVHOLD_")
        } | {"XDG_STATE_HOME": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._enter, *command], stdout=subprocess.PIPE, stderr=log, env=environ
            )
        self._started_s, self._baseline = time.monotonic(), None

    def wait_until_ready(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as said:
            if b" ready on " not in said.readline():
                raise RuntimeError(f"the node did not start: {self.log[-2000:]}")

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def client(self, config: ClientConfig, name: str) -> NodeClient:
        return NodeClient(self.socket, config, name=name)

    def own_bytes(self) -> int:
        """Resident, without the arena."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        [kilobytes] = re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(kilobytes) << 10

    def take_baseline(self, warm_s: float) -> None:
        if self._baseline is None and time.monotonic() - self._started_s >= warm_s:
            self._baseline = self.own_bytes()

    def growth(self) -> int | None:
        """None: without a baseline."""
        return None if self._baseline is None else self.own_bytes() - self._baseline

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self.kill()
