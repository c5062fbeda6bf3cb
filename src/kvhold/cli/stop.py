import click

from kvhold.cli.options import socket_option
from kvhold.core.config import load_config
from kvhold.node import NodeClient
from kvhold.node.paths import socket_path


@click.command()
@socket_option
def command(socket: str | None) -> None:
    """End this host's node; its memory cache is lost.

    Engines continue, and may start a new node if so configured.
    """
    config = load_config({"node": {"socket": socket}} if socket else {})
    path = socket_path(config.node.socket)
    with NodeClient(path, config.client, name="kvhold stop") as client:
        client.stop_node()
    click.echo(f"stopped the node on {path}")
