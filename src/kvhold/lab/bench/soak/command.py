"""`kvhold bench soak`: long runs that must find nothing."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvhold.lab.bench.rows import needing
from kvhold.lab.options import OutputFile

_json = click.option("--json", "json_file", type=OutputFile(), help="Write the result to this file.")
_seed = click.option("--seed", default=1, show_default=True, help="Of the random choices, so that a run can be repeated.")


@click.group()
def command() -> None:
    """Long runs that must find nothing. Each exits with 1 if it found something."""


@command.command()
@click.option("--count", default=100_000, show_default=True, help="How many frames are damaged.")
@_seed
@_json
def damage(count: int, seed: int, json_file: Path | None) -> None:
    """Flips, truncations and swaps of frames on their way up: is each one noticed?"""
    from kvhold.lab.bench.soak import damage as run

    _report(lambda: run.run(count, seed), json_file)


@command.command()
@click.option("--rounds", default=1_000, show_default=True, help="How often the node is killed.")
@_seed
@_json
def kills(rounds: int, seed: int, json_file: Path | None) -> None:
    """`kill -9` of a node that stores and clears: is every acknowledged chunk on disk a hit afterwards, and the accounting exact?"""
    with needing("'kvhold[testing]'"):
        from kvhold.lab.bench.soak import kills as run

    _report(lambda: run.run(rounds, seed), json_file)


@command.command()
@click.option("--minutes", default=30.0, show_default=True, help="How long.")
@click.option("--every-s", default=60.0, show_default=True, help="How often Redis is killed; it is away for a sixth of that.")
@_seed
@_json
def redis(minutes: float, every_s: float, seed: int, json_file: Path | None) -> None:
    """A real vLLM over Redis, which is killed and started again and again: wrong tokens, errors, memory that grows?"""
    with needing("'kvhold[testing]'"):
        from kvhold.lab.bench.soak import redis as run

    _report(lambda: run.run(minutes, every_s, seed), json_file)


@command.command()
@click.option("--requests", default=10_000, show_default=True, help="How many.")
@_seed
@_json
def requests(requests: int, seed: int, json_file: Path | None) -> None:
    """Random requests of two vLLM engines over one node that evicts all the time: is every token that of an engine without kvhold?"""
    with needing("vLLM and 'kvhold[testing]'"):
        from kvhold.lab.bench.soak import requests as soak

    _report(lambda: soak.run(requests, seed), json_file)


def _report(run: Callable[[], Any], json_file: Path | None) -> None:
    result = run()
    text = json.dumps(asdict(result), indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if not result.passed:
        raise SystemExit(1)
