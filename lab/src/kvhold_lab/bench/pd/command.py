import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhold_lab.bench.pd.faults import (
    FAULTS,
    KVHOLD,
    NIXL,
    ONE_EACH,
    SHAPES,
    PdFaultRow,
    failed_rows,
)
from kvhold_lab.bench.rows import machine_and_load, write_rows
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.engines.models import make_model
from kvhold_lab.options import (
    Number,
    default_option,
    json_option,
    model_size_option,
    only_option,
    tokens_option,
)

if TYPE_CHECKING:
    from kvhold_lab.bench.pd.trials import PdWork


@click.command()
@click.option("--faults", "is_faulty", is_flag=True, help="Try faults instead of measuring times.")
@only_option("--fault", "names", " faults", type=click.Choice(list(FAULTS)))
@default_option("--requests", 8, "Requests for each fault.", click.IntRange(2, 2_000))
@default_option(
    "--shape",
    ONE_EACH.name,
    "Numbers of prefill and decode engines, in faults.",
    click.Choice(list(SHAPES)),
)
@click.option(
    "--two-hosts",
    is_flag=True,
    help="The prefill engines are in a network namespace of their own (needs root); in faults, in "
    "those with two nodes.",
)
@default_option(
    "--wire-mbit-s", 0.0, "Rate of the network between two hosts; 0: no limit.", Number(0)
)
@default_option(
    "--deadline-s", 30.0, "Longest time of a request in a fault, with all its waits.", Number(0.1)
)
@default_option("--rounds", 7, "Rounds of times, after one that does not count.")
@click.option(
    "--reuse",
    "shares",
    multiple=True,
    type=click.IntRange(0, 99),
    default=(0, 50),
    show_default=True,
    help="Share of each timed prompt that was seen before, in %.",
)
@model_size_option("tiny")
@tokens_option(2_000, text=" Only of the timed ones.")
@default_option("--threads", 1, "Threads of each engine.")
@default_option("--seed", 1, "Seed of the faults' prompts.", click.INT)
@json_option()
def command(
    is_faulty: bool,
    names: tuple[str, ...],
    requests: int,
    shape: str,
    two_hosts: bool,
    wire_mbit_s: float,
    deadline_s: float,
    rounds: int,
    shares: tuple[int, ...],
    model_size: str,
    tokens: int,
    threads: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Prefill and decode on two real vLLMs behind `kvhold proxy`: how fast, and right under faults?

    Without --faults: times to the first token and between tokens, beside one engine. With --faults:
    engines, node, proxy and clients fail, and answers are compared with one engine's. Exits with 1
    if an answer is wrong or late, if something stays held, or if a request fails whose engines are
    there. vLLM's NixlConnector runs, too, if the package nixl is installed.
    """
    if names and not is_faulty:
        raise click.UsageError("--fault chooses faults: add --faults")
    if shape != ONE_EACH.name and not is_faulty:
        raise click.UsageError("--shape is for faults: add --faults")
    if wire_mbit_s and not two_hosts:
        raise click.UsageError("--wire-mbit-s limits the network of two hosts: add --two-hosts")
    if not is_vllm_available():
        raise click.ClickException("vLLM is not installed here: this command runs real ones")
    from kvhold_lab.bench.pd.pair import why_no_nixl
    from kvhold_lab.bench.pd.trials import PdWork
    from kvhold_lab.bench.second_host import NoSecondHost, second_host

    click.echo(f"{machine_and_load()}; {model_size} model, threads of each engine: {threads}")
    systems = [KVHOLD]
    if why := why_no_nixl():
        click.echo(f"no rows of {NIXL}: {why}")
    else:
        systems.append(NIXL)
    if is_faulty:
        trials = PdWork(make_model(model_size), requests, threads, deadline_s, seed, SHAPES[shape])
        try:
            with second_host(wire_mbit_s) if two_hosts else nullcontext() as host:
                trials = replace(trials, second_host=host)
                is_right = _try_faults(trials, names or tuple(FAULTS), systems, json_file)
        except NoSecondHost as error:
            raise click.ClickException(f"--two-hosts: {error}") from None
        if not is_right:
            sys.exit(1)
        return
    from kvhold_lab.bench.pd.speed import PdSpeedWork, PdTimes, measure, render, speed_rows

    work = PdSpeedWork(make_model(model_size), tokens, rounds, sorted(set(shares)), threads)
    times = PdTimes()
    try:
        with second_host(wire_mbit_s) if two_hosts else nullcontext() as host:
            measure(replace(work, second_host=host), systems, times, click.echo)
    except NoSecondHost as error:
        raise click.ClickException(f"--two-hosts: {error}") from None
    except KeyboardInterrupt:
        if not times.cells:
            raise
        click.echo("interrupted: this is what was measured until then")
    rows = speed_rows(times)
    click.echo(f"\n{render(rows)}")
    write_rows(json_file, rows)


def _try_faults(
    work: "PdWork", names: tuple[str, ...], systems: list[str], json_file: Path | None
) -> bool:
    from kvhold_lab.bench.pd.trials import fault_rows

    rows: list[PdFaultRow] = []
    for row in fault_rows(work, names, systems, click.echo):
        rows.append(row)
        handed = "-" if row.handed_tokens is None else f"{row.handed_tokens:,}"
        click.echo(
            f"{row.fault:19} {row.system:7} {row.requests:4} requests  wrong {row.wrong}  errors "
            f"{row.errors} ({row.errors_allowed} of gone engines)  late {row.deadline_missed}  "
            f"leaked {row.leaked}  handed over {handed:>6} tokens"
            f"{'' if row.is_right else '  NO'}"
        )
        if row.detail:
            click.echo(f"    {row.detail}")
        write_rows(json_file, rows)
    if bad := failed_rows(rows):
        click.echo(f"kvhold bench pd: FAILED: {', '.join(row.fault for row in bad)}", err=True)
    return not bad
