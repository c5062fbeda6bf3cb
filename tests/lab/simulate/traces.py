"""Traces that the tests make: conversations that grow, with beginnings that some of them share."""

import json
from collections.abc import Iterator
from random import Random

BLOCK = 512


def make_trace(
    *, sessions: int = 60, turns: int = 5, systems: int = 3, seed: int = 0
) -> list[bytes]:
    """Lines as of a published trace.

    Each session begins with one of a few system prompts, and each of its prompts holds the one
    before.
    """
    chance, ids = Random(seed), _Ids()
    prompts = [chance.randint(200, 3_000) for _ in range(systems)]
    lengths = {session: prompts[session % systems] for session in range(sessions)}
    waiting = [session for session in range(sessions) for _ in range(turns)]
    chance.shuffle(waiting)
    lines = []
    for turn, session in enumerate(waiting):
        lengths[session] += chance.randint(50, 2_500)
        num_tokens = lengths[session]
        system = session % systems
        shared = prompts[system] // BLOCK
        names: list[object] = [
            ("system", system, i) if i < shared else ("session", session, i)
            for i in range(num_tokens // BLOCK)
        ]
        if num_tokens % BLOCK:
            names.append(("rest", turn))
        lines.append(_line(turn, num_tokens, [ids[name] for name in names]))
    return lines


def _line(turn: int, num_tokens: int, hash_ids: list[int]) -> bytes:
    return (
        json.dumps(
            {
                "timestamp": 1000 * turn,
                "input_length": num_tokens,
                "output_length": 100,
                "hash_ids": hash_ids,
            }
        ).encode()
        + b"\n"
    )


class _Ids(dict[object, int]):
    """A number for each name, in the order of their first use."""

    def __missing__(self, name: object) -> int:
        self[name] = len(self)
        return self[name]


def paths(parents: list[int], ends: list[int]) -> Iterator[list[int]]:
    """The chunks from the first one to each end."""
    for end in ends:
        path = []
        while end >= 0:
            path.append(end)
            end = parents[end]
        yield path[::-1]
