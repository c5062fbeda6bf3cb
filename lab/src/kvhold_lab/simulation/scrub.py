import asyncio
from collections.abc import Callable
from typing import Any

from kvhold.cache.scrub import Scrubber
from kvhold.cache.state import CacheState
from kvhold.tiers.ram import Entry
from kvhold_lab.simulation.checker import Checker, MemoryPlace
from kvhold_lab.simulation.world import World


class SimScrubber:
    def __init__(
        self,
        world: World,
        checker: Checker,
        state: CacheState,
        post: Callable[[Callable[[], None]], None],
        number: int,
        interval_s: float,
    ) -> None:
        self.held: list[tuple[Entry, MemoryPlace]] = []
        self.passes = 0
        self._world = world
        self._checker = checker
        self._post = post
        self._number = number
        self._scrubber = Scrubber(state, post, interval_s)
        self._usual_s = world.random.choice((0.0001, 0.01, 0.1))
        self.loop = world.new_loop(f"scrubber-{number}")
        self.loop.create_task(self._run())

    async def _run(self) -> None:
        nbytes: int | None = None
        while True:
            await asyncio.sleep(self._scrubber.pause_s(nbytes))
            nbytes = await self._step()

    async def _step(self) -> int | None:
        taken: asyncio.Future[list[Entry] | None] = self.loop.create_future()
        self._post(lambda: self._take(taken))
        entries = await taken
        if entries is None:
            self.passes += 1
            return None
        damaged = [entry for entry, place in self.held if not await self._is_whole(entry, place)]
        self._post(lambda: self._give_back(entries, damaged))
        return sum(entry.nbytes for entry in entries)

    def _take(self, taken: "asyncio.Future[Any]") -> None:
        entries = self._scrubber.take()
        self.held = [(entry, self._checker.place_at(entry.offset)) for entry in entries or ()]
        self.loop.call_soon(taken.set_result, entries)

    async def _is_whole(self, entry: Entry, place: MemoryPlace) -> bool:
        layers = self._scrubber.compare(entry)
        while True:
            await asyncio.sleep(self._world.delay(self._usual_s, slow=0.01, slow_s=2.0))
            self._checker.touches(place, f"the scrubber reads {entry.key.hex()[-16:]}")
            is_whole = next(layers, None)
            if is_whole is None:
                return True
            if not is_whole:
                if not self._checker.may_be_damaged(self._number, entry.offset):
                    self._world.find(
                        f"the scrubber finds damage in {entry.key.hex()[-16:]}, but no fault "
                        "damaged it"
                    )
                return False

    def _give_back(self, entries: list[Entry], damaged: list[Entry]) -> None:
        self.held = []
        self._scrubber.give_back(entries, damaged)
