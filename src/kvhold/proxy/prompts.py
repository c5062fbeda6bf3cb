"""Read a request for tokens, and make the part of the prefill engine.

Only the named fields are read; the others pass byte by byte. No I/O.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from kvhold.core.errors import UNDECODABLE, KVHoldError
from kvhold.core.hints import MOST_ACTIONS

Fields = dict[str, msgspec.Raw]

KINDS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/messages": "messages",
}
"""The paths whose requests have a prefill part, and their names in metrics."""

# A prefill engine makes one token and one JSON object. Prompt fields, such as `tools`, stay.
_NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "echo",
    "return_token_ids",
)
# These need the whole prompt computed.
_NEED_THE_PROMPT = ("prompt_logprobs", "prompt_embeds")
# Allowed from clients in `kv_transfer_params`; others name hosts or blocks.
_FROM_CLIENTS = ("kvhold", "max_load_tokens", "max_offload_tokens", "kv_load_tiers")
_TEXT_PARTS = ("text", "input_text", "tool_use", "tool_result", "refusal")
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
# Beside the prompt, these decide its KV.
_NAME_THE_KV = (
    "model",
    "cache_salt",
    "system",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)
_BYTES_PER_TOKEN = 4
_MOST_SESSION = 256

_fields = msgspec.json.Decoder(Fields)
_encoder = msgspec.json.Encoder()


class NotAnInference(KVHoldError):
    """The body is not a JSON object."""


@dataclass(frozen=True)
class Inference:
    """most_tokens:   upper bound of the prompt's length, without a chat's template; None: unknown
    likely_tokens: for the load of engines
    """

    kind: str
    fields: Fields
    most_tokens: int | None
    likely_tokens: int
    num_prompts: int
    is_single: bool
    has_prefill: bool

    def with_hints(self, hints: list[dict[str, Any]]) -> "Inference":
        return replace(self, fields=with_hints(self.fields, hints))

    def with_params(self, params: Mapping[str, Any]) -> bytes:
        return _with_params(self.fields, params)

    def prompt_bytes(self) -> list[bytes]:
        """Of the fields that decide the KV, the prompt's at the end: a longer prompt begins so."""
        prompt = self.fields.get("prompt" if self.kind == "completions" else "messages", b"")
        named = [bytes(self.fields.get(name, b"")) for name in _NAME_THE_KV]
        return [self.kind.encode(), *named, bytes(prompt).rstrip(b" \t\r\n").rstrip(b'"]')]

    def prefill_body(self, params: Mapping[str, Any]) -> bytes:
        fields = {name: raw for name, raw in self.fields.items() if name not in _NOT_FOR_PREFILL}
        fields["max_tokens"] = msgspec.Raw(b"1")
        if "max_completion_tokens" in self.fields:
            fields["max_completion_tokens"] = msgspec.Raw(b"1")
        return _with_params(fields, params)


def read_fields(body: bytes) -> tuple[Fields, bytes]:
    """Return a JSON object's fields, and the body with safe `kv_transfer_params`.

    Raises NotAnInference, also for UTF-16 and NaN.
    """
    with reading():
        fields = _fields.decode(body)
        params = msgspec.json.decode(fields.get("kv_transfer_params", b"null"))
    if not isinstance(params, dict) or not params.keys() - set(_FROM_CLIENTS):
        return fields, body
    kept = {name: params[name] for name in _FROM_CLIENTS if name in params}
    fields["kv_transfer_params"] = msgspec.Raw(_encoder.encode(kept))
    return fields, _encoder.encode(fields)


def read_inference(path: str, fields: Fields) -> Inference:
    """path: one of `KINDS`. Raises NotAnInference."""
    kind = KINDS[path]
    with reading():
        most, likely, num_prompts = _prompt_size(kind, fields)
        num_answers = max(_number(fields, "n"), _number(fields, "best_of"))
    has_prefill = not (
        any(_is_set(fields, name) for name in _NEED_THE_PROMPT)
        or (_is_set(fields, "echo") and _is_set(fields, "logprobs"))
        # a budget for thinking must be below max_tokens
        or (kind == "messages" and _is_set(fields, "thinking"))
    )
    is_single = num_prompts == 1 and num_answers <= 1 and not _is_set(fields, "use_beam_search")
    return Inference(kind, fields, most, likely, num_prompts, is_single, has_prefill)


def with_hints(fields: Fields, hints: list[dict[str, Any]]) -> Fields:
    """Add to `kv_transfer_params.kvhold.hints`, unless the client's own leave no room."""
    params = _object(msgspec.json.decode(fields.get("kv_transfer_params", b"null")))
    own = None if params is None else _object(params.get("kvhold"))
    if params is None or own is None:
        return fields
    given = own.get("hints")
    given = [] if given is None else given
    if not isinstance(given, list) or len(given) + len(hints) > MOST_ACTIONS:
        return fields
    merged = {**params, "kvhold": {**own, "hints": [*given, *hints]}}
    return {**fields, "kv_transfer_params": msgspec.Raw(_encoder.encode(merged))}


def encode_fields(fields: Fields) -> bytes:
    return _encoder.encode(fields)


def session_of(fields: Fields) -> str | None:
    with reading():
        values = [msgspec.json.decode(fields[name]) for name in _SESSION_FIELDS if name in fields]
        metadata = msgspec.json.decode(fields.get("metadata", b"null"))
    if isinstance(metadata, dict):
        values.append(metadata.get("user_id"))
    named = (value for value in values if isinstance(value, str) and value)
    return next(named, "")[:_MOST_SESSION] or None


@contextmanager
def reading() -> Iterator[None]:
    try:
        yield
    except (msgspec.ValidationError, *UNDECODABLE) as error:
        raise NotAnInference(f"the body is not a JSON object in UTF-8: {error}") from None


def _with_params(fields: Fields, params: Mapping[str, Any]) -> bytes:
    if not params:
        return _encoder.encode(fields)
    own = msgspec.json.decode(fields.get("kv_transfer_params", b"null"))
    merged = {**(own if isinstance(own, dict) else {}), **params}
    return _encoder.encode({**fields, "kv_transfer_params": msgspec.Raw(_encoder.encode(merged))})


def _object(value: Any) -> dict[str, Any] | None:
    """None: the engine refuses it."""
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def _prompt_size(kind: str, fields: Fields) -> tuple[int | None, int, int]:
    """Return the most and the likely tokens, and the number of prompts.

    A token has at least one byte.
    """
    if kind == "completions":
        return _size_of_prompt(fields.get("prompt"))
    texts = [fields[name] for name in ("messages", "system", "tools") if name in fields]
    num_bytes = sum(len(bytes(raw)) for raw in texts)
    has_media = any(_has_media(msgspec.json.decode(raw)) for raw in texts[:1])
    return None if has_media else num_bytes, num_bytes // _BYTES_PER_TOKEN, 1


def _size_of_prompt(raw: msgspec.Raw | None) -> tuple[int | None, int, int]:
    text = b"" if raw is None else bytes(raw)
    if not text.startswith(b"["):
        return len(text), len(text) // _BYTES_PER_TOKEN, 1
    prompts = msgspec.json.decode(text)
    if not prompts or isinstance(prompts[0], int):
        return len(prompts), len(prompts), 1
    is_tokens = isinstance(prompts[0], list)
    sizes = [len(prompt) if isinstance(prompt, list) else len(text) for prompt in prompts]
    most = max(sizes)
    return most, sum(sizes) if is_tokens else len(text) // _BYTES_PER_TOKEN, len(prompts)


def _has_media(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
                return True
    return False


def _is_set(fields: Fields, name: str) -> bool:
    raw = fields.get(name)
    return raw is not None and bytes(raw).strip() not in (b"null", b"false")


def _number(fields: Fields, name: str) -> int:
    raw = fields.get(name)
    value = 1 if raw is None else msgspec.json.decode(raw)
    return value if isinstance(value, int) else 1
