import json
import time

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.control.rows import namespace_facts, namespace_row
from kvhold.core.naming import unpack
from kvhold.core.sizes import format_size
from kvhold.net.messages import KnownSpace
from kvhold.node.namespaces import find_namespace

_SHOWN = 16


@click.command()
@click.argument("one", metavar="[A]", default="")
@click.argument("two", metavar="[B]", default="")
@socket_option
@json_option
def command(one: str, two: str, socket: str | None, as_json: bool) -> None:
    """List the namespaces that the node knows; show the facts of A; or compare the facts of A and
    B.

    Engines share KV if they have the same namespace. A and B are digests, or their first digits if
    those are unique. Exits with 1 for an unknown namespace.
    """
    with connect(socket, "kvhold names") as client:
        if not one:
            spaces, others, other_bytes = client.names()
            click.echo(
                _list_json(spaces, others, other_bytes)
                if as_json
                else _list(spaces, others, other_bytes)
            )
            return
        chosen = [find_namespace(client, digits) for digits in (one, two) if digits]
    facts = [unpack(space.description).facts for space in chosen]
    if not two:
        click.echo(
            json.dumps(namespace_facts(chosen[0]), indent=2) if as_json else _describe(chosen[0])
        )
        return
    names = sorted(
        name
        for name in facts[0].keys() | facts[1].keys()
        if facts[0].get(name) != facts[1].get(name)
    )
    differences = {name: [found.get(name) for found in facts] for name in names}
    if as_json:
        click.echo(
            json.dumps(
                {
                    "namespaces": [namespace_row(space) for space in chosen],
                    "differences": differences,
                },
                indent=2,
            )
        )
    else:
        click.echo(_compare(chosen, differences))


def _list_json(spaces: list[KnownSpace], others: int, other_bytes: int) -> str:
    return json.dumps(
        {
            "namespaces": [namespace_row(space) for space in spaces],
            "others": others,
            "other_bytes": other_bytes,
        },
        indent=2,
    )


def _list(spaces: list[KnownSpace], others: int, other_bytes: int) -> str:
    lines = [_line(space) for space in spaces] or ["no engine has registered a namespace here"]
    if others > 0:
        lines.append(
            f"{others} more, of requests with an adapter, a salt or tags, or of earlier engines: "
            f"{format_size(other_bytes)}"
        )
    return "\n".join(lines)


def _line(space: KnownSpace) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(space.at_s))
    title = unpack(space.description).title
    return (
        f"{space.digest.hex()[:_SHOWN]}  {format_size(space.nbytes):>10}  {at}  {space.client} "
        f" {title}"
    )


def _describe(space: KnownSpace) -> str:
    facts = unpack(space.description).facts
    return "\n".join(
        [_line(space), "", *(f"{name} = {text}" for name, text in sorted(facts.items()))]
    )


def _compare(spaces: list[KnownSpace], differences: dict[str, list[str | None]]) -> str:
    lines = [f"{label}  {_line(space)}" for label, space in zip("AB", spaces, strict=True)]
    if not differences:
        same = spaces[0].digest == spaces[1].digest
        return "\n".join(
            [
                *lines,
                "",
                "the same namespace"
                if same
                else "they differ in a salt or a tenant, which are not shown",
            ]
        )
    for name, texts in differences.items():
        lines += [
            "",
            name,
            *(
                f"  {label}  {'-' if text is None else text}"
                for label, text in zip("AB", texts, strict=True)
            ),
        ]
    lines += [
        "",
        (
            "To share KV in spite of a difference, add its name to the setting `share`, if you "
            'know that it changes no KV: see "Names".'
        ),
    ]
    return "\n".join(lines)
