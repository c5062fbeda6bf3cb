from dataclasses import dataclass
from pathlib import Path

from kvhold_lab.demo.pair import PairResult
from kvhold_lab.demo.report import make_figure


@dataclass(frozen=True)
class _PairRow:
    label: str
    one_s: float
    two_s: float


def render_pair(result: PairResult) -> str:
    rows = _rows(result)
    width = max(len(row.label) for row in rows)
    lines = [
        f"Prefill and decode: {_title(result)}, medians of {len(result.one.ttft_s)}",
        "A pause is one between two tokens of a long answer, while prompts of others are computed.",
        "",
        f"  {'':<{width}}  {'one engine':>11}  {'two engines':>11}",
    ]
    lines += [f"  {row.label:<{width}}  {row.one_s:9.4f} s  {row.two_s:9.4f} s" for row in rows]
    lines += [
        f"  {'tokens handed over':<{width}}  {'':>11}  {result.handed_tokens:11,}",
        f"  {'outputs identical':<{width}}  {'':>11}  {'yes' if result.identical else 'NO':>11}",
    ]
    return "\n".join(lines)


def draw_pair(result: PairResult, path: Path) -> None:
    """Raises ClickException without matplotlib."""
    rows = _rows(result)
    figure = make_figure(9, 3.2)
    figure.suptitle(f"Prefill and decode: {_title(result)}")
    for axes, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        bars = axes.bar(
            ["one engine", "two engines"], [row.one_s, row.two_s], color=["#9aa5b1", "#2a9d8f"]
        )
        axes.bar_label(bars, labels=[f"{row.one_s:.4f} s", f"{row.two_s:.4f} s"], padding=3)
        axes.set_ylim(0, 1.2 * max(row.one_s, row.two_s))
        axes.set_title(row.label, fontsize=9)
        axes.set_ylabel("seconds")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _title(result: PairResult) -> str:
    return (
        f"{result.prompt_tokens:,}-token prompts, {result.model.num_parameters / 1e6:.0f}M "
        f"parameters, vLLM on CPU, cores for each engine: {result.threads}"
    )


def _rows(result: PairResult) -> list[_PairRow]:
    def row(label: str, of: str) -> _PairRow:
        return _PairRow(label, result.one.as_json()[of], result.two.as_json()[of])

    return [
        row("time to first token", "ttft_s"),
        row("between tokens", "itl_s"),
        row("longest pause beside prefills", "longest_busy_gap_s"),
    ]
