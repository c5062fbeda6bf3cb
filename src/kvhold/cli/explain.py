import json
import sys
import time

import click
from msgspec import to_builtins

from kvhold.cli.connect import connect
from kvhold.cli.options import socket_option
from kvhold.core.planning import MOST_NAME, BlendReport, Decision, LoadedChunks, SpanReport
from kvhold.core.reasons import REASONS, WHOLE, Reason

_NAMES = {
    "compute": "compute all",
    "memory": "load from memory only",
    "all": "load the whole hit",
    "chosen": "chosen",
}


@click.command()
@click.argument("request_id", metavar="[REQUEST]", default="")
@socket_option
@click.option(
    "--json", "as_json", is_flag=True, help="A JSON array of decisions, the latest first."
)
def command(request_id: str, socket: str | None, as_json: bool) -> None:
    """Explain what became of a request of an engine. Without REQUEST, list the latest.

    REQUEST is the request's id, or a unique part. The node remembers the last 512 lookups, and
    samples of earlier ones. Exits with 1 if none matches.
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
        what = f"of a request {request_id!r}" if request_id else "of any request yet"
        click.echo(f"kvhold: the node remembers no decision {what}", err=True)
        sys.exit(1)


def _line(decision: Decision) -> str:
    return (
        f"{_time(decision)}  {decision.request or '-'}  {_hit(decision)} of {decision.num_tokens} "
        f"tokens: {decision.why or _reason(decision) or 'all found'}"
    )


def _describe(decision: Decision) -> str:
    found = ", ".join(f"{tokens} in {place}" for place, tokens in decision.found.items()) or "none"
    lines = [
        f"request   {decision.request}, at {_time(decision)}",
        (
            f"tokens    {decision.num_tokens} in all, {decision.computed_tokens} in the engine "
            f"already, found: {found}"
        ),
        f"decision  {decision.why or 'not planned'}",
        *([f"missing   {missing}"] if (missing := decision.missing or _reason(decision)) else []),
        *(f"loaded    {_loaded(one)}" for one in decision.loaded),
        *([] if decision.blend is None else _describe_blend(decision.blend)),
    ]
    return "\n".join([*lines, *_describe_plan(decision)])


def _describe_plan(decision: Decision) -> list[str]:
    if decision.blend is not None and not decision.alternatives:
        return []
    lines = [
        "",
        f"{'':25}{'tokens':>8}{'wait s':>10}{'load s':>10}{'compute s':>11}{'in all s':>10}",
    ]
    for name, label in _NAMES.items():
        if one := decision.alternatives.get(name):
            lines.append(_row(label, str(one.num_tokens), one.wait_s, one.load_s, one.compute_s))
    measured = decision.waited_s, decision.load_s, decision.compute_s
    return [*lines, _row("measured", _hit(decision), *measured)]


def _row(
    label: str, tokens: str, wait_s: float, load_s: float | None, compute_s: float | None
) -> str:
    in_all = None if compute_s is None else wait_s + (load_s or 0.0) + compute_s
    seconds = "".join(f"{_seconds(one):>10}" for one in (wait_s, load_s))
    return f"{label:25}{tokens:>8}{seconds}{_seconds(compute_s):>11}{_seconds(in_all):>10}"


def _reason(decision: Decision) -> str:
    return REASONS[Reason(decision.reason)] if decision.reason not in ("", WHOLE) else ""


def _describe_blend(blend: BlendReport) -> list[str]:
    share = 100 * blend.recomputed_tokens / max(1, blend.num_tokens)
    told = f"{blend.result}: {blend.note}" if blend.note else blend.result
    return [
        f"blend     {told}",
        (
            f"kv        {blend.exact_tokens} exact, {blend.reused_tokens} reused, "
            f"{blend.recomputed_tokens} recomputed ({share:.1f} %), by {blend.selector}"
        ),
        *(f"span      {_describe_span(span)}" for span in blend.spans),
    ]


def _describe_span(span: SpanReport) -> str:
    places = [f"{tokens} in {place}" for place, tokens in span.sources.items()]
    parts = [*(places or ["not found"]), *map(_loaded, span.loaded)]
    if span.missing:
        parts.append(f"missing: {span.missing}")
    if span.is_alone:
        parts.append("computed alone")
    return f"{span.start}-{span.end}: {', '.join(parts)}"


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
