"""`kvhold bench`: measure, against limits taken in the same run."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from kvhold.cli.bench.rows import Row, table


@click.group()
def command() -> None:
    """Measure, against limits taken in the same run. Medians; machines are noisy, so trust the ratios."""


@command.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows to this file.")
def micro(json_file: Path | None) -> None:
    """Gather and scatter, lookup through a node, start-up."""
    from kvhold.cli.bench import gather, lookup, startup

    click.echo(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    measured: list[Row] = []
    for part in (gather, lookup, startup):
        measured += part.rows()
    click.echo(table(measured))
    if json_file is not None:
        _write(json_file, measured)


def _write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
