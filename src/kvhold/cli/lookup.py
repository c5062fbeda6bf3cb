import json
from pathlib import Path

import click

from kvhold.cli.connect import connect
from kvhold.cli.options import json_option, socket_option
from kvhold.cli.prompts import prompt_options, query_of, tokens_of


@click.command()
@click.argument("namespace")
@prompt_options
@click.option("--prefetch", is_flag=True, help="Also load it from lower tiers into memory.")
@socket_option
@json_option
def command(
    namespace: str,
    tokens: Path | None,
    text: str | None,
    tokenizer: str | None,
    prefetch: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Show how much of a prompt is cached, where, and why not more.

    NAMESPACE is its digest from `kvhold names`, or the first digits. The lookup does not count as a
    use.
    """
    prompt_tokens = tokens_of(tokens, text, tokenizer)
    with connect(socket, "kvhold lookup") as client:
        query = query_of(client, namespace, prompt_tokens)
        if prefetch:
            client.prefetch(query)
        with client.lookup(query, uses="none") as hit:
            found = {
                "tokens": len(prompt_tokens),
                "num_tokens": hit.num_tokens,
                "sources": dict(hit.sources),
                "reason": None if hit.reason is None else str(hit.reason),
            }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"{found['num_tokens']} of {found['tokens']} tokens are cached")
    for place, count in hit.sources.items():
        click.echo(f"  {count} in {place}")
    if hit.num_tokens < len(prompt_tokens):
        click.echo(f"the hit ends there: {hit.reason} (docs/metrics.md has each reason)")
