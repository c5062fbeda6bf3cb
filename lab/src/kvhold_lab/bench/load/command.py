from pathlib import Path
from typing import Any, get_args

import click

from kvhold.cli.options import Size
from kvhold_lab.bench.load.execute import run
from kvhold_lab.bench.load.options import (
    COUNT,
    FACTOR,
    INPUT,
    SECONDS,
    Common,
    with_common,
    with_gains,
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
    """Send a workload to any OpenAI-compatible server: times, rates, hits, errors.

    Ctrl-C ends a run and shows the results so far. Exits with 1 if an expectation is not met, or if
    no request succeeded.
    """


@command.command("long-doc-qa")
@default_option("--documents", 8, "Number of documents.")
@default_option("--document-tokens", 20_000, "Tokens of each document.")
@default_option("--question-tokens", 32, "Tokens of each question; 0: repeat the prompt.", COUNT)
@default_option("--output-tokens", 100, "Tokens of each answer.")
@default_option("--repeats", 2, "Questions about each document in the warm round.")
@default_option("--order", "random", "Order of the warm round.", click.Choice(get_args(Command)))
@default_option("--max-in-flight", 20, "Most requests at a time.")
@default_option("--pause-s", 0.0, "Pause between the rounds.", SECONDS)
@with_gains
@with_common
def long_doc_qa(
    common: Common,
    *,
    gates: Gates,
    **arguments: Any,
) -> None:
    """Long documents: each once, cold; then questions about all, warm."""
    run(
        "long-doc-qa",
        common,
        LongDocQA(seed=common.seed, **arguments),
        gates,
    )


@command.command("multi-doc-qa")
@default_option("--documents", 100, "Number of documents.")
@default_option("--documents-per-request", 5, "Documents in each prompt of the warm round.")
@default_option("--requests", 100, "Requests of the warm round.")
@default_option("--document-tokens", 1_000, "Tokens of each document.")
@default_option("--system-tokens", 64, "Tokens of the system prompt.", COUNT)
@default_option("--question-tokens", 32, "Tokens of each question.", COUNT)
@default_option("--output-tokens", 10, "Tokens of each answer.")
@default_option(
    "--sampling", "random", "How documents are drawn.", click.Choice(get_args(Sampling))
)
@click.option(
    "--separator",
    help="Separator of documents: text, or token ids separated by commas. [default: ' # # ', or "
    "4 ids]",
)
@default_option("--max-in-flight", 20, "Most requests at a time.")
@default_option("--pause-s", 0.0, "Pause between the rounds.", SECONDS)
@with_gains
@with_common
def multi_doc_qa(
    common: Common,
    *,
    separator: str | None,
    gates: Gates,
    **arguments: Any,
) -> None:
    """Single documents, cold; then several in one prompt, warm."""
    workload = MultiDocQA(
        separator=separator_of(separator, prompts_of(common)), seed=common.seed, **arguments
    )
    run("multi-doc-qa", common, workload, gates)


@command.command("multi-round-qa")
@default_option("--users", 10, "Users at a time.")
@default_option("--rounds", 5, "Questions of each user.")
@default_option("--qps", 1.0, "Questions a second, of all users together.", FACTOR)
@default_option("--system-tokens", 1_000, "Tokens of the system prompt that users share.", COUNT)
@default_option("--history-tokens", 2_000, "Tokens of each user's own beginning.", COUNT)
@default_option("--question-tokens", 32, "Tokens of each question.")
@default_option("--answer-tokens", 100, "Tokens of each answer.")
@click.option(
    "--ramp-up-s", type=SECONDS, help="Time in which the first users come. [default: users / qps]"
)
@click.option(
    "--staggered/--together",
    default=True,
    help="Start the first users in the middle of their conversations, or at the beginning.",
)
@click.option(
    "--duration-s",
    type=FACTOR,
    help="Length of the run; new users follow. [default: until all first users have finished]",
)
@default_option(
    "--first-user", 0, "Number of the first user; other numbers have other texts.", COUNT
)
@click.option(
    "--sharegpt",
    type=INPUT,
    help="Conversations in ShareGPT's format, whose questions are asked. [default: made up]",
)
@with_common
def multi_round_qa(common: Common, *, rounds: int, sharegpt: Path | None, **arguments: Any) -> None:
    """Conversations: users ask at a rate, with all answers in the prompt."""
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
@default_option("--questions", 5.0, "Mean number of questions of a chat.", Number(1))
@default_option("--system-tokens", 256, "Tokens of the system prompt that all chats share.", COUNT)
@default_option("--history-tokens", 800, "Median tokens of each chat's own beginning.")
@default_option("--question-tokens", 100, "Median tokens of each question.")
@default_option("--answer-tokens", 200, "Median tokens of each made-up answer in later prompts.")
@default_option("--output-tokens", 8, "Tokens of each answer that the server computes.")
@default_option(
    "--most-tokens", 4_000, "Most tokens of a prompt and its answer; a longer chat ends."
)
@default_option("--duration-s", 360.0, "Time in which questions come.", FACTOR)
@with_common
def chats(common: Common, **arguments: Any) -> None:
    """Chats with think times: users come, ask, think, ask again, and leave.

    All depends only on --seed; prompts have made-up answers.
    """
    run("chats", common, Chats(seed=common.seed, **arguments), Gates())


@command.command()
@default_option("--qps", 1.0, "Questions a second.", FACTOR)
@click.option(
    "--poisson",
    is_flag=True,
    help="Questions arrive at random, with this mean rate. [default: evenly spaced]",
)
@default_option("--requests", 100, "Most requests.")
@click.option(
    "--dataset",
    type=INPUT,
    help='JSON list of {"question": ..., "ctxs": [...], "answers": [...]}. [default: made up]',
)
@default_option(
    "--score", "f1", "Score of answers: f1 of words, or rouge-l.", click.Choice(list(SCORES))
)
@default_option("--documents", 50, "Number of made-up documents.")
@default_option("--documents-per-request", 2, "Made-up documents in each prompt.")
@default_option("--document-tokens", 1_000, "Tokens of each made-up document.")
@default_option("--system-tokens", 64, "Tokens of the system prompt.", COUNT)
@default_option("--question-tokens", 32, "Tokens of each made-up question.", COUNT)
@default_option("--output-tokens", 32, "Tokens of each answer.")
@default_option("--kv-storage", "0", "First prefill as many documents as fit into this.", Size())
@click.option(
    "--kv-bytes-per-token", type=POSITIVE, help="Bytes of a token's KV, for --kv-storage."
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
        raise click.UsageError(
            "--kv-storage needs --kv-bytes-per-token, to know how many documents fit"
        )
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
    help="Lengths of the contexts, in tokens.",
)
@default_option("--following", 1, "Warm requests after each cold one.")
@default_option("--runs", 1, "Repetitions of the whole sweep.")
@default_option("--question-tokens", 16, "Tokens of the question after each context.", COUNT)
@default_option("--output-tokens", 1, "Tokens of each answer.")
@default_option(
    "--flush-tokens",
    0,
    "Tokens of other text before each warm request, so that the engine's own cache forgets.",
    COUNT,
)
@with_gains
@with_common
def ttft_sweep(
    common: Common,
    *,
    gates: Gates,
    **arguments: Any,
) -> None:
    """TTFT over the context's length, cold then warm, one request at a time."""
    run("ttft-sweep", common, TtftSweep(**arguments), gates)


@command.command()
@click.argument("trace", type=INPUT)
@default_option(
    "--time-scale",
    1.0,
    "Speed of the replay; 2: twice as fast as recorded; inf: all at once.",
    Number(0, min_open=True, infinite=True),
)
@click.option(
    "--max-requests", type=POSITIVE, help="Only the first so many requests. [default: all]"
)
@click.option("--max-input-tokens", type=POSITIVE, help="Longer prompts are cut at their end.")
@click.option("--max-output-tokens", type=POSITIVE, help="Longest answer that is requested.")
@click.option(
    "--max-in-flight",
    type=POSITIVE,
    help="Most requests at a time; others wait. [default: no limit]",
)
@with_common
def replay(common: Common, **arguments: Any) -> None:
    """Replay a recorded TRACE, with made-up text.

    A line is an object such as {"timestamp": 27000, "input_length": 1300, "output_length": 52,
    "hash_ids": [0, 12, 13]}: milliseconds, tokens, and an id for each 512 tokens of the prompt.
    """
    run("replay", common, Replay(**arguments), Gates())
