"""A second host: a network namespace of this machine (root, iproute2), with a veth pair.

It shares the file system. Namespaces of killed runs are removed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvhold.core.errors import KVHoldError

PREFIX = "kvb"
_QUEUE = ("burst", "256kb", "latency", "50ms")


class NoSecondHost(KVHoldError): ...


@dataclass(frozen=True)
class SecondHost:
    """address: of this host in the common network
    here:    the machine's own namespace in it
    """

    name: str
    address: str
    here: str

    @property
    def enter(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@contextmanager
def second_host(mbit_s: float = 0) -> Iterator[SecondHost]:
    """mbit_s: of the network, in each direction; 0: no limit. Raises NoSecondHost."""
    if shutil.which("ip") is None:
        raise NoSecondHost("the program ip is not installed here (apt-get install iproute2)")
    remove_those_of_ended_runs()
    name, network = f"{PREFIX}{os.getpid()}", f"10.214.{os.getpid() % 250}"
    host = SecondHost(name, f"{network}.2", f"{network}.1")
    there, here = f"{name}b", f"{name}a"
    run_ip("netns", "add", name)
    try:
        run_ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        run_ip("addr", "add", f"{host.here}/24", "dev", here)
        run_ip("link", "set", here, "up")
        run_ip("-n", name, "addr", "add", f"{host.address}/24", "dev", there)
        for interface in ("lo", there):
            run_ip("-n", name, "link", "set", interface, "up")
        if mbit_s:
            limit = ("root", "tbf", "rate", f"{mbit_s}mbit", *_QUEUE)
            run_ip("qdisc", "add", "dev", here, *limit, program="tc")
            run_ip("-n", name, "qdisc", "add", "dev", there, *limit, program="tc")
        yield host
    finally:
        for end in (("link", "del", here), ("netns", "del", name)):
            with suppress(NoSecondHost):
                run_ip(*end)


def remove_those_of_ended_runs() -> None:
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for name, pid in re.findall(rf"^({PREFIX}(\d+)\w*)", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            with suppress(NoSecondHost):
                run_ip("netns", "del", name)


def run_ip(*arguments: str, program: str = "ip") -> None:
    try:
        subprocess.run([program, *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise NoSecondHost(f"network namespaces cannot be made here: {said.strip()}") from None
