"""Make the usage in an engine's answer reconcile with the engines' work (docs/proxy.md)."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvhold.core.errors import UNDECODABLE
from kvhold.proxy.cache_retains import PlacedPrefix
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.prompts import Fields

_MOST_HELD_BYTES = 16 << 20
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_MOST_END_BYTES = 4
_PREFILL_END_S = 1.0
_TOLD = re.compile(rb'"(cached_tokens|cache_read_input_tokens)"')
_fields = msgspec.json.Decoder(Fields)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def cached_tokens_of(answer: bytes) -> int | None:
    """Return the tokens of its prompt that an engine found cached; None: not told."""
    try:
        usage = msgspec.json.decode(answer, type=_Answer).usage
    except (msgspec.ValidationError, *UNDECODABLE):
        return None
    if usage is None:
        return None
    if usage.prompt_tokens_details is not None:
        return usage.prompt_tokens_details.cached_tokens
    return usage.cache_read_input_tokens


@dataclass
class PromptUsage:
    """The parts of a request's prompt, as far as engines have told.

    placed:         prefixes that engines are asked to keep
    has_prefill:    a prefill engine computes or computed the prompt
    prefill_cached: tokens that it found cached; None: not told
    """

    placed: Sequence[PlacedPrefix] = ()
    has_prefill: bool = False
    prefill_cached: int | None = None
    prefill_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_until_known(self) -> None:
        """A decode engine that did not wait may answer before the prefill's end."""
        if self.has_prefill:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PREFILL_END_S):
                    await self.prefill_ended.wait()

    @property
    def is_known(self) -> bool:
        return not self.has_prefill or self.prefill_cached is not None

    def read(self, cached: int) -> int:
        """cached: tokens that the decode engine found"""
        return min(cached, self.prefill_cached or 0) if self.has_prefill else cached

    def created(self, read: int, cacheable: int) -> dict[str, int]:
        """Return the tokens of prefixes that were computed and stored, by TTL.

        cacheable: tokens of the prompt that the engine can find again
        """
        created: dict[str, int] = {}
        start = read
        for one in self.placed:
            end = cacheable if one.num_tokens is None else min(one.num_tokens, cacheable)
            created[one.prefix.ttl] = max(0, end - start)
            start = max(start, end)
        return created


class UsageRewriter:
    """Of one request. Everything but usage passes byte by byte."""

    def __init__(self, kind: str, num_prompts: int, prompt: PromptUsage) -> None:
        self._kind = kind
        self._num_prompts = num_prompts
        self._prompt = prompt

    @property
    def is_needed(self) -> bool:
        prompt = self._prompt
        is_wrong = prompt.has_prefill or self._num_prompts > 1
        return self._kind == "messages" or is_wrong or bool(prompt.placed)

    async def events(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Rewrite a stream of events, each as a whole."""
        held = bytearray()
        try:
            async for piece in pieces:
                searched = max(0, len(held) - _MOST_END_BYTES)
                held += piece
                ends = [match.end() for match in _EVENT_END.finditer(held, searched)]
                if not ends and len(held) > _MOST_HELD_BYTES:
                    ends = [len(held)]
                if ends:
                    events = bytes(held[: ends[-1]])
                    del held[: ends[-1]]
                    if _TOLD.search(events):
                        await self._prompt.wait_until_known()
                        events = self._rewrite_events(events)
                    yield events
        except EngineFault:
            if held:
                yield bytes(held)
            raise
        if held:
            yield bytes(held)

    async def whole(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Rewrite a JSON answer of up to 16 MiB; a larger one passes."""
        held: list[bytes] = []
        num_bytes = 0
        try:
            async for piece in pieces:
                num_bytes += len(piece)
                held.append(piece)
                if num_bytes > _MOST_HELD_BYTES:
                    yield b"".join(held)
                    held = []
        except EngineFault:
            if held:
                yield b"".join(held)
            raise
        if num_bytes <= _MOST_HELD_BYTES:
            await self._prompt.wait_until_known()
            yield self.rewrite(b"".join(held))

    def rewrite(self, text: bytes) -> bytes:
        """Rewrite a JSON object's usage, if any."""
        try:
            fields = _fields.decode(text)
            usage = msgspec.json.decode(fields.get("usage", b"null"))
        except (msgspec.ValidationError, *UNDECODABLE):
            return text
        if not isinstance(usage, dict) or not self._reconcile(usage):
            return text
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
        return msgspec.json.encode(fields)

    def _rewrite_events(self, events: bytes) -> bytes:
        lines = events.splitlines(keepends=True)
        return b"".join(self._rewrite_line(line) for line in lines)

    def _rewrite_line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or not _TOLD.search(line):
            return line
        text = line.removeprefix(b"data:").strip()
        rewritten = self.rewrite(text)
        if rewritten is text:
            return line
        end = line[len(line.rstrip(b"\r\n")) :]
        return b"data: " + rewritten + end

    def _reconcile(self, usage: dict[str, Any]) -> bool:
        if self._kind == "messages":
            return self._reconcile_messages(usage)
        details = usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        if not isinstance(details, dict) or cached is None:
            return False
        if self._num_prompts > 1 or not self._prompt.is_known:
            usage["prompt_tokens_details"] = None  # vLLM counts the last prompt only
            return True
        details["cached_tokens"] = read = self._prompt.read(cached)
        stored = _count(details.get("created_cache_tokens"))
        if self._prompt.placed and stored is not None:
            created = self._prompt.created(read, cached + stored)
            details["cache_write_tokens"] = sum(created.values())
        return True

    def _reconcile_messages(self, usage: dict[str, Any]) -> bool:
        cached = _count(usage.get("cache_read_input_tokens"))
        rest = _count(usage.get("input_tokens"))
        if cached is None or rest is None:
            return False
        stored = _count(usage.get("cache_creation_input_tokens"))
        total = rest + cached + (stored or 0)
        if not self._prompt.is_known:
            del usage["cache_read_input_tokens"]
            usage |= {"input_tokens": total, "cache_creation_input_tokens": None}
            return True
        read = self._prompt.read(cached)
        created = self._prompt.created(read, total if stored is None else cached + stored)
        usage |= {
            "input_tokens": total - read - sum(created.values()),
            "cache_creation_input_tokens": sum(created.values()),
            "cache_read_input_tokens": read,
            "cache_creation": {
                f"ephemeral_{ttl}_input_tokens": created.get(ttl, 0) for ttl in ("5m", "1h")
            },
        }
        return True


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_count else None
