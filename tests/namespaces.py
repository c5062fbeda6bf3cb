"""Hosts that share nothing but a network: network namespaces of this machine, with a veth pair.

    with two_hosts() as (first, second):      # skips the test where this is not permitted
        RunningNode(path, under=first.enter)  # a process on that host
        first.link_down(); first.link_up(); first.limit("20mbit")

The namespaces are removed at the end, also those of a test run that was killed.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests.programs import needed_program

_PREFIX = "kvt"
_numbers = count()


@dataclass(frozen=True)
class Host:
    """name: of the namespace, and of the interface in it"""

    name: str
    address: str

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before a command that runs on this host."""
        return ("ip", "netns", "exec", self.name)

    def limit(self, rate: str) -> None:
        """Limit what the host sends, such as to "20mbit"."""
        rules = ("rate", rate, "burst", "128kb", "latency", "200ms")
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", self.name, "root", "tbf", *rules)

    def link_down(self) -> None:
        """Lose what is sent in either direction. Connections stay open."""
        _run("ip", "-n", self.name, "link", "set", self.name, "down")

    def link_up(self) -> None:
        _run("ip", "-n", self.name, "link", "set", self.name, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    for program in ("ip", "tc"):
        needed_program(program)
    _remove_those_of_ended_runs()
    number = next(_numbers)
    names = [f"{_PREFIX}{os.getpid()}x{number}{letter}" for letter in "ab"]
    hosts = [Host(name, f"10.213.{number % 250}.{at}") for at, name in enumerate(names, 1)]
    with ExitStack() as made:
        for host in hosts:
            try:
                _run("ip", "netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
            made.callback(_run, "ip", "netns", "del", host.name)
        first, second = names
        _run(
            *("ip", "-n", first, "link", "add", first, "type", "veth"),
            *("peer", "name", second, "netns", second),
        )
        for host in hosts:
            _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.name)
            for interface in ("lo", host.name):
                _run("ip", "-n", host.name, "link", "set", interface, "up")
        yield hosts[0], hosts[1]


def _remove_those_of_ended_runs() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, pid in re.findall(rf"^({_PREFIX}(\d+)x\d+[ab])\b", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
