"""Connections before their login, and log lines about strangers.

At a network's limit, its oldest connection is closed; at the total limit, the oldest of the largest
network. One event loop.
"""

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Connection = TypeVar("Connection")

MOST = 256
MOST_OF_NETWORK = 64
_LINES = 20
_PERIOD_S = 60.0


class Logins(Generic[Connection]):
    def __init__(self, *, most: int = MOST, most_of_network: int = MOST_OF_NETWORK) -> None:
        self._most = most
        self._most_of_network = most_of_network
        self._networks: dict[str, dict[Connection, None]] = {}
        self._network_of: dict[Connection, str] = {}

    def __len__(self) -> int:
        return len(self._network_of)

    def add(self, connection: Connection, network: str) -> Connection | None:
        """Return the connection to close."""
        victim = None
        own = self._networks.get(network, {})
        if len(own) >= self._most_of_network:
            victim = next(iter(own))
        elif len(self) >= self._most:
            largest: dict[Connection, None] = max(self._networks.values(), key=len)
            victim = next(iter(largest))
        if victim is not None:
            self.remove(victim)
        self._networks.setdefault(network, {})[connection] = None
        self._network_of[connection] = network
        return victim

    def remove(self, connection: Connection) -> None:
        network = self._network_of.pop(connection, None)
        if network is not None:
            del self._networks[network][connection]
            if not self._networks[network]:
                del self._networks[network]


class StrangersLog:
    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._since_s = clock()
        self._num_lines = 0
        self._num_silent = 0

    def refused(self, host: str, reason: str) -> None:
        now_s = self._clock()
        if now_s - self._since_s >= _PERIOD_S:
            if self._num_silent:
                self._log.warning(
                    "refused %d more clients in the last %.0f s",
                    self._num_silent,
                    now_s - self._since_s,
                )
            self._since_s, self._num_lines, self._num_silent = now_s, 0, 0
        self._num_lines += 1
        if self._num_lines <= _LINES:
            self._log.warning("refused a client from %s: %s", host, reason)
        else:
            self._num_silent += 1
