import json
from dataclasses import asdict
from pathlib import Path

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of
from kvhold.core.status import MEMORY
from kvhold.core.tags import parse_tag
from kvhold.node import NodeClient
from kvhold.node.namespaces import find_digest
from kvhold.node.operator_calls import TagClear


@click.command()
@click.argument("namespace", metavar="[NAMESPACE]", default="")
@click.option("--all", "everything", is_flag=True, help="Forget all namespaces.")
@click.option("--tag", metavar="NAME=VALUE", default="", help="Forget namespaces with this tag.")
@click.option(
    "--tier",
    default="",
    help="Forget only there: a tier's name, as in `kvhold status`, or ram for memory.",
)
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
    tag: str,
    tier: str,
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
    is_prompt = (tokens, text, tokenizer) != (None, None, None)
    what = [bool(namespace), everything, bool(tag)].count(True)
    if what > 1 or (not what and (is_prompt or not tier)):
        raise click.UsageError("give a NAMESPACE, --tag or --all")
    if is_prompt and (not namespace or tier):
        raise click.UsageError("give a NAMESPACE with the prompt, and no --tier")
    if only_end and not is_prompt:
        raise click.UsageError("--only-end needs a prompt: --tokens FILE or --text TEXT")
    prompt = tokens_of(tokens, text, tokenizer) if is_prompt else None
    pair = parse_tag(tag) if tag else None
    with connect(socket, "kvhold clear") as client:
        if pair is not None:
            _tell(client.clear_tagged(*pair, tier=tier), tag, tier, as_json)
            return
        digest, removed = _clear(client, namespace, prompt, only_end, tier)
    if as_json:
        click.echo(json.dumps({"namespace": digest.hex(), "chunks": removed}))
    else:
        click.echo(_describe(removed, tier))


def _clear(
    client: NodeClient, namespace: str, prompt: list[int] | None, only_end: bool, tier: str
) -> tuple[bytes, int]:
    if prompt is not None:
        query = query_of(client, namespace, prompt)
        return query.namespace, client.clear_prompt(query, only_end=only_end)
    digest = find_digest(client, namespace) if namespace else None
    return digest or b"", client.clear(digest, tier=tier)


def _describe(removed: int, tier: str) -> str:
    if tier == MEMORY:
        return f"forgot {removed} chunks in memory"
    if tier:
        return f"tier {tier} forgets its chunks; what is left, in the background"
    return f"forgot {removed} chunks in memory; the tiers forget theirs in the background"


def _tell(cleared: TagClear, tag: str, tier: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(cleared)))
        return
    click.echo(f"{cleared.namespaces} namespaces with {tag}: {_describe(cleared.chunks, tier)}")
    if cleared.unknown or cleared.forgotten:
        click.echo(
            f"kvhold: the tags of {cleared.unknown} namespaces in memory and "
            f"{cleared.forgotten} earlier ones are not known; they stay",
            err=True,
        )
    for name in cleared.unlisted_tiers:
        click.echo(
            f"kvhold: tier {name} may have namespaces that only other hosts have met; clear "
            "there, too",
            err=True,
        )
