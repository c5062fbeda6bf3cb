"""Read the cache settings that Anthropic's and OpenAI's clients send (docs/proxy.md). No I/O."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import msgspec

from kvhold.core.errors import KVHoldError
from kvhold.proxy.prompts import Fields, reading

RESPONSES = "/v1/responses"

_ANTHROPIC_TTL_S = {"5m": 300, "1h": 3600}
_OPENAI_TTL_S = {"30m": 1800, "12h": 43_200}
_DAY_S = 86_400
_MOST_BREAKPOINTS = 4
_MARK, _OPENAI_MARK = "cache_control", "prompt_cache_breakpoint"
_OPENAI_FIELDS = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
# Fields that the engine needs to count a prompt's tokens.
_COUNTED = ("model", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")
_TOKENIZED = ("model", "tools", "chat_template", "chat_template_kwargs")
_QUESTION = msgspec.Raw(b'[{"role":"user","content":"."}]')

Cut = Callable[[], dict[str, Any]]
"""Returns the fields of the prompt up to a breakpoint."""


class BadCacheSetting(KVHoldError):
    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field


@dataclass(frozen=True)
class KeptPrefix:
    """A prefix of the prompt that the client wants kept.

    ttl:   as the client writes it
    count: asks `count_path` for the prefix's length; None: it is the whole prompt
    """

    field: str
    ttl: str
    ttl_s: int
    count_path: str = ""
    count: bytes | None = None


@dataclass(frozen=True)
class _Breakpoint:
    """order: of its end in the prompt; cut: None: that is the prompt's end"""

    field: str
    ttl: str
    order: float = inf
    cut: Cut | None = None


def read_cache_settings(path: str, fields: Fields) -> tuple[KeptPrefix, ...]:
    """Return prefixes with different TTLs, the longest TTL and the shortest prefix first.

    Raises BadCacheSetting, NotAnInference.
    """
    with reading():
        if path == "/v1/messages":
            found = _read_anthropic(fields)
            return _longest(found, _ANTHROPIC_TTL_S, "/v1/messages/count_tokens", _COUNTED, fields)
        found = _read_openai(path, fields)
        return _longest(found, {**_OPENAI_TTL_S, "24h": _DAY_S}, "/tokenize", _TOKENIZED, fields)


def _longest(
    breakpoints: Sequence[_Breakpoint],
    ttl_s: dict[str, int],
    count_path: str,
    counted: Sequence[str],
    fields: Fields,
) -> tuple[KeptPrefix, ...]:
    """Of each TTL the last breakpoint, if no longer TTL reaches as far."""
    kept: list[KeptPrefix] = []
    reached = -1.0
    for one in sorted(breakpoints, key=lambda one: (-ttl_s[one.ttl], -one.order)):
        if one.order <= reached:
            continue
        reached = one.order
        count = None
        if one.cut is not None:
            same = {name: fields[name] for name in counted if name in fields}
            count = msgspec.json.encode({**same, **one.cut()})
        kept.append(KeptPrefix(one.field, one.ttl, ttl_s[one.ttl], count_path, count))
    return tuple(kept)


def _read_anthropic(fields: Fields) -> list[_Breakpoint]:
    names = [name for name in ("tools", "system", "messages", _MARK) if name in fields]
    if not any(f'"{_MARK}"'.encode() in bytes(fields[name]) for name in names if name != _MARK):
        names = [_MARK] if _MARK in names else []
    decoded = {name: msgspec.json.decode(fields[name]) for name in names}
    found: list[_Breakpoint] = []
    for order, (field, mark, cut) in enumerate(_anthropic_marks(decoded, fields)):
        ttl = _anthropic_ttl(field, mark)
        if found and ttl == "1h" and found[-1].ttl == "5m":
            raise BadCacheSetting(
                f"{field}.ttl",
                f'"1h" may not come after the "5m" of {found[-1].field} (the order is tools, '
                "system, messages); use the longer TTL for the earlier blocks",
            )
        if found and field == _MARK and found[-1].cut is None:
            if ttl != found[-1].ttl:
                raise BadCacheSetting(
                    f"{_MARK}.ttl",
                    f"the last block has {found[-1].ttl!r} ({found[-1].field}); use the same TTL",
                )
            continue
        found.append(_Breakpoint(field, ttl, inf if cut is None else order, cut))
        if len(found) > _MOST_BREAKPOINTS:
            raise BadCacheSetting(
                field,
                f"this is the breakpoint number {len(found)}, of {_MOST_BREAKPOINTS} at most; "
                f"remove {_MARK} from earlier blocks",
            )
    return found


def _anthropic_marks(
    decoded: dict[str, Any], fields: Fields
) -> Iterator[tuple[str, Any, Cut | None]]:
    """Yield each breakpoint's field, value, and cut.

    A template may write the system prompt before the tools, so a tool's prefix includes it.
    """
    system = {"system": fields["system"]} if "system" in fields else {}
    question = {**system, "messages": _QUESTION}
    for number, tool in _objects(decoded.get("tools")):
        if tool.get(_MARK) is not None:
            cut = partial(_cut_list, question, "tools", decoded["tools"], number)
            yield f"tools.{number}.{_MARK}", tool[_MARK], cut
    for number, block in _objects(decoded.get("system")):
        if block.get(_MARK) is not None:
            cut = partial(_cut_list, question, "system", decoded["system"], number)
            yield f"system.{number}.{_MARK}", block[_MARK], cut
    messages: Any = decoded.get("messages")
    for number, message in _objects(messages):
        content: Any = message.get("content")
        for part, block in _objects(content):
            at = f"messages.{number}.content.{part}"
            is_last = (number, part) == (len(messages) - 1, len(content) - 1)
            for field, mark in _marks_of(at, block):
                cut = partial(_cut_messages, system, messages, number, part)
                yield field, mark, None if is_last else cut
    if decoded.get(_MARK) is not None:
        yield _MARK, decoded[_MARK], None


def _marks_of(at: str, block: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for number, inner in _objects(block.get("content")):
        if inner.get(_MARK) is not None:
            yield f"{at}.content.{number}.{_MARK}", inner[_MARK]
    if block.get(_MARK) is not None:
        yield f"{at}.{_MARK}", block[_MARK]


def _anthropic_ttl(field: str, mark: Any) -> str:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise BadCacheSetting(f"{field}.type", 'must be "ephemeral"')
    return _choice(f"{field}.ttl", mark.get("ttl"), _ANTHROPIC_TTL_S, "5m")


def _read_openai(path: str, fields: Fields) -> list[_Breakpoint]:
    key, options, retention = (
        msgspec.json.decode(fields.get(name, b"null")) for name in _OPENAI_FIELDS
    )
    if key is not None and not isinstance(key, str):
        raise BadCacheSetting("prompt_cache_key", "must be text")
    if options is not None and not isinstance(options, dict):
        raise BadCacheSetting(
            "prompt_cache_options", 'must be an object, such as {"mode": "implicit", "ttl": "30m"}'
        )
    at = "prompt_cache_options"
    ttl = _choice(f"{at}.ttl", (options or {}).get("ttl"), _OPENAI_TTL_S, "30m")
    mode = _choice(f"{at}.mode", (options or {}).get("mode"), ("implicit", "explicit"), "implicit")
    kept = _choice(
        "prompt_cache_retention", retention, ("in_memory", "in-memory", "24h"), "in_memory"
    )
    found = _openai_breakpoints(path, fields, ttl)
    if options is not None and mode == "implicit":
        found = [*found[-_MOST_BREAKPOINTS + 1 :], _Breakpoint(at, ttl)]
    else:
        found = found[-_MOST_BREAKPOINTS:]
    if kept == "24h":
        found.append(_Breakpoint("prompt_cache_retention", kept))
    return found


def _openai_breakpoints(path: str, fields: Fields, default: str) -> list[_Breakpoint]:
    raw = fields.get("messages")
    if not path.endswith("/chat/completions") or raw is None:
        return []
    if f'"{_OPENAI_MARK}"'.encode() not in bytes(raw):
        return []
    found: list[_Breakpoint] = []
    messages: Any = msgspec.json.decode(raw)
    for number, message in _objects(messages):
        content: Any = message.get("content")
        for part, block in _objects(content):
            mark = block.get(_OPENAI_MARK)
            if mark is None:
                continue
            field = f"messages.{number}.content.{part}.{_OPENAI_MARK}"
            if not isinstance(mark, dict) or mark.get("mode") != "explicit":
                raise BadCacheSetting(f"{field}.mode", 'must be "explicit"')
            ttl = _choice(f"{field}.ttl", mark.get("ttl"), _OPENAI_TTL_S, default)
            if (number, part) == (len(messages) - 1, len(content) - 1):
                found.append(_Breakpoint(field, ttl))
                continue
            cut = partial(_cut_messages, {"add_generation_prompt": False}, messages, number, part)
            found.append(_Breakpoint(field, ttl, len(found), cut))
    return found


def _cut_list(others: dict[str, Any], name: str, blocks: Any, number: int) -> dict[str, Any]:
    return {**others, name: blocks[: number + 1]}


def _cut_messages(others: dict[str, Any], messages: Any, number: int, part: int) -> dict[str, Any]:
    last = messages[number]
    until = {**last, "content": last["content"][: part + 1]}
    return {**others, "messages": [*messages[:number], until]}


def _choice(field: str, value: Any, known: Any, default: str) -> str:
    if value is None:
        return default
    if isinstance(value, str) and value in known:
        return value
    raise BadCacheSetting(field, f"must be {' or '.join(repr(one) for one in known)}")


def _objects(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, one in enumerate(value if isinstance(value, list) else ()):
        if isinstance(one, dict):
            yield number, one
