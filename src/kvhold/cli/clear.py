import json

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.node.namespaces import find_digest


@click.command()
@click.argument("namespace", metavar="[NAMESPACE]", default="")
@click.option("--all", "everything", is_flag=True, help="Forget all namespaces.")
@socket_option
@json_option
def command(namespace: str, everything: bool, socket: str | None, as_json: bool) -> None:
    """Forget the KV of NAMESPACE in memory, on all writable tiers, and on peers.

    NAMESPACE is its digest from `kvhold names`, or the first digits. A tier that is away forgets
    when it is back.
    """
    if bool(namespace) == everything:
        raise click.UsageError("give a NAMESPACE, or --all")
    with connect(socket, "kvhold clear") as client:
        digest = find_digest(client, namespace) if namespace else None
        removed = client.clear(digest)
    if as_json:
        click.echo(json.dumps({"namespace": digest.hex() if digest else "", "chunks": removed}))
    else:
        click.echo(f"forgot {removed} chunks in memory; the tiers forget theirs in the background")
