"""The index of a disk with `policy=learned`, and with LRU; no files."""

from collections.abc import Callable
from functools import partial
from itertools import count, cycle

import numpy as np

from kvhold.tiers.disk.index import Index
from kvhold.tiers.disk.learned import Learning
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.base import NEUTRAL
from kvhold.tiers.policies.kinds import NEW, PAUSES
from kvhold_lab.bench import index as memory_index
from kvhold_lab.bench.index import NAMESPACE, fresh, keys_of
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, time_row

ROUNDS = 9
_FILE_BYTES = 4096
_PROMPTS = PAUSES * NEW
_TURN_S = 1.0


class Disk:
    def __init__(self, policy: str, num_chunks: int, prompts: list[list[bytes]]) -> None:
        self._now_s = 0.0
        learning = Learning()
        self._times = LearnedPolicy(lambda: 0.0).times
        learning.worths = self._times.add_place()
        self._learns = policy == "learned"
        self._index = Index(policy, num_chunks * _FILE_BYTES, _FILE_BYTES, learning)
        self._numbers = count()
        for keys in prompts:
            self.write(keys)

    def pass_time(self) -> None:
        self._now_s += _TURN_S
        self._times.advance(self._now_s)

    def use(self, keys: list[bytes]) -> None:
        if self._learns:
            self._look_up(keys)
            return
        for key in keys:
            entry = self._index.find(key)
            assert entry is not None
            self._index.read(entry, 1)
            self._index.unread(entry)

    def write(self, keys: list[bytes]) -> None:
        if self._learns:
            self._look_up(keys)
        for key in keys:
            planned = self._index.reserve(key, 1, _FILE_BYTES)
            assert planned is not None
            for victim in planned.victims:
                self._index.finish(victim)
            self._index.commit(planned.entry, _FILE_BYTES)

    def _look_up(self, keys: list[bytes]) -> None:
        prompt = next(self._numbers) % _PROMPTS
        self._index.used(reversed(keys), prompt, NEUTRAL, self._now_s, are_whole=True)


def rows(num_chunks: int, profiles: Profiles) -> list[Row]:
    size = memory_index.PROMPT_CHUNKS
    prompts = [keys_of(fresh(NAMESPACE)) for _ in range(num_chunks // size)]
    disks = {name: Disk(name, num_chunks, prompts) for name in ("learned", "lru")}
    picks = np.random.default_rng(0).integers(0, len(prompts), 1 + ROUNDS)
    new = [keys_of(fresh(NAMESPACE)) for _ in range(1 + ROUNDS)]
    measured = []
    for what, call, texts in (
        ("use", Disk.use, [prompts[at] for at in picks]),
        ("evict and write", Disk.write, new),
    ):
        work = {name: _next_of(partial(call, disk), texts) for name, disk in disks.items()}
        after = {name: disk.pass_time for name, disk in disks.items()}
        seconds = in_turn(work, rounds=ROUNDS, after=after)
        row = time_row(
            f"learned on a disk: {what} {size:,} chunks, {num_chunks:,} in the index",
            seconds["learned"],
            seconds["lru"],
            unit="us",
        )
        use = partial(disks["learned"].use, prompts[0])
        measured.append(profiles.of(row, lambda use=use: of_calls(use)))  # type: ignore[misc]
    return measured


def _next_of(call: Callable[[list[bytes]], None], texts: list[list[bytes]]) -> Callable[[], None]:
    left = cycle(texts)
    return lambda: call(next(left))
