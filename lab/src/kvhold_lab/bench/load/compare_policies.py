import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
import msgspec

from kvhold_lab.bench.load.options import Common
from kvhold_lab.bench.load.policy_rows import compared, tables
from kvhold_lab.bench.load.report import Gates, render_table, request_line
from kvhold_lab.bench.load.setup import arguments_of, json_lines, make_endpoint, prompts_of
from kvhold_lab.bench.load.work import Workload

if TYPE_CHECKING:
    from kvhold_lab.bench.load.client import Endpoint


def compare(name: str, common: Common, workload: Workload, gates: Gates) -> None:
    from kvhold_lab.bench.load.measure import LoadMeasurement, measure_in_turns

    _check(common, gates)
    prompts = prompts_of(common)
    measured = {policy: LoadMeasurement() for policy in common.compare_policy}
    with _servers(common) as endpoints, json_lines(common.json_file) as write:
        asyncio.run(
            measure_in_turns(
                endpoints,
                workload,
                prompts,
                measured,
                prewarm=common.prewarm,
                progress_s=common.progress_s,
                keep=lambda policy, result: write(request_line(result, policy=policy)),
            )
        )
        rows, differences = compared({policy: own.results for policy, own in measured.items()})
        sent = {
            "workload": name,
            "model": common.serve_demo,
            "ram_bytes": common.demo_ram,
            "disk_bytes": common.demo_disk or 0,
            "seed": common.seed,
            **arguments_of(workload),
        }
        for row in rows:
            hits = {phase: asdict(own) for phase, own in measured[row.policy].hits.items()}
            fields = {"type": "policy", **asdict(row), "hits": hits, "arguments": sent}
            write(msgspec.json.encode(fields) + b"\n")
        for difference in differences:
            write(msgspec.json.encode({"type": "difference", **asdict(difference)}) + b"\n")
    for title, cells in tables(rows, differences):
        click.echo(f"\n{render_table(title, cells)}")
    if any(own.interrupted for own in measured.values()):
        click.echo("\ninterrupted: only the results so far")
    _judge(common, {row.policy: row.errors for row in rows})


def _check(common: Common, gates: Gates) -> None:
    if common.serve_demo is None or common.base_url is not None:
        raise click.UsageError(
            "--compare-policy starts servers of its own; add --serve-demo, and leave --base-url out"
        )
    if (
        len(set(common.compare_policy)) != len(common.compare_policy)
        or len(common.compare_policy) < 2
    ):
        raise click.UsageError(
            "--compare-policy needs two policies or more, such as --compare-policy lru "
            "--compare-policy learned"
        )
    if common.plot is not None or common.html is not None or gates != Gates():
        raise click.UsageError(
            "--compare-policy has no --plot, no --html, and no --expect-ttft-gain or "
            "--expect-latency-gain"
        )


@contextmanager
def _servers(common: Common) -> "Iterator[dict[str, Endpoint]]":
    from kvhold_lab.bench.load.demo_server import demo_server

    assert common.serve_demo is not None
    with ExitStack() as stack:
        endpoints = {}
        for policy in common.compare_policy:
            click.echo(
                f"starting vLLM with kvhold ({policy}) and the {common.serve_demo} model ..."
            )
            server = stack.enter_context(
                demo_server(
                    common.serve_demo,
                    context_tokens=common.demo_context,
                    ram_bytes=common.demo_ram,
                    disk_bytes=common.demo_disk or 0,
                    policy=policy,
                    prefix_caching=False,
                )
            )
            endpoints[policy] = make_endpoint(common, server.base_url)
        yield endpoints


def _judge(common: Common, errors: dict[str, int]) -> None:
    broken = [
        f"{policy}: no request succeeded"
        for policy in common.compare_policy
        if policy not in errors
    ]
    most = common.expect_max_errors
    if most is not None:
        broken += [
            f"{policy}: {num} failed requests; expected at most {most}"
            for policy, num in errors.items()
            if num > most
        ]
    for sentence in broken:
        click.echo(f"kvhold bench load: FAILED: {sentence}", err=True)
    if broken:
        sys.exit(1)
