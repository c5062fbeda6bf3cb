import json
from pathlib import Path

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of


@click.command()
@click.argument("namespace")
@prompt_options
@socket_option
@json_option
def command(
    namespace: str,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    socket: str | None,
    as_json: bool,
) -> None:
    """Begin to load a prompt's KV from lower tiers into memory.

    NAMESPACE is its digest from `kvhold names`, or the first digits. `kvhold lookup` shows the
    cached part.
    """
    prompt_tokens = tokens_of(tokens, text, tokenizer)
    with connect(socket, "kvhold prefetch") as client:
        client.prefetch(query_of(client, namespace, prompt_tokens))
    if as_json:
        click.echo(json.dumps({"tokens": len(prompt_tokens), "begun": True}))
    else:
        click.echo(f"the node loads the cached part of {len(prompt_tokens)} tokens")
