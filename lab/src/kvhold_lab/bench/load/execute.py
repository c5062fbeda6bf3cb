"""Run a workload: server, measurement, results and verdict."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.options import Common
from kvhold_lab.bench.load.prompts import Content, Prompts, TextPrompts, TokenPrompts
from kvhold_lab.bench.load.report import (
    Gates,
    Summary,
    render,
    request_line,
    summarise,
    summary_line,
)
from kvhold_lab.bench.load.work import Result, Workload
from kvhold_lab.bench.rows import needing

if TYPE_CHECKING:
    from kvhold_lab.bench.load.client import Endpoint

_SEPARATOR_TEXT, _SEPARATOR_TOKENS = " # # ", 4


def run(name: str, common: Common, workload: Workload, gates: Gates) -> None:
    if common.compare_policy:
        from kvhold_lab.bench.load.compare_policies import compare

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
                    common.serve_demo, context_tokens=common.demo_context, ram_bytes=common.demo_ram
                )
            )
            base_url = server.base_url
        elif common.base_url is None:
            raise click.UsageError(
                "name a server with --base-url, or have one started with --serve-demo"
            )
        else:
            base_url = checked_url(common.base_url)
        yield endpoint_of(common, base_url)


def endpoint_of(common: Common, base_url: str) -> "Endpoint":
    """Ask the server for its model if none is named. Raises ConfigError."""
    from kvhold_lab.bench.load.client import Endpoint
    from kvhold_lab.bench.load.measure import model_of

    endpoint = Endpoint(
        base_url=base_url,
        model=common.model or "",
        api="chat" if common.api == "chat" else "completions",
        api_key=os.environ.get(common.api_key_env) or None,
        ignore_eos=common.ignore_eos,
        extra_body=_object(common.extra_body),
        user_header=common.user_header,
        timeout_s=common.timeout_s,
        connect_timeout_s=common.connect_timeout_s,
    )
    return endpoint if endpoint.model else replace(endpoint, model=asyncio.run(model_of(endpoint)))


@contextmanager
def json_lines(path: Path | None) -> Iterator[Callable[[bytes], Any]]:
    if path is None:
        yield len
        return
    try:
        file = path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None
    with file:
        yield file.write


def prompts_of(common: Common) -> Prompts:
    kind = common.prompts or ("text" if common.api == "chat" else "tokens")
    if kind == "text":
        return TextPrompts(common.seed)
    if common.api == "chat":
        raise click.UsageError("--api chat takes no token ids; use --prompts text")
    return TokenPrompts(common.seed, first_id=common.first_token_id, vocab_size=common.vocab_size)


def separator_of(given: str | None, prompts: Prompts) -> Content:
    if prompts.kind == "text":
        return _SEPARATOR_TEXT if given is None else given
    if given is None:
        return prompts.piece("separator", 0, _SEPARATOR_TOKENS)
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--separator {given!r}: with token ids as prompts it must be ids with commas "
            "between them"
        ) from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--extra-body: {error}") from None
    if not isinstance(value, dict):
        raise click.UsageError('--extra-body must be a JSON object, such as {"priority": 1}')
    return value


def arguments_of(workload: Workload) -> dict[str, Any]:
    """A data set becomes its size."""
    given = {field.name: getattr(workload, field.name) for field in fields(workload)}  # type: ignore[arg-type]
    return {
        name: len(value) if name in ("examples", "recorded") else _plain(value)
        for name, value in given.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return getattr(value, "__name__", value) if callable(value) else value
