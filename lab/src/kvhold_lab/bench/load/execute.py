import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvhold_lab.bench.load.compare_policies import compare
from kvhold_lab.bench.load.options import Common
from kvhold_lab.bench.load.report import (
    Gates,
    Summary,
    render,
    request_line,
    summarise,
    summary_line,
)
from kvhold_lab.bench.load.setup import arguments_of, json_lines, make_endpoint, prompts_of
from kvhold_lab.bench.load.work import Result, Workload
from kvhold_lab.bench.rows import needing

if TYPE_CHECKING:
    from kvhold_lab.bench.load.client import Endpoint


def run(name: str, common: Common, workload: Workload, gates: Gates) -> None:
    if common.compare_policy:
        compare(name, common, workload, gates)
        return
    from kvhold_lab.bench.load.measure import LoadMeasurement, measure

    if common.plot is not None or common.html is not None:
        with needing("'kvhold[lab]'"):
            import matplotlib  # noqa: F401 - better known now than after the run
    prompts = prompts_of(common)
    measured = LoadMeasurement()
    with _server(common) as endpoint, json_lines(common.json_file) as write:
        click.echo(
            f"{name} against {endpoint.base_url}, model {endpoint.model}, {prompts.kind} as prompts"
        )
        asyncio.run(
            measure(
                endpoint,
                workload,
                prompts,
                measured,
                prewarm=common.prewarm,
                progress_s=common.progress_s,
                keep=lambda result: write(request_line(result)),
            )
        )
        if not measured.results:
            raise click.ClickException("there is nothing to report: no request has ended")
        sent = {
            "base_url": endpoint.base_url,
            "model": endpoint.model,
            "api": endpoint.api,
            "prompts": prompts.kind,
            "seed": common.seed,
        }
        arguments = sent | arguments_of(workload)
        summary = summarise(
            name, arguments, measured.results, measured.hits, interrupted=measured.interrupted
        )
        write(summary_line(summary))
    click.echo(f"\n{render(summary)}")
    _draw(common, summary, measured.results, f"kvhold bench load {name}: {endpoint.model}")
    _judge(summary, replace(gates, max_errors=common.expect_max_errors))


def _judge(summary: Summary, gates: Gates) -> None:
    broken = gates.broken(summary)
    if not summary.total.requests:
        broken.append("no request succeeded")
    for sentence in broken:
        click.echo(f"kvhold bench load: FAILED: {sentence}", err=True)
    if broken:
        sys.exit(1)


def _draw(common: Common, summary: Summary, results: list[Result], title: str) -> None:
    if common.plot is not None or common.html is not None:
        from kvhold_lab.bench.load.pictures import draw, write_page

        if common.plot is not None:
            draw(results, title, common.plot)
        if common.html is not None:
            write_page(summary, results, title, common.html)


@contextmanager
def _server(common: Common) -> "Iterator[Endpoint]":
    from kvhold_lab.bench.load.client import checked_url
    from kvhold_lab.bench.load.demo_server import demo_server

    with ExitStack() as stack:
        if common.serve_demo is not None:
            if common.base_url is not None:
                raise click.UsageError(
                    "--serve-demo starts a server of its own; leave --base-url out"
                )
            click.echo(f"starting vLLM with kvhold and the {common.serve_demo} model ...")
            server = stack.enter_context(
                demo_server(
                    common.serve_demo,
                    context_tokens=common.demo_context,
                    ram_bytes=common.demo_ram,
                    disk_bytes=common.demo_disk or 0,
                )
            )
            base_url = server.base_url
        elif common.base_url is None:
            raise click.UsageError(
                "name a server with --base-url, or have one started with --serve-demo"
            )
        else:
            base_url = checked_url(common.base_url)
        yield make_endpoint(common, base_url)
