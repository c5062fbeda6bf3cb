from pathlib import Path

from kvhold_lab.demo.blend import BlendDemoResult
from kvhold_lab.demo.report import make_figure

_BAR_COLUMNS = 40


def render_blend(result: BlendDemoResult) -> str:
    figures, permit = result.as_json(), result.permit
    full_s, tokens = figures["full_ttft_s"], result.prompt_tokens
    lines = [f"Time to first token (TTFT): {_title(result)}, medians of {figures['runs']}", ""]
    for label, seconds in (("full prefill", full_s), ("blend", figures["blended_ttft_s"])):
        share = seconds / full_s
        bar = "█" * max(1, round(share * _BAR_COLUMNS))
        lines.append(f"  {label:<12}  {seconds:7.3f} s  {share:6.1%}  {bar}")
    low, high = (100 * value for value in (permit.f1_low, permit.f1_high))
    lines += [
        "",
        f"  recomputed  {result.recomputed:.1%} of the tokens, by {permit.selector}",
        f"  reused      {figures['reused_tokens']:,} of {tokens:,}, from prompts in another order",
        (
            f"  permit      F1 {permit.f1:.3f}, in full {permit.f1_full:.3f} ({low:+.1f} to "
            f"{high:+.1f} points) on {permit.prompts} prompts; this demo allows "
            f"{100 * result.max_f1_loss:g} points"
        ),
        f"  canary      KL {result.canary_kl:.2g} nats, of one more prompt",
        "",
        "  The five answers, as numbers:",
        f"  {'expected':<12}  {'in full':<12}  blended",
    ]
    for one in result.answers:
        said = (" ".join(map(str, part)) for part in (one.expected, one.full, one.blended))
        lines.append("  " + "  ".join(f"{part:<12}" for part in said).rstrip())
    return "\n".join(lines)


def draw_blend(result: BlendDemoResult, path: Path) -> None:
    """Raises ClickException without matplotlib."""
    figures = result.as_json()
    figure = make_figure(9, 3.2)
    figure.suptitle(f"Blend: {_title(result)}", fontsize=10)
    times, shares = figure.subplots(1, 2)
    seconds = [figures["full_ttft_s"], figures["blended_ttft_s"]]
    bars = times.bar(["full prefill", "blend"], seconds, color=["#9aa5b1", "#2a9d8f"])
    times.bar_label(bars, labels=[f"{one:.3f} s" for one in seconds], padding=3)
    times.set_ylim(0, 1.2 * max(seconds))
    times.set_ylabel("time to first token, seconds")
    left = 0.0
    for label, share, colour in (
        ("recomputed", result.recomputed, "#c44536"),
        ("reused", figures["reused_tokens"] / result.prompt_tokens, "#2a9d8f"),
    ):
        shares.barh([0], [share], 0.4, left=left, color=colour, label=f"{label} {share:.1%}")
        left += share
    shares.set_xlim(0, 1)
    shares.set_ylim(-0.8, 0.8)
    shares.set_yticks([])
    shares.set_xlabel("share of the prompt's tokens")
    permit = figures["permit"]
    shares.set_title(
        f"F1 of {permit['prompts']} prompts: {permit['f1']:.3f}, in full {permit['f1_full']:.3f}",
        fontsize=9,
    )
    shares.legend(loc="upper center", ncols=2, frameon=False)
    for axes in (times, shares):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _title(result: BlendDemoResult) -> str:
    return (
        f"five documents in a new order, {result.prompt_tokens:,} tokens, "
        f"{result.num_parameters / 1e6:.1f}M parameters, transformers"
    )
