"""The real index of a disk with `policy=learned`, without files."""

from collections.abc import Sequence

from kvhold.tiers.disk.index import DiskEntry, Index
from kvhold.tiers.disk.learned import Learning
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.base import NEUTRAL, PolicyLookup

_CHUNK_BYTES = 512  # the unit of an index


class LearnedDisk:
    def __init__(self, policy: LearnedPolicy, capacity: int) -> None:
        self.victims: list[bytes] = []
        learning = Learning()
        learning.worths = policy.times.add_place()
        self._index = Index("learned", capacity * _CHUNK_BYTES, _CHUNK_BYTES, learning)

    def num_found(self, keys: Sequence[bytes]) -> int:
        for i, key in enumerate(keys):
            if self._index.find(key) is None:
                return i
        return len(keys)

    def used(self, prompt: Sequence[bytes], lookup: PolicyLookup) -> None:
        self._index.used(reversed(prompt), lookup.prompt, NEUTRAL, lookup.at_s, are_whole=True)

    def read(self, keys: Sequence[bytes]) -> None:
        """This policy counts lookups, not reads."""

    def write(self, keys: Sequence[bytes]) -> int:
        written: list[DiskEntry] = []
        missing = [key for key in keys if self._index.find(key) is None]
        for key in [key for key in missing if self._index.admits(key, _CHUNK_BYTES)]:
            planned = self._index.reserve(key, 0, _CHUNK_BYTES)
            if planned is None:
                continue
            for victim in planned.victims:
                self._index.finish(victim)
                self.victims.append(victim.key)
            written.append(planned.entry)
        for entry in written:
            self._index.commit(entry, _CHUNK_BYTES)
        return len(written)
