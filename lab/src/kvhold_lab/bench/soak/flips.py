import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvhold.cache.local import LocalCache, open_cache
from kvhold.core.api import Cache
from kvhold.core.errors import DamagedChunks
from kvhold.core.holdings import ChunkBytes, Lease
from kvhold.core.keys import Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.memory.copy import gather_blocks, plan_copy, scatter_blocks
from kvhold.memory.views import per_layer
from kvhold.node import NodeClient
from kvhold.testing.damage import OpenArena
from kvhold_lab.bench.places import PLACES, open_place
from kvhold_lab.bench.servers import running_node
from kvhold_lab.quiet import quiet
from kvhold_lab.servers.base import NotInstalled

PROMPTS = 16
TIERS = ("memory", *PLACES)
_BLOCK = 4
_BLOCKS = 4
_PATIENT_S = 60.0
_LAYOUTS = tuple(
    Layout(
        (Group(layers=3, planes=2, heads=2, head_dim=head_dim, dtype="bfloat16"),),
        tokens_per_chunk=_BLOCK * _BLOCKS,
    )
    for head_dim in (32, 1)
)
_CODECS = ("raw", "lossless")


@dataclass(frozen=True)
class Flips:
    """delivered: damaged chunks that were loaded; must be 0"""

    flipped: dict[str, int]
    exact: dict[str, int]
    missed: dict[str, int]
    not_here: dict[str, str]
    delivered: int
    seconds: float
    passed: bool


@dataclass
class _Tally:
    flipped: Counter[str] = field(default_factory=Counter)
    exact: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    not_here: dict[str, str] = field(default_factory=dict)
    delivered: int = 0
    began: float = field(default_factory=time.monotonic)

    def result(self) -> Flips:
        seconds = round(time.monotonic() - self.began, 3)
        enough = bool(self.flipped) and all(self.missed[place] for place in self.flipped)
        passed = enough and self.delivered == 0
        return Flips(
            dict(self.flipped),
            dict(self.exact),
            dict(self.missed),
            self.not_here,
            self.delivered,
            seconds,
            passed,
        )


class _Engine:
    def __init__(self, layout: Layout, chance: random.Random) -> None:
        (group,) = layout.groups
        self.layout, self.chance = layout, chance
        self.namespace = Namespace(model="flips", layout=layout)
        blocks = (PROMPTS + 1) * _BLOCKS
        shape = (group.planes, blocks, _BLOCK, group.heads, group.head_dim)
        rng = np.random.default_rng(chance.randrange(1 << 32))
        self.tensors = [
            rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in range(group.layers)
        ]
        self.view = per_layer(group, self.tensors, axes="plane block token head dim")
        self.into = np.arange(PROMPTS * _BLOCKS, blocks)
        self._round = 0

    def prompts(self) -> list[Prompt]:
        self._round += 1
        tokens = np.arange(self.layout.tokens_per_chunk, dtype=np.int32)
        return [
            self.namespace.prompt(tokens + 1_000 * (self._round * PROMPTS + number))
            for number in range(PROMPTS)
        ]

    def store(
        self,
        cache: Cache,
        number: int,
        prompt: Prompt,
        before_commit: Callable[[int], None] = lambda _: None,
    ) -> None:
        blocks = np.arange(number * _BLOCKS, (number + 1) * _BLOCKS)
        with cache.reserve(self.layout, prompt.chunks()) as reservation:
            if not reservation.granted:
                return
            if self.chance.random() < 0.5:
                gather_blocks(self.view, blocks, reservation.buffer, reservation.chunks())
            else:
                planned = plan_copy(self.view, blocks, reservation.buffer, reservation.chunks())
                for layer in range(self.view.layers):
                    planned.gather(range(layer, layer + 1))
            before_commit(int(reservation.chunks().offsets[0]))
            reservation.commit()

    def load(self, cache: Cache, prompt: Prompt) -> bool:
        for tensor in self.tensors:
            tensor[:, self.into] = 0
        with cache.lookup(prompt.query()) as hit:
            lease = cache.claim(hit.ticket) if hit.num_tokens else None
            if lease is None:
                return False
            with lease:
                try:
                    self._copy(lease)
                except DamagedChunks:
                    return False
        return True

    def is_exact(self, number: int) -> bool:
        blocks = np.arange(number * _BLOCKS, (number + 1) * _BLOCKS)
        return all(
            np.array_equal(tensor[:, blocks], tensor[:, self.into]) for tensor in self.tensors
        )

    def _copy(self, lease: Lease) -> None:
        places, way = lease.chunks(), self.chance.randrange(3)
        if way == 0:
            scatter_blocks(self.view, self.into, lease.buffer, places, threads=2)
        elif way == 1:
            planned = plan_copy(self.view, self.into, lease.buffer, places)
            for layer in range(self.view.layers):
                planned.scatter(range(layer, layer + 1))
        else:
            scatter_blocks(
                self.view, self.into, lease.buffer, ChunkBytes(places.offsets, places.num_tokens)
            )
            lease.verify(self.layout)


def in_memory(count: int, seed: int) -> Flips:
    chance, tally = random.Random(seed), _Tally()
    with (
        quiet("kvhold"),
        running_node(log_level="CRITICAL") as writer,
        NodeClient(writer.path, name="reader") as reader,
        OpenArena(writer.status()["pid"]) as arena,
    ):
        engines = [_Engine(layout, chance) for layout in _LAYOUTS]
        for engine in engines:
            writer.register(engine.namespace)
            reader.register(engine.namespace)
        while tally.flipped.total() < count:
            engine = chance.choice(engines)
            prompts = engine.prompts()
            places: list[int] = []
            for number, prompt in enumerate(prompts):
                engine.store(writer, number, prompt, places.append)
            damaged = chance.sample(range(PROMPTS), chance.randrange(1, PROMPTS))
            for number in damaged:
                _flip(engine, arena, places[number])
                tally.flipped["memory"] += 1
            for number, prompt in enumerate(prompts):
                _read(tally, "memory", engine, reader, number, prompt)
            writer.clear(engine.namespace.digest)
    return tally.result()


def in_tiers(count: int, seed: int, names: Sequence[str] = ()) -> Flips:
    tally = _Tally()
    for name in names or TIERS:
        chance = random.Random(seed)
        try:
            with quiet("kvhold"), _url(name) as url:
                for codec in _CODECS:
                    option = f"{'&' if '?' in url else '?'}codec={codec}"
                    cached = open_cache(ram_bytes="16MiB", huge_pages="never", tiers=[url + option])
                    with cached as cache, OpenArena(os.getpid(), cache._arena.fd) as arena:
                        _over_one_tier(tally, name, count // len(_CODECS), chance, cache, arena)
        except NotInstalled as error:
            tally.not_here[name] = str(error)
    return tally.result()


def _over_one_tier(
    tally: _Tally, name: str, count: int, chance: random.Random, cache: LocalCache, arena: OpenArena
) -> None:
    engines = [_Engine(layout, chance) for layout in _LAYOUTS]
    for engine in engines:
        cache.register(engine.namespace)
    until = tally.flipped[name] + count
    while tally.flipped[name] < until:
        engine = chance.choice(engines)
        prompts = engine.prompts()
        below: list[Prompt] = []
        for number, prompt in enumerate(prompts):
            places: list[int] = []
            when = chance.choice(("before the commit", "after it", "below", "never"))

            def before_commit(
                offset: int, when: str = when, engine: _Engine = engine, places: list[int] = places
            ) -> None:
                places.append(offset)
                if when == "before the commit":
                    _flip(engine, arena, offset)

            engine.store(cache, number, prompt, before_commit)
            if when == "after it":
                _flip(engine, arena, places[0])
            below += [prompt] if when == "below" else []
            tally.flipped[name] += when != "never"
        assert cache.flush(deadline_s=_PATIENT_S), f"{name} did not take the chunks in time"
        assert cache.tier_worker is not None
        keys = [make_key(prompt.namespace.digest, prompt.hash_at(0), 0, 0) for prompt in below]
        asyncio.run_coroutine_threadsafe(
            _flip_below(cache, keys, chance), cache.tier_worker._loop
        ).result(_PATIENT_S)
        _drop_from_memory(cache)
        for number, prompt in enumerate(prompts):
            _read(tally, name, engine, cache, number, prompt)
        cache.clear(engine.namespace.digest, deadline_s=_PATIENT_S)


def _read(
    tally: _Tally, name: str, engine: _Engine, cache: Cache, number: int, prompt: Prompt
) -> None:
    if not engine.load(cache, prompt):
        tally.missed[name] += 1
    elif engine.is_exact(number):
        tally.exact[name] += 1
    else:
        tally.delivered += 1


def _flip(engine: _Engine, arena: OpenArena, offset: int) -> None:
    nbytes = engine.layout.chunk_bytes(0, engine.layout.tokens_per_chunk)
    arena.flip(offset + engine.chance.randrange(nbytes), engine.chance.randrange(8))


async def _flip_below(cache: LocalCache, keys: Sequence[bytes], chance: random.Random) -> None:
    assert cache.tier_worker is not None
    tier = cache.tier_worker._stack.guards[0]._tier
    for key, size in zip(keys, await tier.probe(keys), strict=True):
        if not isinstance(size, int):
            continue
        value: npt.NDArray[np.uint8] = np.zeros(size, np.uint8)
        if await tier.get([key], [[value.data]]) != [size]:
            continue
        value[chance.randrange(size)] ^= 1 << chance.randrange(8)
        await tier.delete([key])
        await tier.put([(key, [value.data])])


def _drop_from_memory(cache: LocalCache) -> None:
    with cache._lock:
        for entry in cache._state.ram.entries():
            cache._state.ram.remove(entry)


@contextmanager
def _url(name: str) -> Iterator[str]:
    if name == "memory":
        yield "memory://?max_bytes=64MiB"
        return
    with open_place(name) as place:
        yield place.url()
