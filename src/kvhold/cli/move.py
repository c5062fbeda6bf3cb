import json
import sys
from pathlib import Path

import click
from msgspec.structs import asdict

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of
from kvhold.core.api import Copying, CopyProgress
from kvhold.core.sizes import format_size
from kvhold.core.status import MEMORY
from kvhold.node import NodeClient
from kvhold.node.namespaces import find_digest


@click.command()
@click.argument("namespace")
@prompt_options
@click.option("--all", "everything", is_flag=True, help="All KV of the namespace, no prompt.")
@click.option(
    "--from",
    "source",
    default=MEMORY,
    show_default=True,
    help="A tier's name, as in `kvhold status`; ram is memory.",
)
@click.option(
    "--to",
    "--tier",
    "tier",
    required=True,
    help="The same; or host: and a peer's name, as in `kvhold peers`.",
)
@click.option("--copy", is_flag=True, help="Keep the KV where it was, too.")
@socket_option
@json_option
def command(
    namespace: str,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    everything: bool,
    source: str,
    tier: str,
    copy: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Move a prompt's KV between memory, tiers and peers. Return when it is done.

    NAMESPACE is its digest from `kvhold names`, or the first digits. KV leaves its place when it is
    in the other one. KV in use stays in memory.
    """
    if everything and (tokens, text, tokenizer) != (None, None, None):
        raise click.UsageError("give a prompt, or --all")
    prompt = None if everything else tokens_of(tokens, text, tokenizer)

    def begin(client: NodeClient) -> Copying:
        if prompt is None:
            digest = find_digest(client, namespace)
            return client.copy(tier, None, drop=not copy, source=source, namespace=digest)
        query = query_of(client, namespace, prompt)
        return client.copy(tier, query, drop=not copy, source=source)

    with connect(socket, "kvhold move") as client, begin(client) as copying:
        progress = copying.wait()
    if as_json:
        click.echo(json.dumps(asdict(progress), indent=2))
    else:
        click.echo(_describe(progress, source, tier))
    if progress.stopped or progress.failed:
        why = progress.stopped or f"{tier} did not take {progress.failed} chunks"
        click.echo(f"kvhold: not all was copied: {why}", err=True)
        sys.exit(1)


def _describe(progress: CopyProgress, source: str, tier: str) -> str:
    return (
        f"{tier} has {progress.copied} chunks ({format_size(progress.bytes)}); "
        f"{progress.dropped} left {'memory' if source == MEMORY else source}"
    )
