from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, cycle, tee

import numpy as np

from kvhold.cache.state import new_state
from kvhold.core.config import load_config
from kvhold.core.keys import ChunkNames
from kvhold.memory.arena import Arena
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.tiers.ram import Wanted
from kvhold_lab.bench import disk_policies, index
from kvhold_lab.bench.index import LAYOUT, NAMESPACE, PASSING, fresh, keys_of, query_of
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, time_row

SIZES = (1_000, 100_000, 1_000_000)
ROUNDS = 9
MEASURED, BESIDE = "learned", "lru"


def rows(profiles: Profiles | None = None) -> list[Row]:
    measured = []
    for num_chunks in SIZES:
        nbytes = (num_chunks + index.PROMPT_CHUNKS) * size_class(
            LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk)
        )
        with Arena.create(-(-nbytes // SLAB_BYTES) * SLAB_BYTES, huge_pages="never") as arena:
            both = _Both(arena, num_chunks, profiles or Profiles())
            measured += [both.hit(), both.store(), both.new_prompt(), both.full()]
        measured += disk_policies.rows(num_chunks, profiles or Profiles())
    return measured


class _Memory:
    def __init__(self, arena: Arena, policy: str) -> None:
        self.state = new_state(load_config({"policy": policy}, environ={}), arena)
        for namespace in (NAMESPACE, PASSING):
            self.state.register(LAYOUT, namespace.digest)
        self._owner = object()

    def look_up(self, names: ChunkNames) -> int:
        found = self.state.lookup(self._owner, query_of(names))
        self.state.release(self._owner, found.ticket)
        return found.num_tokens // LAYOUT.tokens_per_chunk

    def store(self, names: ChunkNames) -> None:
        granted = self.state.reserve(self._owner, LAYOUT, names, 0)
        assert granted.reservation, "nothing was admitted"
        self.state.commit(self._owner, granted.reservation, range(len(names)))

    def add(self, names: ChunkNames) -> None:
        assert not self.look_up(names)
        self.store(names)

    def replace(self, names: ChunkNames) -> None:
        assert not self.look_up(names)
        entries, parent = [], None
        for key in keys_of(names):
            wanted = Wanted(key, LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk), parent)
            reserved = self.state.ram.reserve_all([wanted], num_tokens=0, first_token=0)
            assert reserved is not None
            entries += reserved
            parent = key
        for entry in reversed(entries):
            self.state.ram.commit(entry)

    def clear(self) -> None:
        self.state.clear(PASSING.digest)
        while self.state.step():
            pass

    def has_room(self) -> bool:
        ram, chunk_bytes = self.state.ram, LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk)
        return ram.used_bytes + index.PROMPT_CHUNKS * size_class(chunk_bytes) <= ram.capacity_bytes


class _Both:
    def __init__(self, arena: Arena, num_chunks: int, profiles: Profiles) -> None:
        self._memories = {policy: _Memory(arena, policy) for policy in (MEASURED, BESIDE)}
        self._num_chunks = num_chunks
        self._profiles = profiles
        self._prompts = [fresh(NAMESPACE) for _ in range(num_chunks // index.PROMPT_CHUNKS)]
        for names in self._prompts:
            for memory in self._memories.values():
                memory.add(names)

    def hit(self) -> Row:
        picks = np.random.default_rng(0).integers(0, len(self._prompts), 1 + ROUNDS)

        def look_up(memory: _Memory, names: ChunkNames) -> None:
            assert memory.look_up(names) == index.PROMPT_CHUNKS

        return self._row("hit of", look_up, cycle([self._prompts[at] for at in picks]))

    def store(self) -> Row:
        prompts = [fresh(PASSING) for _ in range(1 + ROUNDS)]
        for memory in self._memories.values():
            for names in prompts:
                memory.look_up(names)
        return self._row("reserve and commit", _Memory.store, cycle(prompts), after=_Memory.clear)

    def new_prompt(self) -> Row:
        return self._row(
            "miss, reserve and commit", _Memory.add, _fresh_prompts(), after=_Memory.clear
        )

    def full(self) -> Row:
        for memory in self._memories.values():
            while memory.has_room():
                memory.add(fresh(PASSING))
        return self._row("miss, evict, reserve and commit", _Memory.replace, _fresh_prompts())

    def _row(
        self,
        what: str,
        call: Callable[[_Memory, ChunkNames], None],
        prompts: Iterator[ChunkNames],
        *,
        after: Callable[[_Memory], None] | None = None,
    ) -> Row:
        work, clear = {}, {}
        for (policy, memory), own in zip(self._memories.items(), tee(prompts), strict=True):
            work[policy] = partial(_call_next, call, memory, own)
            if after is not None:
                clear[policy] = partial(after, memory)
        seconds = in_turn(work, rounds=ROUNDS, after=clear)
        row = time_row(
            f"{MEASURED}: {what} {index.PROMPT_CHUNKS:,} chunks, {self._num_chunks:,} in the index",
            seconds[MEASURED],
            seconds[BESIDE],
            unit="us",
        )
        return self._profiles.of(row, lambda: of_calls(work[MEASURED], after=clear.get(MEASURED)))


def _call_next(
    call: Callable[[_Memory, ChunkNames], None], memory: _Memory, prompts: Iterator[ChunkNames]
) -> None:
    call(memory, next(prompts))


def _fresh_prompts() -> Iterator[ChunkNames]:
    made = [fresh(PASSING) for _ in range(1 + ROUNDS)]
    return chain(made, (fresh(PASSING) for _ in count()))
