"""`kvhold bench load`: one command for each workload."""

from pathlib import Path
from typing import Any, get_args

import click

from kvhold.cli.options import Size
from kvhold_lab.bench.load.execute import run
from kvhold_lab.bench.load.options import (
    COUNT,
    FACTOR,
    GAINS,
    INPUT,
    SECONDS,
    Common,
    with_common,
    with_options,
)
from kvhold_lab.bench.load.report import Gates
from kvhold_lab.bench.load.setup import prompts_of, separator_of
from kvhold_lab.bench.load.workloads import (
    Chats,
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
from kvhold_lab.options import POSITIVE, Number, default_option


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
@default_option("--documents", 8, "How many.")
@default_option("--document-tokens", 20_000, "Of each.")
@default_option("--question-tokens", 32, "Of each question; 0: the very same prompt again.", COUNT)
@default_option("--output-tokens", 100, "Of each answer.")
@default_option("--repeats", 2, "Questions to each document in the warm round.")
@default_option("--order", "random", "Of the warm round.", click.Choice(get_args(Command)))
@default_option("--max-in-flight", 20, "Requests at a time.")
@default_option("--pause-s", 0.0, "Between the rounds.", SECONDS)
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
@default_option("--documents", 100, "How many.")
@default_option("--documents-per-request", 5, "In each prompt of the warm round.")
@default_option("--requests", 100, "Of the warm round.")
@default_option("--document-tokens", 1_000, "Of each.")
@default_option("--system-tokens", 64, "Of the system prompt.", COUNT)
@default_option("--question-tokens", 32, "Of each question.", COUNT)
@default_option("--output-tokens", 10, "Of each answer.")
@default_option(
    "--sampling", "random", "How documents are drawn.", click.Choice(get_args(Sampling))
)
@click.option(
    "--separator",
    help="Between documents: text, or token ids with commas between them. [default: ' # # ', or "
    "4 ids]",
)
@default_option("--max-in-flight", 20, "Requests at a time.")
@default_option("--pause-s", 0.0, "Between the rounds.", SECONDS)
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
@default_option("--users", 10, "At a time.")
@default_option("--rounds", 5, "Questions of each user.")
@default_option("--qps", 1.0, "Questions a second, of all users together.", FACTOR)
@default_option("--system-tokens", 1_000, "Of the system prompt that all users share.", COUNT)
@default_option("--history-tokens", 2_000, "Of each user's own beginning.", COUNT)
@default_option("--question-tokens", 32, "Of each question.")
@default_option("--answer-tokens", 100, "Of each answer.")
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
@default_option("--first-user", 0, "Number of the first; other users have other texts.", COUNT)
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
@default_option("--chats-s", 0.2, "New chats a second.", FACTOR)
@default_option("--think-s", 30.0, "Median time between two questions of a chat.", FACTOR)
@default_option("--think-sigma", 1.0, "How much think times differ; 0: not at all.", SECONDS)
@default_option("--questions", 5.0, "Mean number of a chat.", Number(1))
@default_option("--system-tokens", 256, "Of the system prompt that all chats share.", COUNT)
@default_option("--history-tokens", 800, "Median of each chat's own beginning.")
@default_option("--question-tokens", 100, "Median of each question.")
@default_option("--answer-tokens", 200, "Median of each made-up answer in the next prompt.")
@default_option("--output-tokens", 8, "Of each answer that is asked of the server.")
@default_option("--most-tokens", 4_000, "A chat ends before a longer prompt and answer.")
@default_option("--duration-s", 360.0, "How long questions come.", FACTOR)
@with_common
def chats(common: Common, **arguments: Any) -> None:
    """Chats with think times: people come, ask, think, ask again, and leave.

    Times, lengths and texts follow from --seed alone; prompts have made-up answers.
    """
    run("chats", common, Chats(seed=common.seed, **arguments), Gates())


@command.command()
@default_option("--qps", 1.0, "Questions a second.", FACTOR)
@click.option(
    "--poisson",
    is_flag=True,
    help="Arrivals at random, of that mean rate. [default: evenly spaced]",
)
@default_option("--requests", 100, "At most so many.")
@click.option(
    "--dataset",
    type=INPUT,
    help='JSON list of {"question": ..., "ctxs": [...], "answers": [...]}. [default: made up]',
)
@default_option("--score", "f1", "Of answers: f1 of words, or rouge-l.", click.Choice(list(SCORES)))
@default_option("--documents", 50, "Made-up ones.")
@default_option("--documents-per-request", 2, "Of made-up ones.")
@default_option("--document-tokens", 1_000, "Of each made-up one.")
@default_option("--system-tokens", 64, "Of the system prompt.", COUNT)
@default_option("--question-tokens", 32, "Of each made-up question.", COUNT)
@default_option("--output-tokens", 32, "Of each answer.")
@default_option("--kv-storage", "0", "Before, prefill as many documents as this holds.", Size())
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
@default_option("--following", 1, "Warm requests after each cold one.")
@default_option("--runs", 1, "All of it so many times.")
@default_option("--question-tokens", 16, "Of the question after each context.", COUNT)
@default_option("--output-tokens", 1, "Of each answer.")
@default_option(
    "--flush-tokens", 0, "Of other text before each warm one; the engine forgets.", COUNT
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
@default_option(
    "--time-scale",
    1.0,
    "2: twice as fast as it was; inf: all at once.",
    Number(0, min_open=True, infinite=True),
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
