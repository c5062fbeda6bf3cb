"""A prompt on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvhold.core.errors import ConfigError
from kvhold.core.keys import Query
from kvhold.node import NodeClient
from kvhold.node.namespaces import namespace_for_prompts

_MOST_BYTES = 256 << 20

Command = TypeVar("Command", bound=Callable[..., Any])


def prompt_options(command: Command) -> Command:
    for option in (
        click.option("--tokenizer", help="With --text: a model's name or folder (transformers)."),
        click.option("--text", help="The prompt."),
        click.option(
            "--tokens",
            type=click.Path(path_type=Path, allow_dash=True),
            help="File with the prompt's tokens, a JSON list; - for standard input.",
        ),
    ):
        command = option(command)
    return command


def tokens_of(tokens: Path | None, text: str | None, tokenizer: str | None) -> list[int]:
    """Raises UsageError, ConfigError."""
    if (tokens is None) == (text is None) or (text is None) != (tokenizer is None):
        raise click.UsageError("give --tokens FILE, or --text TEXT with --tokenizer MODEL")
    return _read(tokens) if tokens is not None else _tokenized(str(text), str(tokenizer))


def query_of(client: NodeClient, namespace: str, tokens: list[int]) -> Query:
    """namespace: its first digits. Raises NoSuchNamespace, ConfigError."""
    space = namespace_for_prompts(client, namespace)
    try:
        return space.prompt(tokens).query()
    except ValueError as error:
        raise ConfigError(f"tokens: {error}") from None


def _read(path: Path) -> list[int]:
    try:
        with click.open_file(str(path), "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        found = json.loads(raw) if len(raw) <= _MOST_BYTES else None
    except OSError as error:
        raise ConfigError(f"--tokens {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(token) is int for token in found):
        raise ConfigError(f"--tokens {path}: not a JSON list of whole numbers, of at most 256 MiB")
    return found


def _tokenized(text: str, tokenizer: str) -> list[int]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("--tokenizer needs transformers: pip install transformers") from None
    try:
        tokens: list[int] = AutoTokenizer.from_pretrained(tokenizer).encode(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {tokenizer}: {str(error).splitlines()[0]}") from None
    return tokens
