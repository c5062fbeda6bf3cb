from collections.abc import Sequence
from itertools import product
from pathlib import Path

import click

from kvhold.cli.options import Size
from kvhold.core.errors import ConfigError
from kvhold.core.sizes import format_size
from kvhold.sizing.fits import RATIOS, ratio_of
from kvhold.sizing.model import kv_of, read_settings
from kvhold.tiers.policies import POLICIES
from kvhold_lab.bench.rows import needing, needing_pictures, write_rows
from kvhold_lab.options import Number, default_option, json_option, plot_option
from kvhold_lab.simulate.generators import GENERATORS, generate
from kvhold_lab.simulate.pictures import draw
from kvhold_lab.simulate.policy_replay import find_policy
from kvhold_lab.simulate.prefill_cost import PrefillCost
from kvhold_lab.simulate.report import HEADING, Checked, line, render_check
from kvhold_lab.simulate.requests import BLOCK_TOKENS
from kvhold_lab.simulate.trace import Trace, read_trace, trace_of

_POLICIES = (*POLICIES, "arc", "belady")
_POLICY_FOR = ("tokens", "ttft", "bytes")
_HALVINGS = 6  # from a 64th of all different chunks to all
_MOST_APART = 0.001
_SEED, _MINUTES = 1, 60.0
_COST = PrefillCost()


def _check_policies(
    _context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if name in _POLICIES:
            continue
        if ":" not in name:
            raise click.BadParameter(
                f"{name!r} is neither module:Class nor one of {', '.join(_POLICIES)}"
            )
        find_policy(name)
    return names


def _check_combination(
    policies_for: Sequence[str], disks: Sequence[int], codecs: Sequence[str], *, check: bool
) -> None:
    if codecs and not any(disks):
        raise click.UsageError(
            "--codec is the codec of the tier below memory; add that tier with --disk"
        )
    if check and any(disks) and "ttft" in policies_for:
        raise click.UsageError(
            "--check with --disk cannot check --policy-for ttft, which depends on the real disk's "
            "speed; leave out one of them"
        )


def _bytes_a_token(token_bytes: int | None, model: str, dtype: str) -> tuple[int, str]:
    kv_dtype = "bfloat16"
    if token_bytes is None:
        kv = kv_of(read_settings(model), dtype=dtype)
        token_bytes, kv_dtype = kv.stored_bytes(1), kv.groups[0].dtype
        for note in kv.notes:
            click.echo(f"{model}: {note}")
    if token_bytes < 1:
        raise ConfigError("bytes_per_token is 0; it must be 1 or more")
    return token_bytes, kv_dtype


def _requests_of(
    trace: Path | None,
    workload: str | None,
    seed: int | None,
    minutes: float | None,
    *,
    block_tokens: int,
    num_requests: int | None,
) -> Trace:
    if (trace is None) == (workload is None):
        raise click.UsageError("name either a TRACE or a --workload, and not both")
    if trace is not None:
        if seed is not None or minutes is not None:
            raise click.UsageError("--seed and --minutes need a --workload, not a TRACE")
        return read_trace(trace, block_tokens=block_tokens, num_requests=num_requests)
    if block_tokens != BLOCK_TOKENS:
        raise click.UsageError(f"--block-tokens is {BLOCK_TOKENS} for a --workload")
    assert workload is not None
    requests = generate(
        workload,
        seed=_SEED if seed is None else seed,
        minutes=_MINUTES if minutes is None else minutes,
    )
    return trace_of(requests, name=workload, num_requests=num_requests)


def _policies_for(read: Trace) -> tuple[str, ...]:
    if read.times_s is not None:
        return _POLICIES
    click.echo("without learned, which needs a timestamp in each line, in ascending order")
    return tuple(name for name in _POLICIES if name != "learned")


def _with_aims(policies: Sequence[str], policies_for: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (policy, aim)
        for policy in policies
        for aim in ((policies_for or _POLICY_FOR[:1]) if policy == "learned" else ("",))
    ]


@click.command()
@click.argument(
    "trace", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--workload",
    type=click.Choice(list(GENERATORS)),
    help="Generated requests instead of a TRACE.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help=f"Seed of the workload. Equal seeds give equal requests. [default: {_SEED}]",
)
@click.option(
    "--minutes",
    type=Number(0, min_open=True),
    help=f"Length of the workload. [default: {_MINUTES:g}]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    callback=_check_policies,
    help=f"Policies to simulate: {', '.join(_POLICIES)}, or a class as module:Class. [default: "
    "all; learned only if all requests have a timestamp]",
)
@click.option(
    "--policy-for",
    "policies_for",
    multiple=True,
    type=click.Choice(_POLICY_FOR),
    help="What learned maximises; see the setting policy_for. tokens and bytes are equal here, "
    "because all chunks have one size. [default: tokens]",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    type=Size(),
    help="Size of memory, such as 64GiB. [default: a sweep up to the size of all chunks]",
)
@click.option(
    "--disk",
    "disks",
    multiple=True,
    type=Size(),
    help="Size of a disk tier below memory, such as 1TiB. [default: none]",
)
@click.option(
    "--chunk-tokens",
    "chunks",
    multiple=True,
    type=click.IntRange(1),
    help="Tokens in a chunk. [default: a block of the trace]",
)
@click.option(
    "--codec",
    "codecs",
    multiple=True,
    type=click.Choice(list(RATIOS)),
    help="Codec of the tier below. [default: raw]",
)
@click.option(
    "--bytes-per-token",
    "token_bytes",
    type=Size(),
    help="KV bytes of a token. [default: those of --model]",
)
@click.option(
    "--model",
    default="meta-llama/Llama-3.1-8B",
    show_default=True,
    help="The model; see `kvhold size`.",
)
@click.option("--dtype", default="auto", show_default=True, help="Data type of the model's KV.")
@default_option("--block-tokens", BLOCK_TOKENS, "Tokens that an id of the trace stands for.")
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    help="Number of requests to use, the first ones. [default: all]",
)
@default_option(
    "--prefill-tokens-per-s",
    _COST.tokens_per_s,
    "Tokens that the engine computes per second at the beginning of a prompt. Used for the seconds "
    "that hits save. The default is an estimate for Llama-3.1-8B on an H100.",
    Number(0, min_open=True),
)
@default_option(
    "--attention-tokens",
    _COST.attention_tokens,
    "Position at which a token takes twice as long as the first one, because of attention; inf: "
    "all take as long. The default is for Llama-3.1-8B.",
    Number(0, min_open=True, infinite=True),
)
@click.option(
    "--check",
    is_flag=True,
    help="Also serve the requests from a real cache in this process, with a real disk for --disk, "
    "and compare. Exit with 1 if they differ by more than 0.1 points.",
)
@json_option()
@plot_option("hit rate over capacity, such as hits.png")
def command(
    trace: Path | None,
    workload: str | None,
    seed: int | None,
    minutes: float | None,
    policies: tuple[str, ...],
    policies_for: tuple[str, ...],
    capacities: tuple[int, ...],
    disks: tuple[int, ...],
    chunks: tuple[int, ...],
    codecs: tuple[str, ...],
    token_bytes: int | None,
    model: str,
    dtype: str,
    block_tokens: int,
    num_requests: int | None,
    prefill_tokens_per_s: float,
    attention_tokens: float,
    check: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Show the hit rates of caches on TRACE or a workload, by policy and size.

    A line of TRACE is a JSON object with input_length and hash_ids, as in Mooncake's traces;
    learned needs a timestamp, too, in milliseconds. belady knows the future and is the upper limit.

    A hit saves the prefill of its tokens. The token at position p takes
    (1 + p / attention-tokens) / prefill-tokens-per-s seconds.
    """
    _check_combination(policies_for, disks, codecs, check=check)
    with needing("'kvhold[lab]'"):
        from kvhold_lab.simulate.check import serve_too
        from kvhold_lab.simulate.simulation import Setup, SimulatedRow, best_hit_rate, simulate
    needing_pictures(plot)
    read = _requests_of(
        trace, workload, seed, minutes, block_tokens=block_tokens, num_requests=num_requests
    )
    token_bytes, kv_dtype = _bytes_a_token(token_bytes, model, dtype)
    ratios = {codec: ratio_of(codec, kv_dtype) for codec in codecs or ("raw",)}
    cost = PrefillCost(prefill_tokens_per_s, attention_tokens)
    policies = policies or _policies_for(read)
    if policies_for and "learned" not in policies:
        raise click.UsageError("--policy-for is a setting of learned; add --policy learned")
    num_tokens = int(read.num_tokens.sum())
    click.echo(
        f"{read.num_requests:,} requests, {num_tokens:,} tokens, {token_bytes:,} bytes a token"
    )
    rows: list[SimulatedRow] = []
    checked: list[Checked] = []
    for tokens_per_chunk in chunks or (block_tokens,):
        cut = read.cut(tokens_per_chunk)
        all_bytes = cut.num_ids * tokens_per_chunk * token_bytes
        most = best_hit_rate(cut, num_tokens)
        click.echo(
            f"\nchunks of {tokens_per_chunk} tokens: {cut.chunks.size:,}, of which "
            f"{cut.num_ids:,} differ ({format_size(all_bytes)}); "
            f"with all of them kept, {most:.2%} of the tokens are found\n{HEADING}"
        )
        sweep = capacities or tuple(all_bytes >> step for step in range(_HALVINGS, -1, -1))
        for (policy, policy_for), (codec, ratio), disk, capacity in product(
            _with_aims(policies, policies_for), ratios.items(), disks or (0,), sweep
        ):
            setup = Setup(policy, capacity, token_bytes, disk, codec, ratio, cost, policy_for)
            rows.append(simulate(cut, num_tokens, setup))
            click.echo(line(rows[-1]))
            if check and policy in POLICIES and setup.ram_chunks(tokens_per_chunk):
                checked.append(serve_too(cut, num_tokens, setup))
    if check:
        click.echo(f"\n{render_check(checked)}")
    write_rows(json_file, rows)
    if plot is not None:
        name = workload or (trace and trace.name)
        draw(rows, plot, f"{name}: {read.num_requests:,} requests, {token_bytes:,} bytes a token")
    if any(abs(one.simulated - one.served) > _MOST_APART for one in checked):
        raise SystemExit(1)
