import json

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import socket_option
from kvhold.control.rows import client_id, client_row
from kvhold.core.sizes import format_size
from kvhold.net.messages import ClientInfo

_OWN_NAME = "kvhold clients"


@click.command()
@socket_option
@click.option("--json", "as_json", is_flag=True, help="A JSON list.")
def command(socket: str | None, as_json: bool) -> None:
    """List the node's clients and their holdings. Exits with 1 if there is no node."""
    with connect(socket, _OWN_NAME) as client:
        clients = [one for one in client.clients() if one.name != _OWN_NAME]
    if as_json:
        click.echo(json.dumps([client_row(one) for one in clients], indent=2))
    else:
        click.echo(as_table(clients))


def as_table(clients: list[ClientInfo]) -> str:
    lines = [
        (
            f"{'ID':6} {'NAME':20} {'PID':>8} {'SILENT':>8} {'HITS':>6} {'LEASES':>6} "
            f"{'WRITES':>6} {'HOLDS':>10}  STATE"
        )
    ]
    for one in clients:
        state = "dead" if not one.alive else "ended, still connected" if one.ended else "alive"
        if one.device:
            state += f", {format_size(one.pinned_bytes)} pinned for a device"
        held = f"{one.hits:6} {one.leases:6} {one.reservations:6} {format_size(one.nbytes):>10}"
        lines.append(
            f"{client_id(one):6} {one.name:20.20} {one.pid:8} {one.silent_s:7.1f}s {held}  {state}"
        )
    return "\n".join(lines)
