"""`kvhold decompress`."""

import click

from kvhold.cli.compress import CompressOptions, reencode
from kvhold.cli.options import json_option, socket_option


@click.command()
@click.option("--tier", required=True, help="Its name, as `kvhold status` has it.")
@click.option(
    "--codec",
    type=click.Choice(["raw", "lossless"]),
    default="raw",
    show_default=True,
    help="As it is, or smaller and exact.",
)
@click.option(
    "--namespace",
    help="Of this namespace alone: its digest in hex. [default: all that the node knows]",
)
@socket_option
@json_option
def command(
    tier: str, codec: str, namespace: str | None, socket: str | None, as_json: bool
) -> None:
    """Re-encode the chunks of a tier of this host's node without compression, online.

    Returns when it is done.

    Precision that a codec has lost is not restored.
    """
    reencode(codec, CompressOptions(tier, namespace, socket, as_json))
