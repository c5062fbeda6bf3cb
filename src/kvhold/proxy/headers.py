"""Headers between clients and engines, and request names. No I/O."""

import uuid
from collections.abc import Iterable, Mapping

Headers = list[tuple[str, str]]

REQUEST_ID = "X-Request-Id"
_MOST_REQUEST_ID = 128

# RFC 9110, 7.6.1
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OF_REQUESTS = frozenset(
    {
        "host",
        "content-length",
        "expect",
        "x-request-id",
        "x-prefiller-url",
        "x-prefiller-host-port",
        "x-data-parallel-host-port",
    }
)
_OF_ANSWERS = frozenset({"content-length", "x-request-id", "date", "server"})
_KEYS = frozenset({"authorization", "x-api-key", "api-key"})


def request_headers(
    headers: Iterable[tuple[str, str]], request_id: str, engine_key: str
) -> Headers:
    """engine_key: replaces the client's keys; empty: those pass"""
    kept = _kept(headers, _OF_REQUESTS | _KEYS if engine_key else _OF_REQUESTS)
    if engine_key:
        kept.append(("Authorization", f"Bearer {engine_key}"))
    return [*kept, (REQUEST_ID, request_id)]


def prefill_headers(headers: Headers) -> Headers:
    dropped = ("accept", "accept-encoding")
    return [
        *((name, value) for name, value in headers if name.lower() not in dropped),
        ("Accept", "application/json"),
        ("Accept-Encoding", "identity"),
    ]


def answer_headers(headers: Iterable[tuple[str, str]], request_id: str) -> Headers:
    return [*_kept(headers, _OF_ANSWERS), (REQUEST_ID, request_id)]


def request_id_of(headers: Mapping[str, str]) -> str:
    given = headers.get(REQUEST_ID, "")
    if 0 < len(given) <= _MOST_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def client_key(headers: Mapping[str, str]) -> str:
    """OpenAI's `Authorization: Bearer`, or Anthropic's `x-api-key`."""
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _kept(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> Headers:
    pairs = list(headers)
    named = {
        name.strip().lower()
        for key, value in pairs
        if key.lower() == "connection"
        for name in value.split(",")
    }
    unwanted = dropped | _HOP_BY_HOP | named
    return [pair for pair in pairs if pair[0].lower() not in unwanted and _is_text(pair[1])]


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
