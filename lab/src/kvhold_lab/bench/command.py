import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvhold_lab.bench.blend.command import command as blend
from kvhold_lab.bench.compare.command import command as compare
from kvhold_lab.bench.compare.command import vllm
from kvhold_lab.bench.compare_engines.command import command as compare_engines
from kvhold_lab.bench.gpu.command import command as gpu
from kvhold_lab.bench.history import command as history
from kvhold_lab.bench.load.command import command as load
from kvhold_lab.bench.pd.command import command as pd
from kvhold_lab.bench.planner.command import command as planner
from kvhold_lab.bench.quality.command import command as quality
from kvhold_lab.bench.rows import Row, machine_and_load, needing, table, write_rows
from kvhold_lab.bench.second_host import NoSecondHost
from kvhold_lab.bench.soak.command import command as soak
from kvhold_lab.engines.engine import is_vllm_available
from kvhold_lab.interruption import ending_in_order
from kvhold_lab.options import (
    Number,
    default_option,
    folder_option,
    json_option,
    model_size_option,
    only_option,
    tokens_option,
)
from kvhold_lab.simulate.fleet_command import command as fleet

_PARTS = (
    *("hashing", "index", "policies", "lookup", "frames"),
    *("gather", "rope", "memory", "wire", "startup"),
)
_MARKS = {True: "yes", False: "NO", None: "-"}


@click.group()
@click.pass_context
def command(context: click.Context) -> None:
    """Measure kvhold, and limits in the same run.

    Values are medians.
    """
    context.with_resource(ending_in_order())


@command.command()
@only_option("--only", "only", f": {', '.join(_PARTS)}")
@click.option(
    "--profile",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a profile of each row that is under 0.8 of its limit.",
)
@json_option()
def micro(only: tuple[str, ...], folder: Path | None, json_file: Path | None) -> None:
    """Measure hashing, index, policies, lookup, frames, copies, rotary keys, memory, wire and
    start-up.
    """
    from kvhold_lab.bench.profiles import Profiles

    _check_names(only, _PARTS)
    click.echo(f"{_machine()}\n")
    profiles = Profiles(folder)
    measured: list[Row] = []
    for part in only or _PARTS:
        measured += import_module(f"kvhold_lab.bench.{part}").rows(profiles)
    click.echo(table(measured))
    write_rows(json_file, measured)


@command.command()
@only_option("--tier", "only", ": disk, redis, s3, kvhold")
@folder_option()
@json_option()
def tiers(only: tuple[str, ...], folder: Path | None, json_file: Path | None) -> None:
    """Put and get of each tier, compared with the plainest program for the same store."""
    with needing("'kvhold[lab,s3]' redis hiredis"):
        from kvhold_lab.bench.tiers import TIERS, TierRow, rows
        from kvhold_lab.servers.base import NotInstalled

    _check_names(only, TIERS)
    click.echo(f"{_machine()}\n")
    measured: list[TierRow] = []
    for tier in only or tuple(TIERS):
        try:
            with needing("'kvhold[s3]' redis hiredis"):
                found = rows(tier, where=folder)
            for row in found:
                measured.append(row)
                shown = (
                    f"{row.tier:8} {row.op:21} {row.mb_s:8.0f} {row.unit:8} {row.ratio:5.2f} "
                    f"of {row.limit_mb_s:8.0f} ({row.limit})"
                )
                click.echo(shown)
        except NotInstalled as error:
            click.echo(f"{tier:8} not measured: {error}")
    write_rows(json_file, measured)


@command.command()
@only_option("--codec", "only", ", by name; plugins too")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Measure also on the KV of this checkpoint, a folder for transformers.",
)
@click.option(
    "--accuracy/--no-accuracy",
    default=True,
    help="Measure also the cost in answers, as `kvhold bench quality`. [default: yes]",
)
@json_option()
def codecs(
    only: tuple[str, ...], model: Path | None, accuracy: bool, json_file: Path | None
) -> None:
    """Ratio, speed on one core, error and lost accuracy of each codec on bfloat16 KV.

    Accuracy needs a checkout's small trained model, and torch; else accuracy_drop is null.
    """
    from kvhold.codecs import codec_names
    from kvhold_lab.bench import codecs as bench
    from kvhold_lab.bench.quality.run import NotMeasurable, evaluate

    _check_names(only, codec_names())
    samples = {"synthetic": bench.synthetic(), "normal": bench.normal()}
    drops: dict[str, float | None] = {}
    if accuracy:
        try:
            samples["trained"] = bench.trained()
            drops = {row.codec: row.accuracy_drop for row in evaluate(only or codec_names()).rows}
        except NotMeasurable as error:
            click.echo(f"accuracy is not measured: {error}")
    if model is not None:
        with needing("'kvhold[transformers]'"):
            samples[model.name] = bench.from_model(model)
    click.echo(f"{_machine()}; one thread\n\n{bench.HEADING}")
    measured: list[bench.CodecRow] = []
    for row in bench.rows(only or codec_names(), samples, drops=drops):
        measured.append(row)
        click.echo(row)
    write_rows(json_file, measured)


@command.command()
@only_option("--tier", "tiers", ": disk, fs, redis, memcached, s3, kvhold")
@only_option("--fault", "only", ", such as 'dies mid-put'")
@json_option()
def faults(tiers: tuple[str, ...], only: tuple[str, ...], json_file: Path | None) -> None:
    """Make each tier fail in each way: are bytes, node and deadlines right? If not, exit with 1."""
    with needing("'kvhold[lab,s3]'"):
        from kvhold_lab.bench.faults import FAULTS, FaultRow, rows
        from kvhold_lab.bench.places import PLACES
        from kvhold_lab.servers.base import NotInstalled

    _check_names(tiers, PLACES)
    _check_names(only, FAULTS)
    measured: list[FaultRow] = []
    for tier in tiers or tuple(PLACES):
        try:
            for row in rows([tier], only or tuple(FAULTS)):
                measured.append(row)
                marks = [
                    f"{name} {_MARKS[value]:4}"
                    for name, value in asdict(row).items()
                    if name not in ("tier", "fault", "detail")
                ]
                click.echo(f"{row.tier:8} {row.fault:14} {' '.join(marks)} {row.detail}".rstrip())
        except NotInstalled as error:
            click.echo(f"{tier:8} not tried: {error}")
    write_rows(json_file, measured)
    if any(
        False in (row.right, row.alive, row.in_deadline, row.baseline, row.counted)
        for row in measured
    ):
        raise SystemExit(1)


@command.command()
@only_option("--codec", "only", ", by name")
@model_size_option()
@tokens_option(least=256)
@default_option("--prompts", 5, "Number of prompts.")
@default_option("--gbit-s", 1.0, "Rate of the link in each direction.", Number(0.001))
@json_option()
def link(
    only: tuple[str, ...],
    model_size: str,
    tokens: int,
    prompts: int,
    gbit_s: float,
    json_file: Path | None,
) -> None:
    """TTFT of a real vLLM's hits from a Redis behind a slow link, by codec."""
    from kvhold.codecs import codec_names

    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.link import LinkRow, rows
        from kvhold_lab.servers.base import NotInstalled, program
    from kvhold_lab.engines.models import make_model

    _check_names(only, codec_names())
    try:
        program("redis-server", "apt-get install redis-server")
    except NotInstalled as error:
        raise click.ClickException(str(error)) from None
    model = make_model(model_size)
    click.echo(
        f"{tokens:,}-token prompts, {model.num_parameters / 1e6:.0f}M parameters, float32 "
        f"KV, a link of {gbit_s:g} Gbit/s\n"
    )
    click.echo(
        f"{'codec':10} {'ratio':>6} {'TTFT s':>8} {'link s':>8} {'KL':>10} {'tokens':>9} "
        f"{'loaded':>7}"
    )
    measured: list[LinkRow] = []
    threads = len(os.sched_getaffinity(0))
    names = only or codec_names()
    for row in rows(
        names, model, num_tokens=tokens, num_prompts=prompts, gbit_s=gbit_s, num_threads=threads
    ):
        measured.append(row)
        ratio, link_s = (
            f"{value:.2f}" if value is not None else "-" for value in (row.ratio, row.link_s)
        )
        equal = "equal" if row.tokens_equal else "differ"
        click.echo(
            f"{row.codec:10} {ratio:>6} {row.ttft_p50_s:8.3f} {link_s:>8} {row.kl:10.2e} "
            f"{equal:>9} {row.cached_share:7.1%}"
        )
        write_rows(json_file, measured)


@command.command()
@default_option("--clients", 256, "Connections to the node.", click.IntRange(1, 10_000))
@default_option(
    "--chunks", 1_000_000, "Chunks in memory's index, and as many on disk.", click.IntRange(1_000)
)
@default_option(
    "--tokens", 1_000_000, "Tokens of the long prompt (6 groups, 8 shards).", click.IntRange(1_000)
)
@json_option()
def overload(clients: int, chunks: int, tokens: int, json_file: Path | None) -> None:
    """One overloaded node: longest loop turns, lookups while engines store, index sizes."""
    from kvhold_lab.bench.overload import OverloadRow, OverloadSizes, rows

    click.echo(f"{_machine()}\n")
    measured: list[OverloadRow] = []
    for row in rows(OverloadSizes(clients=clients, chunks=chunks, long_tokens=tokens)):
        measured.append(row)
        click.echo(
            f"{row.name:60} {row.value:12.3f} {row.unit:16} goal {row.goal:g} "
            f"{'' if row.ok else 'NOT MET'}"
        )
    write_rows(json_file, measured)


@command.command()
@default_option("--chunks", 1_000_000, "Chunks in memory.", click.IntRange(1_000))
@default_option("--namespaces", 200, "They share the chunks.", click.IntRange(1))
@default_option("--scrapes", 1_000, "Of the metrics.", click.IntRange(1))
@default_option("--calls", 10_000, "Of the API.", click.IntRange(1))
@json_option()
def control(chunks: int, namespaces: int, scrapes: int, calls: int, json_file: Path | None) -> None:
    """The cost of scrapes and API calls to lookups, and the time until the dashboard is shown."""
    with needing("'kvhold[control]'"):
        from kvhold_lab.bench.control import ControlRow, ControlSizes, rows

    click.echo(f"{_machine()}\n")
    measured: list[ControlRow] = []
    sizes = ControlSizes(chunks=chunks, namespaces=namespaces, scrapes=scrapes, calls=calls)
    for row in rows(sizes):
        measured.append(row)
        limit = "" if row.limit is None else f"limit {row.limit:g}, ratio {row.ratio:.3f}"
        if row.interval is not None:
            limit += f" ({row.interval[0]:.3f}-{row.interval[1]:.3f}; noise {row.noise:.3f})"
        verdict = "NOT MET" if row.ok is False else "undecided" if row.ok is None and limit else ""
        click.echo(f"{row.name:66} {row.value:10.3f} {row.unit:3} {limit} {verdict}")
    write_rows(json_file, measured)


@command.command()
@default_option("--agents", 9, "At the same time; 44 % have subagents.", click.IntRange(1))
@default_option("--turns", 43, "Of each agent.", click.IntRange(2))
@json_option()
def sessions(agents: int, turns: int, json_file: Path | None) -> None:
    """Memory that agents' sessions need, with retains and with superseding turns.

    The mini engine at a 1/48 scale, with a real node.
    """
    with needing("vllm 'kvhold[lab]'"):
        from kvhold_lab.bench.sessions.run import SessionsRow, SessionsSizes, rows

    click.echo(f"{_machine()}\n")
    measured: list[SessionsRow] = []
    for row in rows(SessionsSizes(agents=agents, turns=turns)):
        measured.append(row)
        click.echo(
            f"{row.arm:8} {row.ram_bytes >> 20:4} MiB, {row.turns} turns: "
            f"{row.hit_ratio:6.1%} of {row.possible_tokens:,} possible tokens hit, "
            f"{row.peak_retained_bytes >> 20} MiB retained, TTFT {row.ttft_p50_s:.3f} s"
            f"{'' if row.is_right else ', WRONG TOKENS'}"
        )
        write_rows(json_file, measured)


@command.command()
@default_option("--rounds", 9, "Rounds of each measurement.", click.IntRange(1))
@default_option("--chunks", 100_000, "Chunks of each of the 8 peers.", click.IntRange(1_000))
@click.option(
    "--only",
    "only",
    multiple=True,
    help="Only these: get, link, nixl, index, events, serving; mooncake and lmcache; hosts and "
    "once, with two vLLMs. [default: the first six]",
)
@model_size_option("mid")
@tokens_option()
@default_option(
    "--wire-mbit-s", 10_000.0, "Rate of the network between two hosts.", Number(0, min_open=True)
)
@default_option("--engine-rounds", 3, "Rounds of hosts and once.")
@default_option("--threads", 1, "Threads of each engine.")
@json_option()
def peers(only: tuple[str, ...], json_file: Path | None, model_size: str, **sizes: Any) -> None:
    """Nodes that serve each other on this machine: reads, lookups, index, events, engines.

    The part "hosts" needs root.
    """
    from kvhold.net.nixl_agent import MISSING, is_installed
    from kvhold_lab.bench.peers import OTHERS, PARTS, WITH_ENGINES, rows
    from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes

    _check_names(only, (*PARTS, *OTHERS, *WITH_ENGINES))
    if set(only) & set(WITH_ENGINES) and not is_vllm_available():
        raise click.ClickException("vLLM is not installed here: hosts and once run real ones")
    click.echo(f"{machine_and_load()}, {os.cpu_count()} cores\n")
    measured: list[PeersRow] = []
    try:
        for row in rows(PeersSizes(model=model_size, **sizes), only):
            measured.append(row)
            click.echo(
                f"{row.name}\n    {row.value:.3f} {row.unit}, limit {row.limit:.3f}, "
                f"ratio {row.ratio:.3f} (goal: {row.goal})"
            )
            write_rows(json_file, measured)
    except NoSecondHost as error:
        raise click.ClickException(f"hosts: {error}") from None
    if not only and not is_installed():
        click.echo(f"there is no row for NIXL: {MISSING}")


command.add_command(blend, "blend")
command.add_command(compare, "compare")
command.add_command(compare_engines, "compare-engines")
command.add_command(fleet, "fleet")
command.add_command(gpu, "gpu")
command.add_command(history, "history")
command.add_command(load, "load")
command.add_command(pd, "pd")
command.add_command(planner, "planner")
command.add_command(quality, "quality")
command.add_command(soak, "soak")
command.add_command(vllm, "vllm")


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _check_names(given: Sequence[str], known: Iterable[str]) -> None:
    if unknown := set(given) - set(known):
        raise click.UsageError(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
