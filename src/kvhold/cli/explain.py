import json
import sys
import time

import click
from msgspec import to_builtins

from kvhold.cli.connect import connect
from kvhold.cli.options import socket_option
from kvhold.core.planning import MOST_NAME, Decision, LoadedChunks

_NAMES = {
    "compute": "compute all",
    "memory": "load from memory only",
    "all": "load the whole hit",
}


@click.command()
@click.argument("request_id", metavar="[REQUEST]", default="")
@socket_option
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON array of decisions, the latest first."
)
def command(request_id: str, socket: str | None, as_json: bool) -> None:
    """Explain the node's decision for a request of an engine, and its result. Without REQUEST, list
    the latest decisions.

    REQUEST is the request's id, or a unique part. The node remembers the
    last 512 decisions. Exits with 1 if none matches.
    """
    with connect(socket, "kvhold explain") as client:
        decisions = client.explain(request_id[:MOST_NAME])
    if as_json:
        click.echo(json.dumps(to_builtins(decisions, str_keys=True), indent=2))
    elif request_id and len({decision.request for decision in decisions}) == 1:
        click.echo(_describe(decisions[0]))
    elif decisions:
        click.echo("\n".join(map(_line, decisions)))
    if not decisions:
        what = (
            f"of a request {request_id!r}"
            if request_id
            else "of any request yet; engines with rules.plan off make no decisions"
        )
        click.echo(f"kvhold: the node remembers no decision {what}", err=True)
        sys.exit(1)


def _line(decision: Decision) -> str:
    return (
        f"{_time(decision)}  {decision.request}  {_hit(decision)} of {decision.num_tokens} "
        f"tokens: {decision.why}"
    )


def _describe(decision: Decision) -> str:
    found = ", ".join(f"{tokens} in {place}" for place, tokens in decision.found.items()) or "none"
    lines = [
        f"request   {decision.request}, at {_time(decision)}",
        (
            f"tokens    {decision.num_tokens} in all, {decision.computed_tokens} in the engine "
            f"already, found: {found}"
        ),
        f"decision  {decision.why}",
        *([f"missing   {decision.missing}"] if decision.missing else []),
        *(f"loaded    {_loaded(one)}" for one in decision.loaded),
        "",
        f"{'':25}{'tokens':>8}{'wait s':>10}{'load s':>10}{'compute s':>11}{'in all s':>10}",
    ]
    for name, label in _NAMES.items():
        one = decision.alternatives[name]
        lines.append(
            f"{label:25}{one.num_tokens:8}{one.wait_s:10.4f}{one.load_s:10.4f}{one.compute_s:11.4f}{one.total_s:10.4f}"
        )
    chosen = decision.alternatives["chosen"]
    for label, tokens, wait_s, load_s, compute_s in (
        ("chosen", chosen.num_tokens, chosen.wait_s, chosen.load_s, chosen.compute_s),
        ("measured", _hit(decision), decision.waited_s, decision.load_s, decision.compute_s),
    ):
        in_all = "-" if compute_s is None else f"{wait_s + (load_s or 0.0) + compute_s:.4f}"
        lines.append(
            f"{label:25}{tokens:>8}{wait_s:10.4f}{_seconds(load_s):>10}{_seconds(compute_s):>11}{in_all:>10}"
        )
    return "\n".join(lines)


def _loaded(loaded: LoadedChunks) -> str:
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in loaded.chunks]
    one = len(runs) == 1 and "-" not in runs[0]
    return (
        f"{'chunk' if one else 'chunks'} {', '.join(runs)} from {loaded.place}, "
        f"{1000 * loaded.seconds:.1f} ms"
    )


def _hit(decision: Decision) -> str:
    return "(waits)" if decision.hit_tokens is None else str(decision.hit_tokens)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.4f}"


def _time(decision: Decision) -> str:
    return time.strftime("%H:%M:%S", time.localtime(decision.at_s))
