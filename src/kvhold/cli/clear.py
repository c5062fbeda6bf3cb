import json
from pathlib import Path

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of
from kvhold.node import NodeClient
from kvhold.node.namespaces import find_digest


@click.command()
@click.argument("namespace", metavar="[NAMESPACE]", default="")
@click.option("--all", "everything", is_flag=True, help="Forget all namespaces.")
@prompt_options
@click.option(
    "--only-end",
    is_flag=True,
    help="Of a prompt, keep the part that another prompt in memory continues.",
)
@socket_option
@json_option
def command(
    namespace: str,
    everything: bool,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    only_end: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Forget the KV of NAMESPACE in memory, on all writable tiers, and on peers.

    With a prompt, forget only its KV, in memory and on the tiers of this host. Other hosts keep
    theirs.

    NAMESPACE is its digest from `kvhold names`, or the first digits. A tier that is away forgets
    when it is back.
    """
    if bool(namespace) == everything:
        raise click.UsageError("give a NAMESPACE, or --all")
    is_prompt = (tokens, text, tokenizer) != (None, None, None)
    if is_prompt and everything:
        raise click.UsageError("give a NAMESPACE with the prompt")
    if only_end and not is_prompt:
        raise click.UsageError("--only-end needs a prompt: --tokens FILE or --text TEXT")
    prompt = tokens_of(tokens, text, tokenizer) if is_prompt else None
    with connect(socket, "kvhold clear") as client:
        digest, removed = _clear(client, namespace, prompt, only_end)
    if as_json:
        click.echo(json.dumps({"namespace": digest.hex(), "chunks": removed}))
    else:
        click.echo(f"forgot {removed} chunks in memory; the tiers forget theirs in the background")


def _clear(
    client: NodeClient, namespace: str, prompt: list[int] | None, only_end: bool
) -> tuple[bytes, int]:
    if prompt is not None:
        query = query_of(client, namespace, prompt)
        return query.namespace, client.clear_prompt(query, only_end=only_end)
    digest = find_digest(client, namespace) if namespace else None
    return digest or b"", client.clear(digest)
