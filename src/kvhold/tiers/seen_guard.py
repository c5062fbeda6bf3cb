"""What this host's calls show of a shared tier's values."""

from collections.abc import Callable, Iterable, Sequence

from kvhold.tiers.base import Parts
from kvhold.tiers.guard import Guard
from kvhold.tiers.outcomes import TierOutcome, Unknown


class SeenGuard(Guard):
    _tell: Callable[[bytes, bool], None] | None = None

    def watch(self, tell: Callable[[bytes, bool], None]) -> None:
        """tell: called with a key and whether it is there; at a clear with a prefix, and false"""
        self._tell = tell
        self.suppressed.tell = lambda prefix: tell(prefix, False)

    async def probe(
        self,
        keys: Sequence[bytes],
        silent: set[str] | None = None,
        unknown: Unknown | None = None,
    ) -> list[int | None]:
        own = Unknown()
        sizes = await super().probe(keys, silent, own)
        if own.why is None:
            self._saw(
                (key, size) for key, size in zip(keys, sizes, strict=True) if key not in own.keys
            )
        if unknown is not None:
            unknown.why = unknown.why or own.why
            unknown.keys.update(own.keys)
        return sizes

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> TierOutcome[int | None]:
        outcome = await super().get(keys, into, starts=starts)
        rows = zip(keys, outcome.items, outcome.failed, strict=True)
        self._saw((key, size) for key, size, has_failed in rows if not has_failed)
        return outcome

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> TierOutcome[bool]:
        outcome = await super().put(items, ttl_s=ttl_s)
        self._saw((key, 1) for (key, _), stored in zip(items, outcome.items, strict=True) if stored)
        return outcome

    async def replace(
        self, items: Sequence[tuple[bytes, Parts]], *, names: Sequence[bytes] | None = None
    ) -> TierOutcome[bool | None]:
        outcome = await super().replace(items, names=names)
        self._saw(
            (key, 1 if is_there else None)
            for (key, _), is_there in zip(items, outcome.items, strict=True)
            if is_there is not None
        )
        return outcome

    async def delete(self, keys: Sequence[bytes], silent: set[str] | None = None) -> list[bool]:
        removed = await super().delete(keys, silent)
        self._saw((key, None) for key in keys)
        return removed

    def _saw(self, sizes: Iterable[tuple[bytes, int | None]]) -> None:
        if self._tell is not None:
            for key, size in sizes:
                self._tell(key, size is not None and not self.suppressed.was_cleared(key))
