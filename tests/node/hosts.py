"""A node on each of two hosts that share nothing but a network, with one list of peers.

with two_hosts() as pair, Hosts(folder, pair) as hosts: hosts.nodes
"""

import json
from pathlib import Path
from typing import Self

from tests.namespaces import Host
from tests.node.nodes import PATIENT_S, RunningNode

PORT = 7711


class Hosts:
    def __init__(self, folder: Path, hosts: tuple[Host, Host], *arguments: str) -> None:
        """arguments: of both nodes"""
        self.hosts = hosts
        token = folder / "token"
        token.write_text("a token of the tests\n")
        token.chmod(0o600)
        login = f"token_file={token}&insecure=true&answer_timeout_s=3&get_timeout_s={PATIENT_S}"
        login += "&probe_timeout_s=5"
        listed = ",".join(f"{host.address}:{PORT}" for host in hosts)
        self.nodes: list[RunningNode] = []
        for host in hosts:
            settings = folder / f"{host.name}.toml"
            settings.write_text(
                f"tiers = {json.dumps([f'peers://{listed}?{login}'])}\n"
                f'[peers]\nlisten = "{host.address}:{PORT}"\n'
                f"token_file = {json.dumps(str(token))}\ninsecure = true\n"
            )
            path = folder / f"{host.name}.sock"
            self.nodes.append(
                RunningNode(path, "--config", str(settings), *arguments, under=host.enter)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()
