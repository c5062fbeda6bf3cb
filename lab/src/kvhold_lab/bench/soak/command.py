"""`kvhold bench soak`."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhold_lab.bench.rows import needing
from kvhold_lab.options import json_option

_json = json_option("the result")
_seed = click.option(
    "--seed",
    default=1,
    show_default=True,
    help="Of the random choices, so that a run can be repeated.",
)


@click.group()
def command() -> None:
    """Long runs that must find nothing. Each exits with 1 if it finds something."""


@command.command()
@click.option(
    "--where",
    type=click.Choice(["frames", "memory", "tiers"]),
    default="frames",
    show_default=True,
    help="What is damaged.",
)
@click.option(
    "--count",
    type=int,
    help="How often; of tiers, over each.  [default: 100,000 frames, else 10,000]",
)
@click.option(
    "--tier", "tiers", multiple=True, help="With --where tiers: this one alone; may be repeated."
)
@_seed
@_json
def damage(
    where: str, count: int | None, tiers: tuple[str, ...], seed: int, json_file: Path | None
) -> None:
    """Damage on purpose: is each one noticed?

    frames: flips, truncations and swaps of frames. memory: flipped bits in a real node's arena.
        tiers: the same over each tier, before, during and after the write, and in its values.
    """
    if where == "frames":
        from kvhold_lab.bench.soak import damage as run

        _report(lambda: run.run(count or 100_000, seed), json_file)
        return
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.soak import flips
    if unknown := set(tiers) - set(flips.TIERS):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}; known are {', '.join(flips.TIERS)}", param_hint="--tier"
        )
    if where == "memory":
        _report(lambda: flips.in_memory(count or 10_000, seed), json_file)
    else:
        _report(lambda: flips.in_tiers(count or 10_000, seed, tiers), json_file)


@command.command()
@click.option("--rounds", default=1_000, show_default=True, help="How often the node is killed.")
@_seed
@_json
def kills(rounds: int, seed: int, json_file: Path | None) -> None:
    """`kill -9` of a node that stores and clears: are all acknowledged chunks hits afterwards?"""
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.soak import kills as run

    _report(lambda: run.run(rounds, seed), json_file)


@command.command()
@click.option("--minutes", default=30.0, show_default=True, help="How long.")
@click.option(
    "--every-s",
    default=60.0,
    show_default=True,
    help="How often Redis is killed; it is away for a sixth of that.",
)
@_seed
@_json
def redis(minutes: float, every_s: float, seed: int, json_file: Path | None) -> None:
    """A real vLLM over a Redis that is killed repeatedly: wrong tokens, errors, growing memory?"""
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.soak import redis as run

    _report(lambda: run.run(minutes, every_s, seed), json_file)


@command.command()
@click.option("--requests", default=10_000, show_default=True, help="How many.")
@_seed
@_json
def requests(requests: int, seed: int, json_file: Path | None) -> None:
    """Random requests of two vLLM engines over one evicting node: are all tokens right?"""
    with needing("vLLM and 'kvhold[lab]'"):
        from kvhold_lab.bench.soak import requests as soak

    _report(lambda: soak.run(requests, seed), json_file)


@command.command()
@click.option(
    "--seeds",
    default=2_000,
    show_default=True,
    help="How many; with --mutations, the most for each, from --first on.",
)
@click.option("--first", default=1, show_default=True, help="The first seed.")
@click.option(
    "--trace", is_flag=True, help="Print the history of the first seed, and run no other."
)
@click.option(
    "--mutations",
    is_flag=True,
    help="Damage the code in each of the ways that are kept: is each found?",
)
@click.option(
    "--mutation", "names", multiple=True, help="With --mutations: this one alone; may be repeated."
)
@_json
def simulation(
    seeds: int,
    first: int,
    trace: bool,
    mutations: bool,
    names: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Node, clients and tiers in virtual time with random faults: is a rule broken?"""
    from kvhold_lab.simulation import soak

    def tell(text: str) -> None:
        click.echo(text, err=True)

    if trace:
        raise SystemExit(soak.trace(first))
    if mutations:
        _report(lambda: soak.run_mutations(seeds, first, names=names, tell=tell), json_file)
    else:
        _report(lambda: soak.run(seeds, first, tell=tell), json_file)


def _report(run: Callable[[], Any], json_file: Path | None) -> None:
    result = run()
    text = json.dumps(asdict(result), indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if not result.passed:
        raise SystemExit(1)
