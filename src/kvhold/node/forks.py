"""After a fork, the child gives this process's clients new locks."""

import os
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from kvhold.node.client import NodeClient

_clients: "WeakSet[NodeClient]" = WeakSet()


def remember(client: "NodeClient") -> None:
    _clients.add(client)


def clients_of_process() -> "list[NodeClient]":
    return list(_clients)


def _renew_locks() -> None:
    for client in clients_of_process():
        client.renew_locks_in_child()


os.register_at_fork(after_in_child=_renew_locks)
