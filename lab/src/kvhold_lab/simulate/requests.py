"""Lines of a trace, in Mooncake's format (docs/load.md)."""

from collections.abc import Iterable, Iterator
from math import ceil, isfinite
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvhold.core.errors import UNDECODABLE, ConfigError

BLOCK_TOKENS = 512
MOST_LINE_BYTES = 64 << 20

_Length = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_HashId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The short last block may be left out.

    timestamp: in milliseconds
    """

    input_length: _Length
    hash_ids: list[_HashId]
    timestamp: float | None = None

    def fault(self, block_tokens: int) -> str:
        most = ceil(self.input_length / block_tokens)
        if self.input_length // block_tokens <= len(self.hash_ids) <= most:
            return ""
        return (
            f"hash_ids has {len(self.hash_ids)} ids, but {self.input_length} tokens "
            f"(input_length) are {most} blocks of {block_tokens};"
            " set block_tokens to the block size of the trace"
        )


class TimedRequest(TraceRequest, frozen=True, kw_only=True):
    """timestamp: in milliseconds, never decreasing"""

    timestamp: float
    output_length: _Length

    def fault(self, block_tokens: int) -> str:
        if not (isfinite(self.timestamp) and self.timestamp >= 0):
            return f"timestamp is {self.timestamp:g}; it must be 0 or more milliseconds"
        if not self.input_length or len(self.hash_ids) != ceil(self.input_length / block_tokens):
            return (
                f"{len(self.hash_ids)} hash_ids for an input_length of {self.input_length}; "
                f"each {block_tokens} tokens must have one"
            )
        return ""


AnyRequest = TypeVar("AnyRequest", bound=TraceRequest)


def read_requests(
    path: Path, kind: type[AnyRequest], *, block_tokens: int = BLOCK_TOKENS
) -> Iterator[AnyRequest]:
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MOST_LINE_BYTES), b"")
            yield from parse_requests(lines, kind, name=str(path), block_tokens=block_tokens)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from None


def parse_requests(
    lines: Iterable[bytes],
    kind: type[AnyRequest],
    *,
    name: str = "trace",
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[AnyRequest]:
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}; it must be 1 or more")
    decoder = msgspec.json.Decoder(kind)
    before = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) >= MOST_LINE_BYTES:
            raise ConfigError(
                f"{name}, line {number}: more than {MOST_LINE_BYTES >> 20} MiB; a trace "
                "has one request a line"
            )
        try:
            request = decoder.decode(line)
        except UNDECODABLE as error:
            raise ConfigError(
                f"{name}, line {number}: {error}; a line is like {{'input_length': 600, "
                f"'hash_ids': [4, 7]}}"
            ) from None
        fault = request.fault(block_tokens)
        if isinstance(request, TimedRequest):
            if not fault and request.timestamp < before:
                fault = (
                    f"timestamp {request.timestamp:g} is less than {before:g} before it; sort "
                    "the lines by timestamp"
                )
            before = request.timestamp
        if fault:
            raise ConfigError(f"{name}, line {number}: {fault}")
        yield request
