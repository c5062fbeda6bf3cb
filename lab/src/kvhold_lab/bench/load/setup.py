import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.options import Common
from kvhold_lab.bench.load.prompts import Content, Prompts, TextPrompts, TokenPrompts
from kvhold_lab.bench.load.work import Workload

if TYPE_CHECKING:
    from kvhold_lab.bench.load.client import Endpoint

_SEPARATOR_TEXT, _SEPARATOR_TOKENS = " # # ", 4


def make_endpoint(common: Common, base_url: str) -> "Endpoint":
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
    given = {field.name: getattr(workload, field.name) for field in fields(workload)}  # type: ignore[arg-type]
    return {
        name: len(value) if name in ("examples", "recorded") else _plain(value)
        for name, value in given.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return getattr(value, "__name__", value) if callable(value) else value
