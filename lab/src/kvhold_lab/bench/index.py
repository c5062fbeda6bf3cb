import os
from itertools import cycle

import numpy as np

from kvhold.cache.state import new_state
from kvhold.core.config import load_config
from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Query, make_key
from kvhold.core.layout import Group, Layout
from kvhold.memory.arena import Arena
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, time_row

SIZES = (1_000, 10_000, 100_000, 1_000_000)
PROMPT_CHUNKS = 1_000
MISSES = 200
ROUNDS = 9
LAYOUT = Layout(groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),))
NAMESPACE = Namespace(model="bench", layout=LAYOUT)
PASSING = Namespace(model="bench, passing", layout=LAYOUT)


def rows(profiles: Profiles | None = None) -> list[Row]:
    chunk_bytes = size_class(LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk))
    measured = []
    with Arena.create(
        (max(SIZES) + PROMPT_CHUNKS) * chunk_bytes + SLAB_BYTES, huge_pages="never"
    ) as arena:
        index = _Index(arena, profiles or Profiles())
        for num_chunks in SIZES:
            index.grow(num_chunks)
            measured += [index.hit(), index.miss(), index.store()]
    return measured


class _Index:
    def __init__(self, arena: Arena, profiles: Profiles) -> None:
        self._state = new_state(load_config({}, environ={}), arena)
        self._state.register(LAYOUT, NAMESPACE.digest)
        self._owner = object()
        self._dict: dict[bytes, None] = {}
        self._prompts: list[ChunkNames] = []
        self._profiles = profiles

    def grow(self, num_chunks: int) -> None:
        while len(self._dict) < num_chunks:
            self._prompts.append(names := fresh(NAMESPACE))
            self._store(names)
            self._dict.update(dict.fromkeys(keys_of(names)))

    def hit(self) -> Row:
        picks = [
            self._prompts[at]
            for at in np.random.default_rng(0).integers(0, len(self._prompts), 1 + ROUNDS)
        ]
        queries, keys = (
            cycle([query_of(names) for names in picks]),
            cycle([keys_of(names) for names in picks]),
        )

        def look_up() -> None:
            found = self._state.lookup(self._owner, next(queries))
            assert found.num_tokens == PROMPT_CHUNKS * LAYOUT.tokens_per_chunk
            self._state.release(self._owner, found.ticket)

        seconds = in_turn(
            {"kvhold": look_up, "dict": lambda: self._probe(next(keys))}, rounds=ROUNDS
        )
        row = time_row(
            self._called(f"hit of {PROMPT_CHUNKS:,} chunks"),
            seconds["kvhold"],
            seconds["dict"],
            unit="us",
        )
        return self._profiles.of(row, lambda: of_calls(look_up))

    def miss(self) -> Row:
        strange = [fresh(NAMESPACE) for _ in range(MISSES)]
        queries, keys = (
            [query_of(names) for names in strange],
            [keys_of(names)[0] for names in strange],
        )

        def look_up() -> None:
            for query in queries:
                assert not self._state.lookup(self._owner, query).num_tokens

        seconds = in_turn({"kvhold": look_up, "dict": lambda: self._probe(keys)}, rounds=ROUNDS)
        row = time_row(
            self._called("miss at the first chunk"),
            seconds["kvhold"] / MISSES,
            seconds["dict"] / MISSES,
            unit="us",
        )
        return self._profiles.of(row, lambda: of_calls(look_up))

    def store(self) -> Row:
        prompts = [fresh(PASSING) for _ in range(1 + ROUNDS)]
        names, keys = cycle(prompts), cycle([keys_of(prompt) for prompt in prompts])

        def insert() -> None:
            self._dict.update(dict.fromkeys(next(keys)))

        def remove() -> None:
            for _ in range(PROMPT_CHUNKS):
                self._dict.popitem()

        def clear() -> None:
            self._state.clear(PASSING.digest)

        work = {"kvhold": lambda: self._store(next(names)), "dict": insert}
        seconds = in_turn(work, rounds=ROUNDS, after={"kvhold": clear, "dict": remove})
        row = time_row(
            self._called(f"reserve and commit {PROMPT_CHUNKS:,} chunks"),
            seconds["kvhold"],
            seconds["dict"],
            unit="us",
        )
        return self._profiles.of(row, lambda: of_calls(work["kvhold"], after=clear))

    def _store(self, names: ChunkNames) -> None:
        granted = self._state.reserve(self._owner, LAYOUT, names, 0)
        self._state.commit(self._owner, granted.reservation, range(len(names)))

    def _probe(self, keys: list[bytes]) -> None:
        probe = self._dict.get
        for key in keys:
            probe(key)

    def _called(self, what: str) -> str:
        return f"{what}, {len(self._dict):,} in the index"


def fresh(namespace: Namespace) -> ChunkNames:
    return ChunkNames(namespace.digest, os.urandom(PROMPT_CHUNKS * HASH_BYTES))


def query_of(names: ChunkNames) -> Query:
    return Query(names.namespace, LAYOUT.fingerprint, 1, names.hashes)


def keys_of(names: ChunkNames) -> list[bytes]:
    hashes = names.hashes
    return [
        make_key(names.namespace, hashes[at : at + HASH_BYTES], 0, 0)
        for at in range(0, len(hashes), HASH_BYTES)
    ]
