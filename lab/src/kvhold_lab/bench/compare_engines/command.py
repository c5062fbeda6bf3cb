import sys
from functools import partial
from pathlib import Path

import click

from kvhold_lab.bench.compare_engines.lmcache_env import find_lmcache
from kvhold_lab.bench.compare_engines.rows import NO_TIER, REDIS, Measured, goals, make_rows, render
from kvhold_lab.bench.compare_engines.run import TIERS, Work, measure, measure_imports
from kvhold_lab.bench.compare_engines.systems import KVHOLD, OURS, SERVER, SYSTEMS, cores, launch
from kvhold_lab.bench.ratios import render_goals
from kvhold_lab.bench.rows import machine_and_load, write_rows
from kvhold_lab.options import (
    default_option,
    folder_option,
    json_option,
    lmcache_option,
    only_option,
    threads_option,
)
from kvhold_lab.servers.programs import VERBS, provide

_DEFAULT = Work()


@click.command()
@only_option("--system", "only", type=click.Choice(SYSTEMS))
@only_option(
    "--tier",
    "tiers",
    "; start-up, memory and imports are measured with ram",
    type=click.Choice(TIERS),
)
@default_option("--rounds", _DEFAULT.rounds, "Rounds, after one that does not count.")
@default_option(
    "--tokens", _DEFAULT.num_tokens, "Tokens of a prompt, in whole chunks.", click.IntRange(256)
)
@default_option(
    "--lookup-tokens",
    _DEFAULT.lookup_tokens,
    "Tokens of the long lookup; 0: none.",
    click.IntRange(0),
)
@click.option("--layers", type=click.IntRange(1), default=_DEFAULT.layers, show_default=True)
@default_option("--heads", _DEFAULT.heads, "KV heads.")
@click.option("--head-dim", type=click.IntRange(8), default=_DEFAULT.head_dim, show_default=True)
@default_option("--block-tokens", _DEFAULT.tokens_per_block, "Tokens of an engine's block.")
@threads_option("Copying threads of each system; use fewer if others use the cores.")
@folder_option()
@lmcache_option()
@json_option()
def command(
    only: tuple[str, ...],
    tiers: tuple[str, ...],
    rounds: int,
    tokens: int,
    lookup_tokens: int,
    layers: int,
    heads: int,
    head_dim: int,
    block_tokens: int,
    threads: int | None,
    folder: Path | None,
    lmcache_env: Path | None,
    json_file: Path | None,
) -> None:
    """Compare kvhold and LMCache 0.5.6 without an engine, on the CPU: same tokens, bytes, tiers.

    The first run makes an environment for LMCache (2 GB). As root on Debian or Ubuntu, it installs
    missing packages (redis-server, libibverbs1), unless KVHOLD_SETUP_SERVERS=0. Exits with 1 if
    kvhold failed, or loaded wrong bytes.
    """
    work = Work(
        num_tokens=tokens,
        lookup_tokens=lookup_tokens,
        tokens_per_block=block_tokens,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        rounds=rounds,
        threads=threads or cores(),
    )
    for name, value in (("--tokens", tokens), ("--lookup-tokens", lookup_tokens)):
        if value % work.tokens_per_chunk:
            raise click.BadParameter(
                f"{value} is no multiple of a chunk, {work.tokens_per_chunk} tokens",
                param_hint=name,
            )
    if work.tokens_per_chunk % block_tokens:
        raise click.BadParameter(
            f"{block_tokens} does not divide a chunk, {work.tokens_per_chunk} tokens",
            param_hint="--block-tokens",
        )
    systems, tiers = only or SYSTEMS, tiers or TIERS
    prompt_bytes = work.options("ram").prompt_bytes
    shape = (
        f"{tokens:,} tokens, {prompt_bytes / 1e6:.0f} MB of KV, chunks of "
        f"{work.tokens_per_chunk}, {work.threads} threads"
    )
    click.echo(f"{machine_and_load()}; {shape}")
    peers = set(systems) - set(OURS)
    provide(
        [*([VERBS] if peers else []), *(["redis-server"] if REDIS in tiers else [])], click.echo
    )
    lmcache = find_lmcache(lmcache_env, click.echo) if peers else None
    python = lmcache if isinstance(lmcache, Path) else None
    able = [name for name in SYSTEMS if name in systems and (name in OURS or python is not None)]
    starting = partial(launch, python=python, threads=work.threads)
    measured = (
        measure(work, able, tiers, starting, folder=folder, say=click.echo) if able else Measured()
    )
    if "ram" in tiers:
        measure_imports(measured, work, [name for name in (KVHOLD, SERVER) if name in able], python)
    measured.errors |= {(NO_TIER, name): str(lmcache) for name in systems if name not in able}
    rows = make_rows(measured)
    click.echo(f"\n{render(rows)}\n\n{render_goals(goals(rows), noise=False)}")
    write_rows(json_file, rows)
    if any(row.equal is False or (row.system in OURS and row.error) for row in rows):
        click.echo("kvhold bench compare-engines: FAILED", err=True)
        sys.exit(1)
