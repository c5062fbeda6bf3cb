"""Traces of real services: when requests came, how long they were, and what they shared.

    for request in read_trace(Path("conversation_trace.jsonl")):
        request.timestamp, request.hash_ids

The form is that of the traces which Mooncake published (FAST'25): one JSON object a line, such as

    {"timestamp": 27000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 12, 13]}

with an id for each block of `BLOCK_TOKENS` prompt tokens, the last of which may be short; equal ids are equal text, all before it included.
A trace is read a line at a time, so its length does not matter. Everything in a line is checked.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvhold.core.errors import ConfigError

BLOCK_TOKENS = 512
_LONGEST_LINE = 4 << 20  # bytes; a prompt of 100 million tokens
_LARGEST_ID = (1 << 63) - 1


class TraceRequest(msgspec.Struct, frozen=True):
    """One line. timestamp: of the arrival, in milliseconds, never less than the one before; lengths: in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_decoder = msgspec.json.Decoder(TraceRequest)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace in their order; empty lines are skipped. Raises ConfigError that names the file and the line."""
    before = 0.0
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if line.isspace():
                    continue
                try:
                    request = _read(line)
                    if request.timestamp < before:
                        raise ValueError(f"timestamp {request.timestamp:g} is less than {before:g} before it; sort the lines by timestamp")
                except ValueError as error:  # msgspec's errors are ValueErrors, too
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                before = request.timestamp
                yield request
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a trace's file") from None


def _read(line: bytes) -> TraceRequest:
    if len(line) == _LONGEST_LINE:
        raise ValueError(f"longer than {_LONGEST_LINE:,} bytes; is this a trace of one JSON object a line?")
    request = _decoder.decode(line)
    if not (math.isfinite(request.timestamp) and request.timestamp >= 0):
        raise ValueError(f"timestamp is {request.timestamp:g}; it must be 0 or more milliseconds")
    if request.input_length < 1 or request.output_length < 0:
        raise ValueError(f"input_length {request.input_length} must be 1 or more, output_length {request.output_length} 0 or more")
    if len(request.hash_ids) != math.ceil(request.input_length / BLOCK_TOKENS):
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids do not fit an input_length of {request.input_length}; "
            f"there must be one for each {BLOCK_TOKENS} tokens"
        )
    if not all(0 <= number <= _LARGEST_ID for number in request.hash_ids):
        raise ValueError(f"hash_ids must be from 0 to {_LARGEST_ID}")
    return request
