"""Scans of a central store: keys in memory, then keys in lower tiers only.

Keys are unordered and may recur.
"""

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from kvhold.core.turns import next_turn
from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import RamTier
from kvhold.tiers.table import KeySet

_MOST_SCANS = 64


class ScanPage(NamedTuple):
    keys: list[bytes]
    more: bool
    whole: bool


class Scans:
    def __init__(self, ram: RamTier, guards: Sequence[Guard]) -> None:
        self._ram = ram
        self._guards = guards
        self._scans: OrderedDict[tuple[bytes, bytes], _Scan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scans)

    async def page(self, prefix: bytes, after: bytes, most: int) -> ScanPage:
        scan = self._scans.pop((prefix, after), None)
        if scan is None:
            silent = set[str]()
            scan = _Scan(self._parts(prefix, silent), silent)
        page = await scan.take(most)
        if page.more:
            self._scans[prefix, page.keys[-1]] = scan
            if len(self._scans) > _MOST_SCANS:
                await self._scans.popitem(last=False)[1].end()
        else:
            await scan.end()
        return page

    async def _parts(self, prefix: bytes, silent: set[str]) -> AsyncIterator[list[bytes]]:
        """silent: gets the names of failing tiers"""
        for entries in self._ram.parts():
            yield [entry.key for entry in entries if entry.key.startswith(prefix)]
        for guard in self._guards:
            for part in (await guard.scan(prefix, silent)).taken():
                yield part


class _Scan:
    def __init__(self, parts: AsyncIterator[list[bytes]], silent: set[str]) -> None:
        self._parts = parts
        self._silent = silent
        self._seen = KeySet()
        self._left: list[bytes] = []

    async def take(self, most: int) -> ScanPage:
        while len(self._left) <= most:
            part = await anext(self._parts, None)
            if part is None:
                break
            self._left += self._seen.add(part)
            await next_turn()
        page = self._left[:most]
        del self._left[:most]
        return ScanPage(page, more=bool(self._left), whole=not self._silent)

    async def end(self) -> None:
        self._left.clear()
        for _ in self._seen.emptied():
            await next_turn()
