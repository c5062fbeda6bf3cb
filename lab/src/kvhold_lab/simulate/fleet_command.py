from itertools import product
from pathlib import Path

import click

from kvhold.cli.options import Size
from kvhold.core.sizes import format_size
from kvhold.tiers.peers.index import MOST_PEERS
from kvhold_lab.bench.rows import write_rows
from kvhold_lab.options import default_option, json_option
from kvhold_lab.simulate.fleet import ROUTINGS, FleetRow, FleetSetup, Routing, replay_fleet
from kvhold_lab.simulate.requests import BLOCK_TOKENS
from kvhold_lab.simulate.trace import read_trace

_HEADING = (
    f"{'hosts':>5} {'copies':>6} {'routing':8} {'memory':>8} {'shared':>8} {'here':>7} "
    f"{'peers':>7} {'shared':>7} {'computed':>8} {'changes/s':>9} {'read/s':>9} "
    f"{'from peers':>11} {'index':>10}"
)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--hosts",
    "sizes",
    multiple=True,
    default=(1, 8, 32),
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Hosts of the fleet.",
)
@click.option(
    "--copies",
    type=click.IntRange(1),
    help="Copies of the trace that the fleet serves, each with texts of its own. [default: one for "
    "each host]",
)
@click.option(
    "--routing",
    "routings",
    multiple=True,
    default=ROUTINGS,
    show_default=True,
    type=click.Choice(ROUTINGS),
    help="Which host a request goes to. random: any; affinity: one that has the longest prefix, "
    "unless it has 1.25 times the mean number of requests.",
)
@click.option(
    "--memory",
    "memories",
    multiple=True,
    default=(64 << 30,),
    show_default="64GiB",
    type=Size(),
    help="Size of each host's memory.",
)
@click.option(
    "--shared",
    "shared_sizes",
    multiple=True,
    default=(0,),
    show_default="none",
    type=Size(),
    help="Size of a tier that all hosts share.",
)
@default_option(
    "--peers",
    MOST_PEERS - 1,
    "How many others a host follows: those of its group. 0: none.",
    click.IntRange(0, 4095),
)
@click.option(
    "--bytes-per-token",
    "token_bytes",
    default=128 << 10,
    show_default="128KiB",
    type=Size(),
    help="KV bytes of a token.",
)
@default_option("--block-tokens", BLOCK_TOKENS, "Tokens that an id of the trace stands for.")
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(1),
    help="Number of requests to use, the first ones. [default: all]",
)
@default_option("--seed", 1, "Seed of the random routing.", click.IntRange(0))
@json_option()
def command(
    trace: Path,
    sizes: tuple[int, ...],
    copies: int | None,
    routings: tuple[Routing, ...],
    memories: tuple[int, ...],
    shared_sizes: tuple[int, ...],
    peers: int,
    token_bytes: int,
    block_tokens: int,
    num_requests: int | None,
    seed: int,
    json_file: Path | None,
) -> None:
    """Replay TRACE on fleets of hosts that are each other's peers.

    A line of TRACE is as for `kvhold simulate`, with a timestamp.
    """
    cut = read_trace(trace, block_tokens=block_tokens, num_requests=num_requests).cut(block_tokens)
    chunk_bytes = block_tokens * token_bytes
    rows: list[FleetRow] = []
    click.echo(_HEADING)
    for memory, shared, hosts, routing in product(memories, shared_sizes, sizes, routings):
        setup = FleetSetup(
            hosts=hosts,
            memory_chunks=memory // chunk_bytes,
            routing=routing,
            shared_chunks=shared // chunk_bytes,
            copies=copies or 0,
            peers=peers,
            seed=seed,
        )
        rows.append(replay_fleet(cut, setup, token_bytes))
        click.echo(_line(rows[-1]))
        write_rows(json_file, rows)


def _line(row: FleetRow) -> str:
    computed = 1 - row.found_here - row.found_at_peers - row.found_shared
    return (
        f"{row.hosts:5} {row.copies:6} {row.routing:8} {format_size(row.memory_bytes):>8} "
        f"{format_size(row.shared_bytes):>8} {row.found_here:7.2%} {row.found_at_peers:7.2%} "
        f"{row.found_shared:7.2%} {computed:8.2%} {row.changes_per_s:9.1f} "
        f"{row.changes_read_per_s:9.1f} {format_size(int(row.peer_bytes_per_s)):>9}/s "
        f"{row.index_chunks:10,.0f}"
    )
