"""A tier over a dictionary. Transfers may outlast a cancellation."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import inf

from kvhold.core.errors import TierError, TierFull, TierUnavailable
from kvhold.tiers.base import Parts, TierTraits, check_lengths, size_of
from kvhold_lab.simulation.checker import Checker
from kvhold_lab.simulation.world import World

_LOOK_S = 1.0  # how often a slow transfer checks whether the faults are over


@dataclass
class SimTierStore:
    """The values outlive nodes. is_damaged: by flipped bits"""

    name: str
    most_bytes: int
    values: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)
    down: bool = False
    shared: bool = False
    is_damaged: bool = False

    @property
    def used_bytes(self) -> int:
        return sum(len(value) for value, _ in self.values.values())


class SimTier:
    def __init__(self, world: World, store: SimTierStore, checker: Checker) -> None:
        self._world = world
        self._store = store
        self._checker = checker
        # chance that a cancelled transfer goes on
        self.lingers = world.random.choice((0.0, 0.3, 0.8))
        self.lands = world.random.random() < 0.5  # a cancelled put that goes on stores its value
        self.hangs = world.random.choice((0.0, 0.0, 0.03))
        self.usual_s = world.random.choice((0.0002, 0.002, 0.01))
        self.removal_s = world.random.choice((0.0, 0.1, 3.0)) if store.shared else 0.0
        self.traits = TierTraits(
            name="sim",
            durable=True,
            expires=True,
            replaces=True,
            shared=store.shared,
            batch_bytes=world.random.choice((1, 20_000, 1 << 20)),
        )

    async def check(self) -> None:
        await self._round_trip("check")

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        await self._round_trip("probe")
        return [len(value) if (value := self._find(key)) is not None else None for key in keys]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        await self._round_trip("get")
        got: list[int | TierError | None] = []
        for key, parts in zip(keys, into, strict=True):
            value = self._find(key)
            if value is None or len(value) > size_of(parts):
                got.append(None)
                continue
            await self._transfer(key, parts, value)
            got.append(len(value))
        return got

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        await self._round_trip("put")
        faults: list[TierError | None] = []
        for key, parts in items:
            if self._find(key) is not None:
                faults.append(None)
                continue
            if self._store.used_bytes + size_of(parts) > self._store.most_bytes:
                faults.append(TierFull(self._store.name, "put", "no room"))
                continue
            value = await self._transfer(key, parts, None)
            if self._find(key) is None:
                self._store.values[key] = (
                    value,
                    0.0 if ttl_s is None or ttl_s == inf else self._world.wall() + ttl_s,
                )
            faults.append(None)
        return faults

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        await self._round_trip("replace")
        done: list[bool | TierError] = []
        for key, parts in items:
            value = await self._transfer(key, parts, None)
            if self._find(key) is None:
                done.append(False)
                continue
            self._store.values[key] = value, self._store.values[key][1]
            done.append(True)
        return done

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        await self._round_trip("delete")
        return [self._store.values.pop(key, None) is not None for key in keys]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        await self._round_trip("scan")
        if self.removal_s:
            await asyncio.sleep(self._world.random.random() * self.removal_s)
        for key in [key for key in self._store.values if key.startswith(prefix)]:
            yield key

    async def close(self) -> None: ...

    async def _round_trip(self, operation: str) -> None:
        await asyncio.sleep(self._world.delay(self.usual_s, slow=0.02, slow_s=1.0))
        if self._store.down:
            raise TierUnavailable(self._store.name, operation, "it is down")

    def _find(self, key: bytes) -> bytes | None:
        value, expires_at = self._store.values.get(key, (None, 0.0))
        return None if value is None or 0 < expires_at <= self._world.wall() else value

    async def _transfer(self, key: bytes, parts: Parts, value: bytes | None) -> bytes:
        places = [self._checker.place_of(part) for part in parts]
        pieces: list[bytes] = []
        at, cancelled = 0, False
        for part, place in zip(parts, places, strict=True):
            flat = part.cast("B") if part.nbytes else part
            for start in range(0, part.nbytes, max(1, part.nbytes // 2)):
                piece = flat[start : start + max(1, part.nbytes // 2)]
                cancelled = await self._pause(cancelled)
                self._checker.touches(
                    place,
                    f"tier {self._store.name}: {'write' if value is not None else 'read'} "
                    f"of {key.hex()[-16:]}",
                )
                if value is None:
                    pieces.append(bytes(piece))
                else:
                    some = value[at : at + piece.nbytes]
                    piece[: len(some)] = some
                at += piece.nbytes
        if cancelled and not (value is None and self.lands):
            raise asyncio.CancelledError
        return b"".join(pieces) if value is None else value

    async def _pause(self, cancelled: bool) -> bool:
        random = self._world.random
        is_slow = random.random() < self.hangs
        until = self._world.now + (
            random.random() * 20.0 if is_slow else random.expovariate(5 / self.usual_s)
        )
        while (left := until - self._world.now) > 0:
            if is_slow and not self.hangs:
                break
            try:
                await asyncio.sleep(min(left, _LOOK_S) if is_slow else left)
            except asyncio.CancelledError:
                if random.random() >= self.lingers:
                    raise
                cancelled = True
        return cancelled
