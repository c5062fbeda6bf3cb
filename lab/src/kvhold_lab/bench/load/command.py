"""`kvhold bench load`: one command for each workload."""

from pathlib import Path
from typing import Any, get_args

import click

from kvhold.cli.options import Size
from kvhold_lab.bench.load.execute import prompts_of, run, separator_of
from kvhold_lab.bench.load.options import (
    COUNT,
    FACTOR,
    GAINS,
    INPUT,
    POSITIVE,
    SECONDS,
    Common,
    with_common,
    with_options,
)
from kvhold_lab.bench.load.report import Gates
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
from kvhold_lab.options import Number


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


@click.group()
def command() -> None:
    """A workload against any OpenAI-compatible server: times, rates, hits, errors.

    Ctrl-C ends a run with its results so far. Exits with 1 if an expectation is not met, or if no
    request succeeded.
    """


@command.command("long-doc-qa")
@click.option("--documents", type=POSITIVE, default=8, show_default=True, help="How many.")
@click.option(
    "--document-tokens", type=POSITIVE, default=20_000, show_default=True, help="Of each."
)
@click.option(
    "--question-tokens",
    type=COUNT,
    default=32,
    show_default=True,
    help="Of each question; 0: the very same prompt again.",
)
@click.option(
    "--output-tokens", type=POSITIVE, default=100, show_default=True, help="Of each answer."
)
@click.option(
    "--repeats",
    type=POSITIVE,
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
    "--max-in-flight", type=POSITIVE, default=20, show_default=True, help="Requests at a time."
)
@click.option("--pause-s", type=SECONDS, default=0.0, show_default=True, help="Between the rounds.")
@with_options(GAINS)
@with_common
def long_doc_qa(
    common: Common,
    *,
    expect_ttft_gain: float | None,
    expect_latency_gain: float | None,
    **arguments: Any,
) -> None:
    """Long documents: each once, cold; then questions to all, warm."""
    run(
        "long-doc-qa",
        common,
        LongDocQA(seed=common.seed, **arguments),
        Gates(expect_ttft_gain, expect_latency_gain),
    )


@command.command("multi-doc-qa")
@click.option("--documents", type=POSITIVE, default=100, show_default=True, help="How many.")
@click.option(
    "--documents-per-request",
    type=POSITIVE,
    default=5,
    show_default=True,
    help="In each prompt of the warm round.",
)
@click.option(
    "--requests", type=POSITIVE, default=100, show_default=True, help="Of the warm round."
)
@click.option("--document-tokens", type=POSITIVE, default=1_000, show_default=True, help="Of each.")
@click.option(
    "--system-tokens", type=COUNT, default=64, show_default=True, help="Of the system prompt."
)
@click.option(
    "--question-tokens", type=COUNT, default=32, show_default=True, help="Of each question."
)
@click.option(
    "--output-tokens", type=POSITIVE, default=10, show_default=True, help="Of each answer."
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
    "--max-in-flight", type=POSITIVE, default=20, show_default=True, help="Requests at a time."
)
@click.option("--pause-s", type=SECONDS, default=0.0, show_default=True, help="Between the rounds.")
@with_options(GAINS)
@with_common
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
        separator=separator_of(separator, prompts_of(common)), seed=common.seed, **arguments
    )
    run("multi-doc-qa", common, workload, Gates(expect_ttft_gain, expect_latency_gain))


@command.command("multi-round-qa")
@click.option("--users", type=POSITIVE, default=10, show_default=True, help="At a time.")
@click.option(
    "--rounds", type=POSITIVE, default=5, show_default=True, help="Questions of each user."
)
@click.option(
    "--qps",
    type=FACTOR,
    default=1.0,
    show_default=True,
    help="Questions a second, of all users together.",
)
@click.option(
    "--system-tokens",
    type=COUNT,
    default=1_000,
    show_default=True,
    help="Of the system prompt that all users share.",
)
@click.option(
    "--history-tokens",
    type=COUNT,
    default=2_000,
    show_default=True,
    help="Of each user's own beginning.",
)
@click.option(
    "--question-tokens", type=POSITIVE, default=32, show_default=True, help="Of each question."
)
@click.option(
    "--answer-tokens", type=POSITIVE, default=100, show_default=True, help="Of each answer."
)
@click.option(
    "--ramp-up-s", type=SECONDS, help="Over how long the first users come. [default: users / qps]"
)
@click.option(
    "--staggered/--together",
    default=True,
    help="First users in the midst of their conversations, or at their beginning.",
)
@click.option(
    "--duration-s",
    type=FACTOR,
    help="New users follow until then. [default: each of the first finishes]",
)
@click.option(
    "--first-user",
    type=COUNT,
    default=0,
    show_default=True,
    help="Number of the first; other users have other texts.",
)
@click.option(
    "--sharegpt",
    type=INPUT,
    help="Conversations in the form of ShareGPT, whose questions are asked. [default: made up]",
)
@with_common
def multi_round_qa(common: Common, *, rounds: int, sharegpt: Path | None, **arguments: Any) -> None:
    """Conversations: users ask at a rate, with all answers in the prompt.

    One group of figures for each round.
    """
    recorded = read_conversations(sharegpt, rounds=rounds) if sharegpt is not None else ()
    run(
        "multi-round-qa",
        common,
        MultiRoundQA(rounds=rounds, recorded=recorded, **arguments),
        Gates(),
    )


@command.command()
@click.option("--qps", type=FACTOR, default=1.0, show_default=True, help="Questions a second.")
@click.option(
    "--poisson",
    is_flag=True,
    help="Arrivals at random, of that mean rate. [default: evenly spaced]",
)
@click.option("--requests", type=POSITIVE, default=100, show_default=True, help="At most so many.")
@click.option(
    "--dataset",
    type=INPUT,
    help='JSON list of {"question": ..., "ctxs": [...], "answers": [...]}. [default: made up]',
)
@click.option(
    "--score",
    type=click.Choice(list(SCORES)),
    default="f1",
    show_default=True,
    help="Of answers: f1 of words, or rouge-l.",
)
@click.option("--documents", type=POSITIVE, default=50, show_default=True, help="Made-up ones.")
@click.option(
    "--documents-per-request", type=POSITIVE, default=2, show_default=True, help="Of made-up ones."
)
@click.option(
    "--document-tokens",
    type=POSITIVE,
    default=1_000,
    show_default=True,
    help="Of each made-up one.",
)
@click.option(
    "--system-tokens", type=COUNT, default=64, show_default=True, help="Of the system prompt."
)
@click.option(
    "--question-tokens",
    type=COUNT,
    default=32,
    show_default=True,
    help="Of each made-up question.",
)
@click.option(
    "--output-tokens", type=POSITIVE, default=32, show_default=True, help="Of each answer."
)
@click.option(
    "--kv-storage",
    type=Size(),
    default="0",
    show_default=True,
    help="Before, prefill as many documents as this holds.",
)
@click.option(
    "--kv-bytes-per-token", type=POSITIVE, help="What a token's KV takes, for --kv-storage."
)
@with_common
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
    run("rag", common, workload, Gates())


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
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Warm requests after each cold one.",
)
@click.option(
    "--runs", type=POSITIVE, default=1, show_default=True, help="All of it so many times."
)
@click.option(
    "--question-tokens",
    type=COUNT,
    default=16,
    show_default=True,
    help="Of the question after each context.",
)
@click.option(
    "--output-tokens", type=POSITIVE, default=1, show_default=True, help="Of each answer."
)
@click.option(
    "--flush-tokens",
    type=COUNT,
    default=0,
    show_default=True,
    help="Of other text before each warm one; the engine forgets.",
)
@with_options(GAINS)
@with_common
def ttft_sweep(
    common: Common,
    *,
    expect_ttft_gain: float | None,
    expect_latency_gain: float | None,
    **arguments: Any,
) -> None:
    """TTFT over the context's length, cold then warm, one request at a time."""
    run("ttft-sweep", common, TtftSweep(**arguments), Gates(expect_ttft_gain, expect_latency_gain))


@command.command()
@click.argument("trace", type=INPUT)
@click.option(
    "--time-scale",
    type=Number(0, min_open=True, infinite=True),
    default=1.0,
    show_default=True,
    help="2: twice as fast as it was; inf: all at once.",
)
@click.option("--max-requests", type=POSITIVE, help="So many of the beginning. [default: all]")
@click.option("--max-input-tokens", type=POSITIVE, help="Longer prompts are cut at their end.")
@click.option("--max-output-tokens", type=POSITIVE, help="Longer answers are asked shorter.")
@click.option(
    "--max-in-flight", type=POSITIVE, help="What arrives beyond it waits. [default: nothing waits]"
)
@with_common
def replay(common: Common, **arguments: Any) -> None:
    """Replay a recorded TRACE, with made-up text.

    A line is an object such as {"timestamp": 27000, "input_length": 1300, "output_length": 52,
    "hash_ids": [0, 12, 13]}: milliseconds, tokens, and an id for each 512 tokens of the prompt.
    """
    run("replay", common, Replay(**arguments), Gates())
