import asyncio
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from kvhold.cli.options import Size
from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import (
    FIRST_ID,
    VOCAB_SIZE,
    Content,
    Prompts,
    TextPrompts,
    TokenPrompts,
)
from kvhold_lab.bench.load.report import (
    Gates,
    Summary,
    render,
    request_line,
    summarise,
    summary_line,
)
from kvhold_lab.bench.load.work import Result, Workload
from kvhold_lab.bench.load.workloads import (
    LongDocQA,
    MultiDocQA,
    MultiRoundQA,
    Rag,
    Replay,
    TtftSweep,
)
from kvhold_lab.bench.load.workloads.dataset import SCORES, read_conversations, read_dataset
from kvhold_lab.bench.load.workloads.long_doc_qa import Command
from kvhold_lab.bench.load.workloads.multi_doc_qa import Sampling
from kvhold_lab.bench.load.workloads.ttft_sweep import LENGTHS
from kvhold_lab.bench.rows import needing
from kvhold_lab.options import PICTURES, Number, OutputFile

if TYPE_CHECKING:
    from kvhold_lab.bench.load.client import Endpoint

Function = Callable[..., None]

_SEPARATOR_TEXT, _SEPARATOR_TOKENS = " # # ", 4
_POSITIVE = click.IntRange(1)
_COUNT = click.IntRange(0)
_SECONDS = Number(0)
_FACTOR = Number(0, min_open=True)
_INPUT = click.Path(path_type=Path, exists=True, dir_okay=False)


def _lengths(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise click.BadParameter(
            f"{value!r} must be numbers of 1 or more with commas between them, such as "
            "256,1024,4096"
        )
    return lengths


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


_OPTIONS = (
    click.option(
        "--base-url",
        help="The server's, as OpenAI clients call it, such as http://localhost:8000/v1.",
    ),
    click.option("--model", help="Name of the model. [default: the server's only one]"),
    click.option(
        "--api",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        show_default=True,
        help="Which of the two.",
    ),
    click.option(
        "--api-key-env",
        default="OPENAI_API_KEY",
        show_default=True,
        help="Environment variable that has the server's key, if any.",
    ),
    click.option(
        "--prompts",
        type=click.Choice(["tokens", "text"]),
        help="Token ids or words. [default: tokens; of --api chat: text]",
    ),
    click.option(
        "--first-token-id",
        type=_COUNT,
        default=FIRST_ID,
        show_default=True,
        help="Token ids are drawn from this one ...",
    ),
    click.option(
        "--vocab-size",
        type=_POSITIVE,
        default=VOCAB_SIZE,
        show_default=True,
        help="... up to this one; at most the model's.",
    ),
    click.option(
        "--seed",
        type=_COUNT,
        default=0,
        show_default=True,
        help="Another one gives other texts, so that nothing is cached yet.",
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
    click.option(
        "--timeout-s", type=_FACTOR, default=600.0, show_default=True, help="For a whole answer."
    ),
    click.option(
        "--connect-timeout-s",
        type=_FACTOR,
        default=10.0,
        show_default=True,
        help="For a connection.",
    ),
    click.option(
        "--prewarm",
        type=_COUNT,
        default=5,
        show_default=True,
        help="Short requests before, which do not count.",
    ),
    click.option(
        "--progress-s",
        type=_FACTOR,
        default=30.0,
        show_default=True,
        help="How often progress is told where there is no terminal.",
    ),
    click.option(
        "--json",
        "json_file",
        type=OutputFile(),
        help="Write a line of JSON for each request, and one with the summary.",
    ),
    click.option("--plot", type=OutputFile(*PICTURES), help="Draw the times, such as load.png."),
    click.option("--html", type=OutputFile(), help="Write a page with everything, in one file."),
    click.option("--expect-max-errors", type=_COUNT, help="Exit with 1 if more requests fail."),
    click.option(
        "--serve-demo",
        type=click.Choice(["tiny", "small", "mid"]),
        help="Start vLLM with kvhold and a model made here, instead.",
    ),
    click.option(
        "--demo-context",
        type=click.IntRange(1_024, 32_768),
        default=8_192,
        show_default=True,
        help="Its longest prompt and answer.",
    ),
    click.option(
        "--demo-ram", type=Size(), default="1GiB", show_default=True, help="Its kvhold's memory."
    ),
)
_GAINS = (
    click.option(
        "--expect-ttft-gain",
        type=_FACTOR,
        help="Exit with 1 if warm requests' mean TTFT is not so many times shorter.",
    ),
    click.option(
        "--expect-latency-gain",
        type=_FACTOR,
        help="Exit with 1 if the warm round is not so many times faster, a request.",
    ),
)


def _with_common(function: Function) -> Function:
    """Give a command the options of all workloads, as one `Common`."""

    @functools.wraps(function)
    def call(**given: Any) -> None:
        function(Common(**{field.name: given.pop(field.name) for field in fields(Common)}), **given)

    return _with(_OPTIONS)(call)


def _with(options: tuple[Callable[[Function], Function], ...]) -> Callable[[Function], Function]:
    return lambda function: functools.reduce(
        lambda made, option: option(made), reversed(options), function
    )


@click.group()
def command() -> None:
    """A workload against any OpenAI-compatible server: times, rates, hits, errors.

    Ctrl-C ends a run with its results so far. Exits with 1 if an expectation is not met, or if no
    request succeeded.
    """


@command.command("long-doc-qa")
@click.option("--documents", type=_POSITIVE, default=8, show_default=True, help="How many.")
@click.option(
    "--document-tokens", type=_POSITIVE, default=20_000, show_default=True, help="Of each."
)
@click.option(
    "--question-tokens",
    type=_COUNT,
    default=32,
    show_default=True,
    help="Of each question; 0: the very same prompt again.",
)
@click.option(
    "--output-tokens", type=_POSITIVE, default=100, show_default=True, help="Of each answer."
)
@click.option(
    "--repeats",
    type=_POSITIVE,
    default=2,
    show_default=True,
    help="Questions to each document in the warm round.",
)
@click.option(
    "--order",
    type=click.Choice(get_args(Command)),
    default="random",
    show_default=True,
    help="Of the warm round.",
)
@click.option(
    "--max-in-flight", type=_POSITIVE, default=20, show_default=True, help="Requests at a time."
)
@click.option(
    "--pause-s", type=_SECONDS, default=0.0, show_default=True, help="Between the rounds."
)
@_with(_GAINS)
@_with_common
def long_doc_qa(
    common: Common,
    *,
    expect_ttft_gain: float | None,
    expect_latency_gain: float | None,
    **arguments: Any,
) -> None:
    """Long documents: each once, cold; then questions to all, warm."""
    _run(
        "long-doc-qa",
        common,
        LongDocQA(seed=common.seed, **arguments),
        Gates(expect_ttft_gain, expect_latency_gain),
    )


@command.command("multi-doc-qa")
@click.option("--documents", type=_POSITIVE, default=100, show_default=True, help="How many.")
@click.option(
    "--documents-per-request",
    type=_POSITIVE,
    default=5,
    show_default=True,
    help="In each prompt of the warm round.",
)
@click.option(
    "--requests", type=_POSITIVE, default=100, show_default=True, help="Of the warm round."
)
@click.option(
    "--document-tokens", type=_POSITIVE, default=1_000, show_default=True, help="Of each."
)
@click.option(
    "--system-tokens", type=_COUNT, default=64, show_default=True, help="Of the system prompt."
)
@click.option(
    "--question-tokens", type=_COUNT, default=32, show_default=True, help="Of each question."
)
@click.option(
    "--output-tokens", type=_POSITIVE, default=10, show_default=True, help="Of each answer."
)
@click.option(
    "--sampling",
    type=click.Choice(get_args(Sampling)),
    default="random",
    show_default=True,
    help="How documents are drawn.",
)
@click.option(
    "--separator",
    help="Between documents: text, or token ids with commas between them. [default: ' # # ', or "
    "4 ids]",
)
@click.option(
    "--max-in-flight", type=_POSITIVE, default=20, show_default=True, help="Requests at a time."
)
@click.option(
    "--pause-s", type=_SECONDS, default=0.0, show_default=True, help="Between the rounds."
)
@_with(_GAINS)
@_with_common
def multi_doc_qa(
    common: Common,
    *,
    separator: str | None,
    expect_ttft_gain: float | None,
    expect_latency_gain: float | None,
    **arguments: Any,
) -> None:
    """Single documents, cold; then several in one prompt, warm."""
    workload = MultiDocQA(
        separator=_separator(separator, _prompts(common)), seed=common.seed, **arguments
    )
    _run("multi-doc-qa", common, workload, Gates(expect_ttft_gain, expect_latency_gain))


@command.command("multi-round-qa")
@click.option("--users", type=_POSITIVE, default=10, show_default=True, help="At a time.")
@click.option(
    "--rounds", type=_POSITIVE, default=5, show_default=True, help="Questions of each user."
)
@click.option(
    "--qps",
    type=_FACTOR,
    default=1.0,
    show_default=True,
    help="Questions a second, of all users together.",
)
@click.option(
    "--system-tokens",
    type=_COUNT,
    default=1_000,
    show_default=True,
    help="Of the system prompt that all users share.",
)
@click.option(
    "--history-tokens",
    type=_COUNT,
    default=2_000,
    show_default=True,
    help="Of each user's own beginning.",
)
@click.option(
    "--question-tokens", type=_POSITIVE, default=32, show_default=True, help="Of each question."
)
@click.option(
    "--answer-tokens", type=_POSITIVE, default=100, show_default=True, help="Of each answer."
)
@click.option(
    "--ramp-up-s", type=_SECONDS, help="Over how long the first users come. [default: users / qps]"
)
@click.option(
    "--staggered/--together",
    default=True,
    help="First users in the midst of their conversations, or at their beginning.",
)
@click.option(
    "--duration-s",
    type=_FACTOR,
    help="New users follow until then. [default: each of the first finishes]",
)
@click.option(
    "--first-user",
    type=_COUNT,
    default=0,
    show_default=True,
    help="Number of the first; other users have other texts.",
)
@click.option(
    "--sharegpt",
    type=_INPUT,
    help="Conversations in the form of ShareGPT, whose questions are asked. [default: made up]",
)
@_with_common
def multi_round_qa(common: Common, *, rounds: int, sharegpt: Path | None, **arguments: Any) -> None:
    """Conversations: users ask at a rate, with all answers in the prompt.

    One group of figures for each round.
    """
    recorded = read_conversations(sharegpt, rounds=rounds) if sharegpt is not None else ()
    _run(
        "multi-round-qa",
        common,
        MultiRoundQA(rounds=rounds, recorded=recorded, **arguments),
        Gates(),
    )


@command.command()
@click.option("--qps", type=_FACTOR, default=1.0, show_default=True, help="Questions a second.")
@click.option(
    "--poisson",
    is_flag=True,
    help="Arrivals at random, of that mean rate. [default: evenly spaced]",
)
@click.option("--requests", type=_POSITIVE, default=100, show_default=True, help="At most so many.")
@click.option(
    "--dataset",
    type=_INPUT,
    help='JSON list of {"question": ..., "ctxs": [...], "answers": [...]}. [default: made up]',
)
@click.option(
    "--score",
    type=click.Choice(list(SCORES)),
    default="f1",
    show_default=True,
    help="Of answers: f1 of words, or rouge-l.",
)
@click.option("--documents", type=_POSITIVE, default=50, show_default=True, help="Made-up ones.")
@click.option(
    "--documents-per-request", type=_POSITIVE, default=2, show_default=True, help="Of made-up ones."
)
@click.option(
    "--document-tokens",
    type=_POSITIVE,
    default=1_000,
    show_default=True,
    help="Of each made-up one.",
)
@click.option(
    "--system-tokens", type=_COUNT, default=64, show_default=True, help="Of the system prompt."
)
@click.option(
    "--question-tokens",
    type=_COUNT,
    default=32,
    show_default=True,
    help="Of each made-up question.",
)
@click.option(
    "--output-tokens", type=_POSITIVE, default=32, show_default=True, help="Of each answer."
)
@click.option(
    "--kv-storage",
    type=Size(),
    default="0",
    show_default=True,
    help="Before, prefill as many documents as this holds.",
)
@click.option(
    "--kv-bytes-per-token", type=_POSITIVE, help="What a token's KV takes, for --kv-storage."
)
@_with_common
def rag(
    common: Common,
    *,
    dataset: Path | None,
    score: str,
    kv_storage: int,
    kv_bytes_per_token: int | None,
    **arguments: Any,
) -> None:
    """Retrieval: questions at a rate, each with a few documents that may be prefilled."""
    if kv_storage and kv_bytes_per_token is None:
        raise click.UsageError("--kv-storage needs --kv-bytes-per-token, to know what it holds")
    workload = Rag(
        seed=common.seed,
        storage_tokens=kv_storage // (kv_bytes_per_token or 1),
        examples=read_dataset(dataset) if dataset is not None else (),
        score=SCORES[score],
        **arguments,
    )
    _run("rag", common, workload, Gates())


@command.command("ttft-sweep")
@click.option(
    "--lengths",
    callback=_lengths,
    metavar="N,N,...",
    default=",".join(map(str, LENGTHS)),
    show_default=True,
    help="Tokens of the contexts.",
)
@click.option(
    "--following",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Warm requests after each cold one.",
)
@click.option(
    "--runs", type=_POSITIVE, default=1, show_default=True, help="All of it so many times."
)
@click.option(
    "--question-tokens",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Of the question after each context.",
)
@click.option(
    "--output-tokens", type=_POSITIVE, default=1, show_default=True, help="Of each answer."
)
@click.option(
    "--flush-tokens",
    type=_COUNT,
    default=0,
    show_default=True,
    help="Of other text before each warm one; the engine forgets.",
)
@_with(_GAINS)
@_with_common
def ttft_sweep(
    common: Common,
    *,
    expect_ttft_gain: float | None,
    expect_latency_gain: float | None,
    **arguments: Any,
) -> None:
    """TTFT over the context's length, cold then warm, one request at a time."""
    _run("ttft-sweep", common, TtftSweep(**arguments), Gates(expect_ttft_gain, expect_latency_gain))


@command.command()
@click.argument("trace", type=_INPUT)
@click.option(
    "--time-scale",
    type=Number(0, min_open=True, infinite=True),
    default=1.0,
    show_default=True,
    help="2: twice as fast as it was; inf: all at once.",
)
@click.option("--max-requests", type=_POSITIVE, help="So many of the beginning. [default: all]")
@click.option("--max-input-tokens", type=_POSITIVE, help="Longer prompts are cut at their end.")
@click.option("--max-output-tokens", type=_POSITIVE, help="Longer answers are asked shorter.")
@click.option(
    "--max-in-flight", type=_POSITIVE, help="What arrives beyond it waits. [default: nothing waits]"
)
@_with_common
def replay(common: Common, **arguments: Any) -> None:
    """Replay a recorded TRACE, with made-up text.

    A line is an object such as {"timestamp": 27000, "input_length": 1300, "output_length": 52,
    "hash_ids": [0, 12, 13]}: milliseconds, tokens, and an id for each 512 tokens of the prompt.
    """
    _run("replay", common, Replay(**arguments), Gates())


def _run(name: str, common: Common, workload: Workload, gates: Gates) -> None:
    from kvhold_lab.bench.load.measure import LoadMeasurement, measure

    if common.plot is not None or common.html is not None:
        with needing("'kvhold[lab]'"):
            import matplotlib  # noqa: F401 - better known now than after the run
    prompts = _prompts(common)
    measured = LoadMeasurement()
    with _server(common) as endpoint, _lines(common.json_file) as write:
        click.echo(
            f"{name} against {endpoint.base_url}, model {endpoint.model}, {prompts.kind} as prompts"
        )
        asyncio.run(
            measure(
                endpoint,
                workload,
                prompts,
                measured,
                prewarm=common.prewarm,
                progress_s=common.progress_s,
                keep=lambda result: write(request_line(result)),
            )
        )
        if not measured.results:
            raise click.ClickException("there is nothing to report: no request has ended")
        sent = {
            "base_url": endpoint.base_url,
            "model": endpoint.model,
            "api": endpoint.api,
            "prompts": prompts.kind,
            "seed": common.seed,
        }
        arguments = sent | _arguments(workload)
        summary = summarise(
            name, arguments, measured.results, measured.hits, interrupted=measured.interrupted
        )
        write(summary_line(summary))
    click.echo(f"\n{render(summary)}")
    _draw(common, summary, measured.results, f"kvhold bench load {name}: {endpoint.model}")
    _judge(summary, replace(gates, max_errors=common.expect_max_errors))


def _judge(summary: Summary, gates: Gates) -> None:
    broken = gates.broken(summary)
    if not summary.total.requests:
        broken.append("no request succeeded")
    for sentence in broken:
        click.echo(f"kvhold bench load: FAILED: {sentence}", err=True)
    if broken:
        sys.exit(1)


def _draw(common: Common, summary: Summary, results: list[Result], title: str) -> None:
    if common.plot is not None or common.html is not None:
        from kvhold_lab.bench.load.pictures import draw, write_page

        if common.plot is not None:
            draw(results, title, common.plot)
        if common.html is not None:
            write_page(summary, results, title, common.html)


@contextmanager
def _server(common: Common) -> "Iterator[Endpoint]":
    from kvhold_lab.bench.load.client import Endpoint, checked_url
    from kvhold_lab.bench.load.demo_server import demo_server
    from kvhold_lab.bench.load.measure import model_of

    with ExitStack() as stack:
        if common.serve_demo is not None:
            if common.base_url is not None:
                raise click.UsageError(
                    "--serve-demo starts a server of its own; leave --base-url out"
                )
            click.echo(f"starting vLLM with kvhold and the {common.serve_demo} model ...")
            server = stack.enter_context(
                demo_server(
                    common.serve_demo, context_tokens=common.demo_context, ram_bytes=common.demo_ram
                )
            )
            base_url = server.base_url
        elif common.base_url is None:
            raise click.UsageError(
                "name a server with --base-url, or have one started with --serve-demo"
            )
        else:
            base_url = checked_url(common.base_url)
        endpoint = Endpoint(
            base_url=base_url,
            model=common.model or "",
            api="chat" if common.api == "chat" else "completions",
            api_key=os.environ.get(common.api_key_env) or None,
            ignore_eos=common.ignore_eos,
            extra_body=_object(common.extra_body),
            user_header=common.user_header,
            timeout_s=common.timeout_s,
            connect_timeout_s=common.connect_timeout_s,
        )
        yield (
            endpoint if endpoint.model else replace(endpoint, model=asyncio.run(model_of(endpoint)))
        )


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[bytes], Any]]:
    if path is None:
        yield len
        return
    try:
        file = path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
    with file:
        yield file.write


def _prompts(common: Common) -> Prompts:
    kind = common.prompts or ("text" if common.api == "chat" else "tokens")
    if kind == "text":
        return TextPrompts(common.seed)
    if common.api == "chat":
        raise click.UsageError("--api chat takes no token ids; use --prompts text")
    return TokenPrompts(common.seed, first_id=common.first_token_id, vocab_size=common.vocab_size)


def _separator(given: str | None, prompts: Prompts) -> Content:
    if prompts.kind == "text":
        return _SEPARATOR_TEXT if given is None else given
    if given is None:
        return prompts.piece("separator", 0, _SEPARATOR_TOKENS)
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--separator {given!r}: with token ids as prompts it must be ids with commas "
            "between them"
        ) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise click.UsageError('--extra-body must be a JSON object, such as {"priority": 1}')
    return value


def _arguments(workload: Workload) -> dict[str, Any]:
    """The arguments for JSON; a data set becomes its size."""
    given = {field.name: getattr(workload, field.name) for field in fields(workload)}  # type: ignore[arg-type]
    return {
        name: len(value) if name in ("examples", "recorded") else _plain(value)
        for name, value in given.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return getattr(value, "__name__", value) if callable(value) else value
