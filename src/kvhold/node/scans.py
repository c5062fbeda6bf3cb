"""Scans of a central store, page by page: every key in memory, then the keys that are only below.

    keys, more = await scans.page(prefix, after, most)

A scan is remembered between two pages by the last key of the page before, and goes on from there. Keys come in no order. A scan that was
forgotten, because many others began, starts again: then keys may come twice. No step looks at many keys, however many there are.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import RamTier
from kvhold.tiers.table import KeySet

_MOST_SCANS = 64  # that are remembered between two pages


class Scans:
    """Those of one store."""

    def __init__(self, ram: RamTier, guards: Sequence[Guard]) -> None:
        self._ram = ram
        self._guards = guards
        self._scans: OrderedDict[tuple[bytes, bytes], _Scan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scans)

    async def page(self, prefix: bytes, after: bytes, most: int) -> tuple[list[bytes], bool]:
        """Return the next keys of a scan, `most` at most, and whether there are more. after: the last key of the page before."""
        scan = self._scans.pop((prefix, after), None) or _Scan(self._parts(prefix))
        page, more = await scan.take(most)
        if more:
            self._scans[prefix, page[-1]] = scan
            if len(self._scans) > _MOST_SCANS:
                await self._scans.popitem(last=False)[1].end()
        else:
            await scan.end()
        return page, more

    async def _parts(self, prefix: bytes) -> AsyncIterator[list[bytes]]:
        """All keys, a few at a time; one that is in two places comes twice."""
        for entries in self._ram.parts():
            yield [entry.key for entry in entries if entry.key.startswith(prefix)]
        for guard in self._guards:
            for part in (await guard.scan(prefix)).taken():
                yield part


class _Scan:
    def __init__(self, parts: AsyncIterator[list[bytes]]) -> None:
        self._parts = parts
        self._seen = KeySet()
        self._left: list[bytes] = []

    async def take(self, most: int) -> tuple[list[bytes], bool]:
        """Return the next keys, and whether there are more."""
        while len(self._left) <= most:
            part = await anext(self._parts, None)
            if part is None:
                break
            self._left += self._seen.add(part)
            await asyncio.sleep(0)
        page = self._left[:most]
        del self._left[:most]
        return page, bool(self._left)

    async def end(self) -> None:
        """Forget it, in steps."""
        self._left.clear()
        for _ in self._seen.emptied():
            await asyncio.sleep(0)
