"""The network between simulated hosts.

A cut link passes nothing, not even the end of a connection.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from kvhold_lab.simulation.sockets import Network, SimSocket, Touch
from kvhold_lab.simulation.world import World

_LOOK_S = 0.2


class LinkedNetwork(Network):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.touch_of_server: dict[str, Touch] = {}
        self._random = world.random
        self._cut: set[tuple[str, str]] = set()
        self._slow_s: dict[tuple[str, str], float] = {}
        self._off: set[str] = set()
        self._held: list[Callable[[], None]] = []
        self._sockets_of: dict[str, list[SimSocket]] = {}

    def cut(self, sender: str, receiver: str) -> None:
        self._cut.add((sender, receiver))

    def slow_down(self, one: str, other: str, seconds: float) -> None:
        for pair in ((one, other), (other, one)):
            self._slow_s[pair] = seconds

    def heal(self) -> None:
        self._cut.clear()
        self._slow_s.clear()
        self._go_on()

    def power_on(self, host: str) -> None:
        self._off.discard(host)
        self._go_on()

    def leave(self, host: str, *, without_power: bool) -> None:
        if without_power:
            self._off.add(host)
        for sock in self._sockets_of.pop(host, ()):
            if not sock.closed:
                sock.vanish() if without_power else sock.close()

    def break_one(self) -> None:
        living = [
            sock
            for socks in self._sockets_of.values()
            for sock in socks
            if not sock.closed and not sock.peer.closed
        ]
        if living:
            sock = self._random.choice(living)
            sock.reset()
            if self._random.random() < 0.5:
                sock.peer.reset()

    def holds(self, sock: SimSocket, go_on: Callable[[], None]) -> bool:
        if self._passes(sock.host, sock.far_host):
            return False
        self._held.append(go_on)
        return True

    def delay(self, sock: SimSocket) -> float:
        slow_s = self._slow_s.get((sock.host, sock.far_host), 0.0)
        return super().delay(sock) + slow_s * self._random.random()

    async def connect(
        self, address: str, loop: Any, host: str, touch: Touch | None = None
    ) -> SimSocket:
        far = address.rpartition(":")[0]
        while not (self._passes(host, far) and self._passes(far, host)):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        near = await super().connect(address, loop, host, touch)
        near.peer._touch = self.touch_of_server.get(far)
        for sock in (near, near.peer):
            self._sockets_of.setdefault(sock.host, []).append(sock)
        return near

    def _passes(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self._cut and receiver not in self._off

    def _go_on(self) -> None:
        held, self._held = self._held, []
        for go_on in held:
            self.world.later(self.world.delay(0.0003), go_on)
