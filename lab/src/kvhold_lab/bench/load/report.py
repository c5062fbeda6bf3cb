from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from kvhold_lab.bench.load.counters import Hits
from kvhold_lab.bench.load.metrics import Figures, Gains, Spread, by_group, figures, gains
from kvhold_lab.bench.load.work import Result

NO_COUNTERS = "hit tokens by tier are not known: the server's /metrics has no counters of kvhold"


@dataclass(frozen=True)
class Summary:
    """hits: by phase; None: see `hits_note`"""

    workload: str
    arguments: Mapping[str, Any]
    groups: dict[str, Figures]
    total: Figures
    gains: Gains | None
    hits: dict[str, Hits] | None
    hits_note: str | None
    first_errors: dict[str, str]
    interrupted: bool


@dataclass(frozen=True)
class Gates:
    """Gains are factors."""

    ttft_gain: float | None = None
    latency_gain: float | None = None
    max_errors: int | None = None

    def broken(self, summary: Summary) -> list[str]:
        sentences = []
        for name, least in (("ttft", self.ttft_gain), ("latency", self.latency_gain)):
            if least is None:
                continue
            gain = getattr(summary.gains, name) if summary.gains is not None else None
            if gain is None:
                sentences.append(
                    f"the {name} gain is not known, for no cold or no warm request "
                    f"succeeded; expected at least {least:g}"
                )
            elif gain < least:
                sentences.append(
                    f"the {name} gain of warm requests is {gain:.2f}; expected at least {least:g}"
                )
        num_errors = sum(summary.total.errors.values())
        if self.max_errors is not None and num_errors > self.max_errors:
            sentences.append(f"{num_errors} failed requests; expected at most {self.max_errors}")
        return sentences


def summarise(
    workload: str,
    arguments: Mapping[str, Any],
    results: Sequence[Result],
    hits: dict[str, Hits],
    *,
    interrupted: bool,
) -> Summary:
    groups = {name: figures(own) for name, own in by_group(results).items()}
    first_errors: dict[str, str] = {}
    for result in results:
        if result.reply.error is not None:
            first_errors.setdefault(result.reply.error, result.reply.detail)
    return Summary(
        workload=workload,
        arguments=arguments,
        groups=groups,
        total=figures(results),
        gains=gains(groups),
        hits=hits or None,
        hits_note=None if hits else NO_COUNTERS,
        first_errors=first_errors,
        interrupted=interrupted,
    )


def request_line(result: Result, **more: str) -> bytes:
    reply = result.reply
    itl = Spread.of(reply.gaps_s)
    fields = {
        "type": "request",
        **more,
        "group": result.group,
        **result.labels,
        "started_s": result.started_s,
        "late_s": result.late_s,
        "ttft_s": reply.ttft_s,
        "latency_s": reply.latency_s,
        "itl_mean_s": itl.mean if itl is not None else None,
        "itl_p99_s": itl.p99 if itl is not None else None,
        "input_tokens": reply.input_tokens,
        "cached_tokens": reply.cached_tokens,
        "output_tokens": reply.output_tokens,
        "score": result.score,
        "error": reply.error,
        "detail": reply.detail,
    }
    return msgspec.json.encode(fields) + b"\n"


def summary_line(summary: Summary) -> bytes:
    return msgspec.json.encode({"type": "summary", **asdict(summary)}) + b"\n"


def tables(summary: Summary) -> list[tuple[str, list[list[str]]]]:
    groups = {**summary.groups, **({"all": summary.total} if len(summary.groups) > 1 else {})}
    heading = [
        "requests",
        "errors",
        "requests/s",
        "input tokens",
        "cached",
        "input tokens/s",
        "output tokens",
        "output tokens/s",
    ]
    scored = any(own.score is not None for own in groups.values())
    rows = [["", *heading, *(["score"] if scored else [])]]
    for name, own in groups.items():
        cells = [
            f"{own.requests:,}",
            f"{sum(own.errors.values()):,}",
            f"{own.requests_s:.2f}",
            _count(own.input_tokens),
            _count(own.cached_tokens),
            _count(own.input_tokens_s),
            f"{own.output_tokens:,}",
            f"{own.output_tokens_s:,.1f}",
        ]
        rows.append(
            [
                name,
                *cells,
                *([f"{own.score:.3f}" if own.score is not None else "-"] if scored else []),
            ]
        )
    found = [("throughput", rows)]
    spreads: dict[str, Callable[[Figures], Spread | None]] = {
        "time to first token, s": lambda own: own.ttft_s,
        "between tokens, s": lambda own: own.itl_s,
        "to the last token, s": lambda own: own.latency_s,
        "output tokens/s of a request, after its first": lambda own: own.decode_tokens_s,
        "sent after arrival, s": lambda own: own.late_s,
    }
    for title, pick in spreads.items():
        known = {name: spread for name, own in groups.items() if (spread := pick(own)) is not None}
        if known:
            body = [
                [name, *(f"{value:.4g}" for value in (s.mean, s.p50, s.p90, s.p99))]
                for name, s in known.items()
            ]
            found.append((title, [["", "mean", "p50", "p90", "p99"], *body]))
    if summary.hits is not None:
        tiers = list(dict.fromkeys(tier for hits in summary.hits.values() for tier in hits.by_tier))
        body = [
            [
                name,
                f"{hits.looked_up:,}",
                *(f"{hits.by_tier.get(tier, 0):,}" for tier in tiers),
                _count(hits.loaded),
                _count(hits.own),
            ]
            for name, hits in summary.hits.items()
        ]
        found.append(
            (
                "tokens, by the server's account",
                [["", "looked up", *tiers, "loaded", "engine's own cache"], *body],
            )
        )
    return found


def notes(summary: Summary) -> list[str]:
    lines = []
    if summary.gains is not None:
        lines.append(
            f"warm to cold: TTFT {summary.gains.ttft:.2f} times shorter, time a request "
            f"{summary.gains.latency:.2f} times shorter"
        )
    if summary.hits_note is not None:
        lines.append(summary.hits_note)
    if summary.total.requests and summary.total.cached_tokens is None:
        lines.append(
            "cached tokens are not known: the server does not tell (vLLM does with "
            "--enable-prompt-tokens-details)"
        )
    lines += [
        f"{summary.total.errors[kind]:,} x {kind}, such as: {detail[:300]}"
        for kind, detail in summary.first_errors.items()
    ]
    if summary.interrupted:
        lines.append("interrupted: only the results so far")
    return lines


def render(summary: Summary) -> str:
    return "\n\n".join(
        [*(render_table(title, rows) for title, rows in tables(summary)), "\n".join(notes(summary))]
    ).rstrip()


def render_table(title: str, rows: list[list[str]]) -> str:
    rows = [[title, *rows[0][1:]], *rows[1:]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _count(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None else "-"
