import base64
import io
from collections.abc import Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvhold_lab.bench.load.metrics import by_group
from kvhold_lab.bench.load.report import Summary, notes, tables
from kvhold_lab.bench.load.work import COLD, WARM, Result
from kvhold_lab.bench.rows import needing

with needing("'kvhold[lab]'"):
    from matplotlib.figure import Figure

_COLORS = {COLD: "#6c7a89", WARM: "#2a9d8f"}
_OTHERS = ("#2a9d8f", "#c44536", "#e9a03b", "#4a6fa5", "#7d5ba6", "#8c6d46", "#222222", "#9aa5b1")
_MOST_POINTS = 200_000

_STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; }
body { padding: 0 1rem; color: #1c2733; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #dde3e9; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f4f6f8; padding: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere; }"""


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    _figure(results, title).savefig(path, dpi=150)


def write_page(summary: Summary, results: Sequence[Result], title: str, path: Path) -> None:
    picture = io.BytesIO()
    _figure(results, title).savefig(picture, format="png", dpi=130)
    encoded = base64.b64encode(picture.getvalue()).decode()
    arguments = msgspec.json.format(msgspec.json.encode(summary.arguments)).decode()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy"',
        """ content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">""",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *(f"<h2>{escape(name)}</h2>{_table(rows)}" for name, rows in tables(summary)),
        *(f"<p>{escape(note)}</p>" for note in notes(summary)),
        f'<img alt="times of the requests" src="data:image/png;base64,{encoded}">',
        f"<h2>arguments</h2><pre>{escape(arguments)}</pre></body></html>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _table(rows: list[list[str]]) -> str:
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _figure(results: Sequence[Result], title: str) -> Figure:
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    figure.suptitle(title, parse_math=False)
    over_time, over_length, spread, between = figure.subplots(2, 2).flat
    groups = by_group([result for result in results if result.reply.error is None])
    for number, (name, own) in enumerate(groups.items()):
        color = _COLORS.get(name, _OTHERS[number % len(_OTHERS)])
        timed = [(result, result.reply.ttft_s) for result in own if result.reply.ttft_s is not None]
        over_time.plot(
            [result.started_s for result, _ in timed],
            [ttft_s for _, ttft_s in timed],
            ".",
            color=color,
            label=name,
        )
        lengths = [
            (result.reply.input_tokens, ttft_s)
            for result, ttft_s in timed
            if result.reply.input_tokens is not None
        ]
        over_length.plot(
            [length for length, _ in lengths], [ttft_s for _, ttft_s in lengths], ".", color=color
        )
        _steps(spread, [ttft_s for _, ttft_s in timed], color)
        _steps(between, list(chain.from_iterable(result.reply.gaps_s for result in own)), color)
    _dress(over_time, "time since the start, s", "time to first token, s")
    _dress(over_length, "prompt, tokens", "time to first token, s")
    _dress(spread, "time to first token, s", "share of requests")
    _dress(between, "time between tokens, s", "share of tokens")
    spread.set_ylim(0, 1.02)
    between.set_ylim(0, 1.02)
    over_time.set_ylim(bottom=0)
    over_length.set_ylim(bottom=0)
    if groups:
        figure.legend(loc="outside lower center", ncols=8, frameon=False)
    return figure


def _steps(axes: Any, values: Sequence[float], color: str) -> None:
    if len(values):
        shares = np.linspace(0, 1, min(len(values), _MOST_POINTS) + 1)[1:]
        axes.step(
            np.quantile(values, shares, method="inverted_cdf"), shares, where="post", color=color
        )


def _dress(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
