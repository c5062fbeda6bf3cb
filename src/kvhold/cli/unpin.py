import json

import click

from kvhold.cli.options import json_option, socket_option
from kvhold.cli.own_api import ask_api


@click.command()
@click.argument("number", type=click.IntRange(min=1))
@socket_option
@json_option
def command(number: int, socket: str | None, as_json: bool) -> None:
    """End a pin, by its number from `kvhold pin`."""
    pin = ask_api("DELETE", f"/v1/pins/{number}", socket=socket)
    click.echo(
        json.dumps(pin, indent=2)
        if as_json
        else f"pin {number} ended; its {pin['num_tokens']} tokens may be evicted"
    )
