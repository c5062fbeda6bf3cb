"""Requests cut into chunks: no text, only shared prefixes.

A block is identified by its own id and all ids before it.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import ConfigError
from kvhold_lab.simulate.requests import BLOCK_TOKENS, TraceRequest, parse_requests, read_requests

MOST_BLOCKS = 50_000_000

Ids = npt.NDArray[np.int32]
Starts = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Whole chunks of one size.

    chunks:  [events] int32; equal numbers mean equal prefixes
    starts:  [requests + 1] int64, of requests in `chunks`, and the end
    parents: [ids] int32, the preceding chunk; -1: none
    times_s: [requests], of arrival; None: unknown
    """

    tokens_per_chunk: int
    chunks: Ids
    starts: Starts
    parents: Ids
    times_s: Times | None = None

    @property
    def num_ids(self) -> int:
        return self.parents.size


@dataclass(frozen=True)
class Trace:
    """The last block may be short. Arrays as in `Cut`.

    num_tokens: [requests] int64
    """

    block_tokens: int
    num_tokens: npt.NDArray[np.int64]
    blocks: Ids
    starts: Starts
    parents: Ids
    times_s: Times | None = None

    @property
    def num_requests(self) -> int:
        return self.num_tokens.size

    def cut(self, tokens_per_chunk: int) -> Cut:
        """Chunks must divide a block, or be a multiple. Raises ConfigError."""
        size, block = tokens_per_chunk, self.block_tokens
        if size < 1 or (size % block and block % size):
            raise ConfigError(
                f"chunk_tokens is {size}; it must divide the trace's block of {block} "
                "tokens, or be a multiple of it"
            )
        return self._joined(size // block) if size >= block else self._divided(block // size)

    def _joined(self, count: int) -> Cut:
        size = self.block_tokens * count
        places = np.arange(self.blocks.size) - np.repeat(self.starts[:-1], np.diff(self.starts))
        whole = places < np.repeat(self.num_tokens // size * count, np.diff(self.starts))
        taken = whole & (places % count == count - 1)
        ids, chunks = np.unique(self.blocks[taken], return_inverse=True)
        above = ids
        for _ in range(count):
            above = np.where(above >= 0, self.parents[above], -1)
        parents = np.where(above >= 0, np.searchsorted(ids, above), -1)
        return Cut(
            size,
            chunks.astype(np.int32),
            _starts(self.num_tokens // size),
            parents.astype(np.int32),
            self.times_s,
        )

    def _divided(self, count: int) -> Cut:
        if self.parents.size * count > np.iinfo(np.int32).max:
            raise ConfigError(
                f"chunk_tokens: the trace has too many blocks to divide each by {count}; "
                "read fewer requests"
            )
        size = self.block_tokens // count
        starts = _starts(np.minimum(self.num_tokens // size, np.diff(self.starts) * count))
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        blocks = self.blocks[np.repeat(self.starts[:-1], np.diff(starts)) + places // count]
        parents = np.arange(-1, self.parents.size * count - 1, dtype=np.int32)
        parents[::count] = np.where(self.parents >= 0, self.parents * count + count - 1, -1)
        chunks = (blocks * count + places % count).astype(np.int32)
        return Cut(size, chunks, starts, parents, self.times_s)


def read_trace(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, num_requests: int | None = None
) -> Trace:
    requests = read_requests(path, TraceRequest, block_tokens=block_tokens)
    return trace_of(requests, name=str(path), block_tokens=block_tokens, num_requests=num_requests)


def parse_trace(
    lines: Iterable[bytes],
    *,
    name: str = "trace",
    block_tokens: int = BLOCK_TOKENS,
    num_requests: int | None = None,
) -> Trace:
    requests = parse_requests(lines, TraceRequest, name=name, block_tokens=block_tokens)
    return trace_of(requests, name=name, block_tokens=block_tokens, num_requests=num_requests)


def trace_of(
    requests: Iterable[TraceRequest],
    *,
    name: str = "trace",
    block_tokens: int = BLOCK_TOKENS,
    num_requests: int | None = None,
) -> Trace:
    known: dict[tuple[int, int], int] = {}
    num_tokens, starts, blocks, parents = array("q"), array("q", [0]), array("i"), array("i")
    times_s: list[float | None] = []
    for request in islice(requests, num_requests):
        if len(blocks) + len(request.hash_ids) > MOST_BLOCKS:
            raise ConfigError(
                f"{name}, request {len(num_tokens) + 1}: more than {MOST_BLOCKS:,} blocks; "
                "read fewer requests"
            )
        block = -1
        for hash_id in request.hash_ids:
            before, block = block, known.setdefault((block, hash_id), len(known))
            if block == len(parents):
                parents.append(before)
            blocks.append(block)
        num_tokens.append(request.input_length)
        times_s.append(None if request.timestamp is None else request.timestamp / 1000.0)
        starts.append(len(blocks))
    if not len(num_tokens):
        raise ConfigError(f"{name}: it has no requests")
    return Trace(
        block_tokens,
        np.array(num_tokens, np.int64),
        np.array(blocks, np.int32),
        np.array(starts, np.int64),
        np.array(parents, np.int32),
        _as_times(times_s),
    )


def _as_times(times_s: list[float | None]) -> Times | None:
    known = [time_s for time_s in times_s if time_s is not None]
    if len(known) < len(times_s) or any(b < a for a, b in pairwise(known)):
        return None
    return np.array(known, np.float64)


def _starts(counts: npt.NDArray[np.int64]) -> Starts:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
