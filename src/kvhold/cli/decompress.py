import click

from kvhold.cli.compress import CompressOptions, reencode
from kvhold.cli.options import json_option, socket_option


@click.command()
@click.option("--tier", required=True, help="Name of the tier, as in `kvhold status`.")
@click.option(
    "--codec",
    type=click.Choice(["raw", "lossless"]),
    default="raw",
    show_default=True,
    help="raw: uncompressed; lossless: smaller, and exact.",
)
@click.option(
    "--namespace",
    help="Only chunks of this namespace: its digest in hex. [default: all that the node knows]",
)
@socket_option
@json_option
def command(
    tier: str, codec: str, namespace: str | None, socket: str | None, as_json: bool
) -> None:
    """Re-encode the chunks of a tier of this host's node without compression, online.

    Returns when it is done. Precision that a codec has lost is not restored.
    """
    reencode(codec, CompressOptions(tier, namespace, socket, as_json))
