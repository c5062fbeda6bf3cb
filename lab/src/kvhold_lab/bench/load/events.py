"""Parses server-sent events. The input is not trusted."""

from array import array
from dataclasses import replace
from typing import Any, Literal

import msgspec

from kvhold.core.errors import UNDECODABLE
from kvhold_lab.bench.load.work import Reply

_LONGEST_EVENT = 16 << 20  # bytes; vLLM's first event may repeat the prompt's ids


class BadStream(ValueError):
    pass


class EventLines:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, received: bytes) -> list[bytes]:
        """Raises BadStream beyond 16 MiB."""
        *ended, rest = received.split(b"\n")
        if ended:
            ended[0] = b"".join([*self._pieces, ended[0]])
            self._pieces, self._size = [], 0
        self._pieces.append(rest)
        self._size += len(rest)
        if self._size > _LONGEST_EVENT:
            raise BadStream(f"an event of more than {_LONGEST_EVENT >> 20} MiB")
        return [
            data
            for line in ended
            if line.startswith(b"data:") and (data := line.removeprefix(b"data:").strip())
        ]


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)
_DONE = b"[DONE]"


class EventStream:
    """Times are in seconds of a monotonic clock."""

    def __init__(self, began: float, *, content: Literal["text", "tokens"]) -> None:
        self._began = began
        self._content = content
        self._last: float | None = None
        self._ttft_s: float | None = None
        self._gaps_s = array("d")
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._usage = _Usage()
        self._is_whole = False
        self._error = ""

    def add(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._is_whole = True
            return
        try:
            event = _decoder.decode(data)
        except UNDECODABLE as error:
            raise BadStream(f"{error}: {data[:200].decode(errors='replace')}") from None
        if event.error is not None:
            self._error = str(event.error)
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._take(choice, now)

    def reply(self, now: float) -> Reply:
        details = self._usage.prompt_tokens_details
        text = "".join(self._texts)
        reply = Reply(
            latency_s=now - self._began,
            ttft_s=self._ttft_s,
            gaps_s=self._gaps_s,
            input_tokens=self._usage.prompt_tokens,
            output_tokens=self._num_output_tokens(),
            cached_tokens=details.cached_tokens if details is not None else None,
            content=text if self._content == "text" else self._token_ids,
            text=text,
        )
        if self._error:
            return failed(reply, "server error", self._error)
        if not self._is_whole:
            return failed(reply, "cut short", "the stream ended before the answer did")
        if self._ttft_s is None:
            return failed(reply, "no tokens", "the answer is empty")
        if self._content == "tokens" and not self._token_ids:
            return failed(
                reply,
                "no token ids",
                "the server does not return token ids (vLLM's return_token_ids); use "
                "--prompts text",
            )
        return reply

    def _take(self, choice: _Choice, now: float) -> None:
        """A last event without text and ids is no token."""
        self._is_whole |= choice.finish_reason is not None
        self._token_ids += choice.token_ids or []
        if choice.delta is not None:
            self._texts.append(choice.delta.content or "")
            has_tokens = bool(
                choice.delta.content
                or choice.delta.reasoning
                or choice.delta.reasoning_content
                or choice.token_ids
            )
        else:
            self._texts.append(choice.text or "")
            has_tokens = bool(choice.text or choice.token_ids) or (
                choice.text is not None and choice.finish_reason is None
            )
        if has_tokens:
            self._arrived(now)

    def _arrived(self, now: float) -> None:
        if self._last is None:
            self._ttft_s = now - self._began
        else:
            self._gaps_s.append(now - self._last)
        self._last = now

    def _num_output_tokens(self) -> int:
        if self._usage.completion_tokens is not None:
            return self._usage.completion_tokens
        return len(self._token_ids) or len(self._gaps_s) + (self._ttft_s is not None)


def failed(reply: Reply, kind: str, detail: str) -> Reply:
    return replace(reply, error=kind, detail=detail)
