import re

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import socket_option
from kvhold.control.rows import client_id
from kvhold.core.errors import NodeError
from kvhold.core.sizes import format_size
from kvhold.net.messages import ClientInfo


@click.command()
@click.argument("client", metavar="ID|PID")
@socket_option
def command(client: str, socket: str | None) -> None:
    """End a client by its ID from `kvhold clients` (such as c12), or all clients of the process
    PID.

    The node stops answering the client, and other clients may write the chunks that it had
    reserved. A live process joins again.
    """
    match = re.fullmatch(r"(c?)([1-9][0-9]{0,9})", client)
    if match is None:
        raise click.BadParameter(
            f"{client!r} is neither an ID of `kvhold clients`, such as c12, nor a process id",
            param_hint="ID|PID",
        )
    number = int(match[2])
    with connect(socket, "kvhold kick") as node:
        ended = node.kick(number=number) if match[1] else node.kick(pid=number)
    if not ended:
        raise NodeError(f"the node has no client {client}; `kvhold clients` lists them")
    for one in ended:
        click.echo(f"ended {client_id(one)} ({one.name}, pid {one.pid}){_what_is_left(one)}")


def _what_is_left(client: ClientInfo) -> str:
    if not client.leases and not client.reservations:
        return ""
    return (
        f": its {format_size(client.nbytes)} in leases and reservations are freed when it closes "
        "its connection or dies"
    )
