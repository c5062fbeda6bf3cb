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
    help="Seed of the random choices, so that a run can be repeated.",
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
    help="Place of the damage.",
)
@click.option(
    "--count",
    type=int,
    help="Number of damages; with --where tiers, for each tier. [default: 100,000 for frames, else "
    "10,000]",
)
@click.option(
    "--tier", "tiers", multiple=True, help="With --where tiers: only this tier; may be repeated."
)
@_seed
@_json
def damage(
    where: str, count: int | None, tiers: tuple[str, ...], seed: int, json_file: Path | None
) -> None:
    """Damage bytes on purpose: is each damage noticed?

    frames: flips, truncations and swaps of frames. memory: flipped bits in a real node's arena.
        tiers: the same with each tier, before, during and after the write, and in its values.
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
    """Kill a node while it stores and clears: are all acknowledged chunks hits afterwards?"""
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.soak import kills as run

    _report(lambda: run.run(rounds, seed), json_file)


@command.command()
@click.option("--minutes", default=30.0, show_default=True, help="Length of the run.")
@click.option(
    "--every-s",
    default=60.0,
    show_default=True,
    help="Time between two kills of Redis; each time it is down for a sixth of this time.",
)
@_seed
@_json
def redis(minutes: float, every_s: float, seed: int, json_file: Path | None) -> None:
    """Run vLLM with a Redis that is killed repeatedly: wrong tokens, errors, growing memory?"""
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.soak import redis as run

    _report(lambda: run.run(minutes, every_s, seed), json_file)


@command.command()
@click.option("--requests", default=2_000, show_default=True, help="Least number of requests.")
@click.option("--nodes", default=8, show_default=True, type=click.IntRange(2, 32))
@click.option(
    "--network",
    type=click.Choice(["namespaces", "relays"]),
    help="One network namespace for each node (needs root), or relays on loopback. [default: "
    "namespaces if permitted]",
)
@_seed
@_json
def peers(
    requests: int, nodes: int, network: str | None, seed: int, json_file: Path | None
) -> None:
    """Kill, restart and cut off nodes that serve each other: is all KV right, and soon found?"""
    with needing("'kvhold[lab]'"):
        from kvhold_lab.bench.second_host import NoSecondHost
        from kvhold_lab.bench.soak import peers as soak
        from kvhold_lab.bench.soak.peers_fleet import relays_network

    def run() -> soak.PeersSoak:
        if network != "relays":
            try:
                return soak.run(requests, seed, nodes=nodes)
            except NoSecondHost as error:
                if network:
                    raise click.ClickException(f"--network: {error}") from None
                click.echo(f"relays on loopback, as {error}", err=True)
        return soak.run(requests, seed, nodes=nodes, network_of=relays_network)

    _report(run, json_file)


@command.command()
@click.option("--requests", default=10_000, show_default=True, help="Number of requests.")
@_seed
@_json
def requests(requests: int, seed: int, json_file: Path | None) -> None:
    """Send random requests to two vLLMs that share one full node: are all tokens right?"""
    with needing("vLLM and 'kvhold[lab]'"):
        from kvhold_lab.bench.soak import requests as soak

    _report(lambda: soak.run(requests, seed), json_file)


@command.command()
@click.option("--requests", default=2_000, show_default=True, help="Number of requests.")
@_seed
@_json
def blend(requests: int, seed: int, json_file: Path | None) -> None:
    """As `requests`, half of them blended: do all others get exact KV and tokens?"""
    with needing("vLLM and 'kvhold[lab]'"):
        from kvhold_lab.bench.soak import requests as soak

    _report(lambda: soak.run(requests, seed, blends=True), json_file)


@command.command()
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(1, 8))
@click.option("--decode", default=1, show_default=True, type=click.IntRange(1, 8))
@click.option(
    "--hosts",
    default=1,
    show_default=True,
    type=click.IntRange(1, 2),
    help="2: the prefill engines are in a network namespace of their own (needs root).",
)
@click.option(
    "--with-smaller", is_flag=True, help="Also with fewer of the engines: 1P1D and so on."
)
@click.option(
    "--requests", default=2_000, show_default=True, help="Number of requests, of each shape."
)
@_seed
@_json
def handovers(
    prefill: int,
    decode: int,
    hosts: int,
    with_smaller: bool,
    requests: int,
    seed: int,
    json_file: Path | None,
) -> None:
    """Send random requests to prefill and decode engines, and leave: are all tokens right?"""
    with needing("vLLM and 'kvhold[lab]'"):
        from kvhold_lab.bench.pd.faults import PdShape
        from kvhold_lab.bench.second_host import NoSecondHost
        from kvhold_lab.bench.soak import handovers as soak

    def tell(text: str) -> None:
        click.echo(text, err=True)

    def run() -> soak.HandoverSoaks:
        shape = PdShape(prefill, decode)
        return soak.run(
            requests, seed, shape=shape, hosts=hosts, with_smaller=with_smaller, say=tell
        )

    try:
        _report(run, json_file)
    except NoSecondHost as error:
        raise click.ClickException(f"--hosts: {error}") from None


@command.command()
@click.option(
    "--seeds",
    default=2_000,
    show_default=True,
    help="Number of seeds from --first on; with --mutations, the most for each mutation.",
)
@click.option("--first", default=1, show_default=True, help="The first seed.")
@click.option("--trace", is_flag=True, help="Run only the first seed, and print its history.")
@click.option(
    "--mutations",
    is_flag=True,
    help="Apply each of the patches that break the code: is each found?",
)
@click.option(
    "--mutation",
    "names",
    multiple=True,
    help="Apply only this patch, also a rare one; may be repeated.",
)
@click.option(
    "--hosts",
    type=click.IntRange(2, 100),
    default=None,
    help="Simulate this many hosts, which are each other's peers.",
)
@_json
def simulation(
    seeds: int,
    first: int,
    hosts: int | None,
    trace: bool,
    mutations: bool,
    names: tuple[str, ...],
    json_file: Path | None,
) -> None:
    """Run node, clients and tiers in virtual time with random faults: is a rule broken?"""
    from kvhold_lab.simulation import soak

    def tell(text: str) -> None:
        click.echo(text, err=True)

    if trace:
        raise SystemExit(soak.trace(first, hosts=hosts or 0))
    if mutations or names:
        _report(
            lambda: soak.run_mutations(seeds, first, names=names, hosts=hosts or 0, tell=tell),
            json_file,
        )
    else:
        _report(lambda: soak.run(seeds, first, hosts=hosts or 0, tell=tell), json_file)


def _report(run: Callable[[], Any], json_file: Path | None) -> None:
    result = run()
    text = json.dumps(asdict(result), indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if not result.passed:
        raise SystemExit(1)
