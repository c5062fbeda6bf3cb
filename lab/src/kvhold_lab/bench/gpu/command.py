import platform
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import click

from kvhold_lab.bench.gpu.rows import GpuRow
from kvhold_lab.bench.rows import needing, write_rows
from kvhold_lab.options import json_option, only_option

PARTS = (
    "machine",
    "orders",
    "pieces",
    "kernels",
    "coding",
    "decode",
    "kills",
    "mini",
    "model",
    "verify",
    "vllm",
)
_MARKS = {True: "ok", False: "NOT MET", None: ""}


@click.command("gpu")
@click.option(
    "--device",
    "kind",
    type=click.Choice(["cuda", "cpu", "fake"]),
    default="cuda",
    show_default=True,
    help="The device that copies.",
)
@only_option("--part", "only", ", in this order", type=click.Choice(PARTS))
@json_option("the rows, after every part,")
@click.pass_context
def command(
    context: click.Context, kind: str, only: tuple[str, ...], json_file: Path | None
) -> None:
    """Measure a GPU's copies: limits, orders, pieces, kernels, coding, decoding, kills, engines.

    Exits with 1 if a check fails or a goal is not met. `cpu` and `fake` need no GPU.
    """
    with needing("torch numba"):
        import torch

        from kvhold_lab.bench.gpu.target import Kind, Target

    if kind == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("there is no GPU here; try --device cpu or --device fake")
    with needing("cuda-bindings"):
        target = Target(cast(Kind, kind))
    click.echo(
        f"{target.name}; torch {torch.__version__}, {platform.machine()}, Python "
        f"{platform.python_version()}\n"
    )
    measured: list[GpuRow] = []
    for part in only or PARTS:
        for row in _rows(part, target):
            measured.append(row)
            click.echo(_line(row))
        write_rows(json_file, measured)
    if any(row.ok is False for row in measured):
        context.exit(1)


def _rows(part: str, target: Any) -> Iterator[GpuRow]:
    try:
        with needing("torch numba"):
            rows: Iterator[GpuRow] = import_module(f"kvhold_lab.bench.gpu.{part}").rows(target)
        yield from rows
    except Exception as error:  # noqa: BLE001 - the other parts run
        traceback.print_exc()
        yield GpuRow(
            part,
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
            0,
            "",
            ok=False,
        )


def _line(row: GpuRow) -> str:
    limit = "" if row.limit is None else f"{row.ratio:6.3f} of {row.limit:g}"
    value = f"{row.value:10g} {row.unit:7}"
    return f"{row.part:8} {row.name:52} {value} {limit:22} {_MARKS[row.ok]}".rstrip()
