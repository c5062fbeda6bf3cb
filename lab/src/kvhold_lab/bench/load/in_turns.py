"""Sends each request to several servers, one after the other."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvhold_lab.bench.load.runner import Send
from kvhold_lab.bench.load.work import Reply, Request, Result


@dataclass
class InTurns:
    sends: Mapping[str, Send]
    keep: Callable[[str, Result], None]
    _began: float = field(default_factory=time.perf_counter)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _num_requests: int = 0

    async def send(self, request: Request) -> Reply:
        due = time.perf_counter()
        async with self._turn:
            waited_s = time.perf_counter() - due
            results = {name: await self._one(name, request, waited_s) for name in self._order()}
        for name in self.sends:
            result = results[name]
            kept = replace(result, reply=replace(result.reply, content="", text=""))
            self.keep(name, kept)
        return results[next(iter(self.sends))].reply

    async def _one(self, name: str, request: Request, waited_s: float) -> Result:
        now = time.perf_counter()
        reply = await self.sends[name](request)
        return Result(request.group, request.labels, now - self._began, waited_s, reply)

    def _order(self) -> list[str]:
        names, first = list(self.sends), self._num_requests % len(self.sends)
        self._num_requests += 1
        return names[first:] + names[:first]
