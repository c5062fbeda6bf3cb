"""Network namespaces on one switch.

with SwitchedHosts(8) as hosts:
    hosts.split({3, 5})    # reach only each other
    hosts.mend()
"""

import os
import shutil
from collections.abc import Collection
from contextlib import ExitStack, suppress
from itertools import count
from typing import Self

from kvhold_lab.bench.second_host import (
    PREFIX,
    NoSecondHost,
    remove_those_of_ended_runs,
    run_ip,
)

_WHOLE, _SIDE = "whole", "side"
_numbers = count()


class SwitchedHosts:
    """Entering it raises NoSecondHost."""

    def __init__(self, hosts: int) -> None:
        self._name = f"{PREFIX}{os.getpid()}x{next(_numbers)}"
        self._hosts = hosts
        self._made = ExitStack()

    def enter(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._host(number))

    def address(self, number: int) -> str:
        return f"10.215.0.{number + 1}"

    def split(self, side: Collection[int]) -> None:
        for number in side:
            self._plug(number, _SIDE)

    def mend(self) -> None:
        for number in range(self._hosts):
            self._plug(number, _WHOLE)

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            raise NoSecondHost("the program ip is not installed here (apt-get install iproute2)")
        remove_those_of_ended_runs()
        with ExitStack() as made:
            self._add_namespace(made, self._name)
            for bridge in (_WHOLE, _SIDE):
                self._in_switch("link", "add", bridge, "type", "bridge")
                self._in_switch("link", "set", bridge, "up")
            for number in range(self._hosts):
                self._add_host(made, number)
            self._made = made.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._made.close()

    def _add_host(self, made: ExitStack, number: int) -> None:
        host, port = self._host(number), f"port{number}"
        self._add_namespace(made, host)
        self._in_switch(
            *("link", "add", port, "type", "veth"), *("peer", "name", "eth0", "netns", host)
        )
        run_ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            run_ip("-n", host, "link", "set", interface, "up")
        self._plug(number, _WHOLE)
        self._in_switch("link", "set", port, "up")

    def _add_namespace(self, made: ExitStack, name: str) -> None:
        run_ip("netns", "add", name)
        made.callback(_remove, name)

    def _plug(self, number: int, bridge: str) -> None:
        self._in_switch("link", "set", f"port{number}", "master", bridge)

    def _in_switch(self, *arguments: str) -> None:
        run_ip("-n", self._name, *arguments)

    def _host(self, number: int) -> str:
        return f"{self._name}h{number}"


def _remove(name: str) -> None:
    with suppress(NoSecondHost):
        run_ip("netns", "del", name)
