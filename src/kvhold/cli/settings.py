import json
from typing import Any

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.node.namespaces import find_digest

_QUOTAS = "namespace_quotas"


@click.command()
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@socket_option
@json_option
def command(changes: tuple[str, ...], socket: str | None, as_json: bool) -> None:
    """Show the settings that a running node may change, or change some, all or none.

    The changes end with the node. A quota is namespace_quotas.NAMESPACE=2GiB; 0 ends it.
    """
    wanted, quotas = _parsed(changes)
    with connect(socket, "kvhold settings") as client:
        if quotas:
            wanted[_QUOTAS] = {
                find_digest(client, digits).hex(): nbytes for digits, nbytes in quotas.items()
            }
        values = client.settings(wanted)
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    of_namespaces = values.pop(_QUOTAS)
    values |= {f"{_QUOTAS}.{digest}": nbytes for digest, nbytes in of_namespaces.items()}
    click.echo("\n".join(f"{name} = {value}" for name, value in values.items()))


def _parsed(changes: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    wanted: dict[str, Any] = {}
    quotas: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not name or not equals:
            raise click.UsageError(f"{change!r}: write NAME=VALUE")
        if name.startswith(f"{_QUOTAS}."):
            quotas[name.removeprefix(f"{_QUOTAS}.")] = value
        else:
            wanted[name] = value
    return wanted, quotas
