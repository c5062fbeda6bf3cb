import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from kvhold.cli.options import Size
from kvhold.tiers.policies import POLICIES
from kvhold_lab.bench.load.prompts import FIRST_ID, VOCAB_SIZE
from kvhold_lab.bench.load.report import Gates
from kvhold_lab.options import Function, Number, OutputFile, default_option, plot_option

COUNT = click.IntRange(0)
SECONDS = Number(0)
FACTOR = Number(0, min_open=True)
INPUT = click.Path(path_type=Path, exists=True, dir_okay=False)


def _header(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and re.fullmatch(r"[A-Za-z0-9-]+", value) is None:
        raise click.BadParameter(f"{value!r} must be a header's name, such as x-user-id")
    return value


@dataclass(frozen=True)
class Common:
    base_url: str | None
    model: str | None
    api: str
    api_key_env: str
    prompts: str
    first_token_id: int
    vocab_size: int
    seed: int
    ignore_eos: bool
    extra_body: str
    user_header: str | None
    timeout_s: float
    connect_timeout_s: float
    prewarm: int
    progress_s: float
    json_file: Path | None
    plot: Path | None
    html: Path | None
    expect_max_errors: int | None
    serve_demo: str | None
    demo_context: int
    demo_ram: int
    demo_disk: int | None
    compare_policy: tuple[str, ...]


_OPTIONS = (
    click.option(
        "--base-url",
        help="URL of the server, as for OpenAI clients, such as http://localhost:8000/v1.",
    ),
    click.option("--model", help="Name of the model. [default: the server's only one]"),
    default_option(
        "--api", "completions", "The API that is called.", click.Choice(["completions", "chat"])
    ),
    click.option(
        "--api-key-env",
        default="OPENAI_API_KEY",
        show_default=True,
        help="Environment variable with the server's key, if it needs one.",
    ),
    click.option(
        "--prompts",
        type=click.Choice(["tokens", "text"]),
        help="Prompts of token ids or of words. [default: tokens; with --api chat: text]",
    ),
    default_option("--first-token-id", FIRST_ID, "First token id that may be drawn.", COUNT),
    default_option(
        "--vocab-size", VOCAB_SIZE, "End of the token ids; at most the model's vocabulary."
    ),
    default_option(
        "--seed", 0, "Seed of the texts; texts of a new seed are not cached yet.", COUNT
    ),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=True,
        help="Ask for answers of full length, as vLLM and SGLang can. [default: yes]",
    ),
    click.option(
        "--extra-body", default="{}", help="JSON object with more fields for each request."
    ),
    click.option(
        "--user-header",
        callback=_header,
        help="Header that tells a router the user of multi-round-qa, such as x-user-id.",
    ),
    default_option("--timeout-s", 600.0, "Time limit for a whole answer.", FACTOR),
    default_option("--connect-timeout-s", 10.0, "Time limit for a connection.", FACTOR),
    default_option("--prewarm", 5, "Short requests at the beginning, which do not count.", COUNT),
    default_option(
        "--progress-s", 30.0, "Time between reports of progress without a terminal.", FACTOR
    ),
    click.option(
        "--json",
        "json_file",
        type=OutputFile(),
        help="Write a line of JSON for each request, and one with the summary.",
    ),
    plot_option("the times, such as load.png"),
    click.option("--html", type=OutputFile(), help="Write an HTML page with all results."),
    click.option("--expect-max-errors", type=COUNT, help="Exit with 1 if more requests fail."),
    click.option(
        "--serve-demo",
        type=click.Choice(["tiny", "small", "mid"]),
        help="Start vLLM with kvhold and a small random model, instead of --base-url.",
    ),
    default_option(
        "--demo-context",
        8_192,
        "Most tokens of a prompt and its answer, for --serve-demo.",
        click.IntRange(1_024, 32_768),
    ),
    default_option("--demo-ram", "1GiB", "kvhold's memory, for --serve-demo.", Size()),
    click.option(
        "--demo-disk",
        type=Size(),
        help="A disk tier below it, in the folder of temporary files, with the policy of the "
        "memory. [default: none]",
    ),
    click.option(
        "--compare-policy",
        multiple=True,
        type=click.Choice(list(POLICIES)),
        help="Start a demo server with this policy; name two or more, to compare them.",
    ),
)
_GAINS = (
    click.option(
        "--expect-ttft-gain",
        type=FACTOR,
        help="Exit with 1 if the mean TTFT of warm requests is not shorter by this factor.",
    ),
    click.option(
        "--expect-latency-gain",
        type=FACTOR,
        help="Exit with 1 if the time per request of the warm round is not shorter by this factor.",
    ),
)


def with_gains(function: Function) -> Function:
    @functools.wraps(function)
    def call(**given: Any) -> None:
        gates = Gates(given.pop("expect_ttft_gain"), given.pop("expect_latency_gain"))
        function(gates=gates, **given)

    return with_options(_GAINS)(call)


def with_common(function: Function) -> Function:
    @functools.wraps(function)
    def call(**given: Any) -> None:
        function(Common(**{field.name: given.pop(field.name) for field in fields(Common)}), **given)

    return with_options(_OPTIONS)(call)


def with_options(
    options: tuple[Callable[[Function], Function], ...],
) -> Callable[[Function], Function]:
    return lambda function: functools.reduce(
        lambda made, option: option(made), reversed(options), function
    )
