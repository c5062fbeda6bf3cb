"""A scaled trace: a block becomes a chunk of `CHUNK` tokens; prompts are cut at `MOST_CHUNKS`."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvhold.core.errors import ConfigError
from kvhold_lab.simulate.requests import TraceRequest, read_requests

CHUNK = 64  # tokens; the trace has 512
MOST_CHUNKS = 60
_TOKENS = (10, 8000)


def sample(path: Path, *, num_requests: int, seed: int) -> list[list[int]]:
    requests = list(read_requests(path, TraceRequest))
    conversations: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        conversations.setdefault(tuple(request.hash_ids[:2]), []).append(number)
    chosen: list[int] = []
    names = list(conversations)
    random.Random(seed).shuffle(names)
    for name in names:
        turns = conversations[name]
        if len(chosen) + len(turns) <= num_requests:
            chosen += turns
        if len(chosen) == num_requests:
            return [list(_tokens(requests[number].hash_ids)) for number in sorted(chosen)]
    raise ConfigError(
        f"{path}: it has too few conversations for {num_requests} requests; ask for fewer"
    )


def _tokens(hash_ids: Sequence[int]) -> Iterator[int]:
    for hash_id in hash_ids[:MOST_CHUNKS]:
        yield from np.random.default_rng(hash_id).integers(*_TOKENS, CHUNK).tolist()


def seen_before(prompts: Sequence[Sequence[int]]) -> float:
    known: set[tuple[int, ...]] = set()
    found = total = 0
    for prompt in prompts:
        chunks = [tuple(prompt[:end]) for end in range(CHUNK, len(prompt) + 1, CHUNK)]
        found += CHUNK * sum(chunk in known for chunk in chunks)
        total += len(prompt)
        known.update(chunks)
    return found / total
