import json
import sys
from pathlib import Path

import click
from msgspec.structs import asdict

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of
from kvhold.core.api import CopyProgress
from kvhold.core.sizes import format_size


@click.command()
@click.argument("namespace")
@prompt_options
@click.option(
    "--tier",
    "--to",
    required=True,
    help="A tier's name, as in `kvhold status`; or host: and a peer's, as in `kvhold peers`.",
)
@click.option("--copy", is_flag=True, help="Keep the KV in memory, too.")
@socket_option
@json_option
def command(
    namespace: str,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    tier: str,
    copy: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Move a prompt's KV from memory to a tier or a peer. Return when it is done.

    NAMESPACE is its digest from `kvhold names`, or the first digits. KV in use stays in memory.
    """
    prompt = tokens_of(tokens, text, tokenizer)
    with (
        connect(socket, "kvhold move") as client,
        client.copy(tier, query_of(client, namespace, prompt), drop=not copy) as copying,
    ):
        progress = copying.wait()
    click.echo(json.dumps(asdict(progress), indent=2) if as_json else _describe(progress, tier))
    if progress.stopped or progress.failed:
        why = progress.stopped or f"{tier} did not take {progress.failed} chunks"
        click.echo(f"kvhold: not all was copied: {why}", err=True)
        sys.exit(1)


def _describe(progress: CopyProgress, tier: str) -> str:
    return (
        f"{tier} has {progress.copied} chunks of the prompt ({format_size(progress.bytes)}); "
        f"{progress.dropped} left memory"
    )
