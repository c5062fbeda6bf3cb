import json
from pathlib import Path
from typing import Any

import click

from kvhold.cli.options import json_option, socket_option
from kvhold.cli.own_api import ask_api
from kvhold.cli.prompts import prompt_options, tokens_of
from kvhold.core.sizes import format_size


@click.command()
@click.argument("namespace", metavar="[NAMESPACE]", default="")
@prompt_options
@click.option(
    "--ttl-s", type=float, default=600.0, show_default=True, help="Seconds; at most a week."
)
@click.option("--owner", default="", help="A name for the list of pins.")
@socket_option
@json_option
def command(
    namespace: str,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    ttl_s: float,
    owner: str,
    socket: str | None,
    as_json: bool,
) -> None:
    """Keep a prompt's KV in memory for a time. Without NAMESPACE, list the pins.

    NAMESPACE is its digest from `kvhold names`, or the first digits. A running `kvhold control`
    holds the pins, which also end with the node. `kvhold unpin` ends one.
    """
    if not namespace:
        if (tokens, text, tokenizer) != (None, None, None):
            raise click.UsageError("give a NAMESPACE with the prompt")
        pins: list[Any] = ask_api("GET", "/v1/pins", socket=socket)["pins"]
        click.echo(json.dumps(pins, indent=2) if as_json else _as_table(pins))
        return
    order = {
        "namespace": namespace,
        "tokens": tokens_of(tokens, text, tokenizer),
        "ttl_s": ttl_s,
        "owner": owner,
    }
    pin = ask_api("POST", "/v1/pins", body=order, socket=socket)
    click.echo(
        json.dumps(pin, indent=2)
        if as_json
        else f"pin {pin['number']} keeps {pin['num_tokens']} tokens in memory "
        f"({format_size(pin['bytes'])}) for {ttl_s:g} s"
    )


def _as_table(pins: list[Any]) -> str:
    if not pins:
        return "there are no pins"
    lines = [f"{'PIN':>6} {'TOKENS':>9} {'HOLDS':>10} {'LEFT':>9}  {'NAMESPACE':16}  OWNER"]
    lines += (
        f"{pin['number']:6} {pin['num_tokens']:9} {format_size(pin['bytes']):>10} "
        f"{pin['left_s']:8.0f}s  {pin['namespace'][:16]}  {pin['owner']}"
        for pin in pins
    )
    return "\n".join(lines)
