"""Chat templates: Jinja files of a model's folder, run in Jinja's sandbox.

They get the messages, no tools, and the prompt for an answer.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """One thread."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: such as `bos_token`. Raises ValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(text)
        except (TemplateError, RecursionError) as error:
            raise ValueError(_first_line(error)) from None

    def render(self, messages: Sequence[Mapping[str, str]], most: int) -> str:
        """most: characters. Raises ValueError."""
        parts, left = [], most
        try:
            for part in self._template.generate(
                self._special_tokens,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            ):
                left -= len(part)
                if left < 0:
                    break
                parts.append(part)
        except Exception as error:  # noqa: BLE001 - a template is code, which may raise anything
            raise ValueError(f"the chat template refuses them: {_first_line(error)}") from None
        if left < 0:
            raise ValueError(f"the chat template makes more than {most} characters of them")
        return "".join(parts)


class _GenerationTag(Extension):  # type: ignore[misc]
    """`{% generation %}` marks answers for training. Here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
