"""The rule that hand-overs are kept for their time."""

from dataclasses import dataclass
from typing import Any

from kvhold.cache.chores import Turns
from kvhold.cache.state import CacheState
from kvhold.core.keys import NAME_BYTES, Prompt
from kvhold.core.reasons import EVICTED
from kvhold.tiers.ram import ADMITTED, Entry
from kvhold_lab.simulation.client import SimClient
from kvhold_lab.simulation.draw import draw_producer, draw_reader
from kvhold_lab.simulation.world import World

_READS = 0.5


class SimHandovers:
    def __init__(self, world: World) -> None:
        self._world = world
        self._begun: list[Prompt] = []

    async def operate(self, client: SimClient, prompt: Prompt) -> None:
        random = self._world.random
        if self._begun and random.random() < _READS:
            prompt = self._begun.pop(random.randrange(len(self._begun)))
            intent = draw_reader(random, prompt)
        else:
            self._begun.append(prompt)
            request = random.choice(("repeated", f"request {self._world.number()}"))
            intent = draw_producer(random, prompt, request)
        await client.load(
            prompt,
            have_tokens=0,
            work=None,
            wait_s=random.choice((0.5, 10.0)),
            share=False,
            intent=intent,
        )


@dataclass(eq=False)
class _Promise:
    """since_s: the lookup, or the last stored chunk
    may_end: an engine has read the prompt, or it ended otherwise
    """

    owner: Any
    request: str
    names: frozenset[bytes]
    keep_s: float
    since_s: float
    may_end: bool = False


class HandoverPromises:
    def __init__(self, world: World) -> None:
        self._world = world
        self._promises: list[_Promise] = []

    def watch(self, state: CacheState) -> None:
        self._promises.clear()
        pins: Any = state._handovers
        begin, read, release, clear = pins.begin_turns, pins.read, pins.release_owner, pins.clear

        def begins(owner: Any, query: Any, layout: Any, intent: Any) -> Turns[None]:
            request = intent.cost.request
            self._may_end(lambda one: one.owner is owner and one.request == request)
            yield from begin(owner, query, layout, intent)
            kept = pins._by_owner.get(owner, {}).get(request)
            if intent.keep_s > 0 and kept is not None:
                names = frozenset(kept.names)
                self._promises.append(
                    _Promise(owner, request, names, intent.keep_s, self._world.now)
                )

        def reads(query: Any) -> None:
            self._may_end(lambda one: next(iter(one.names)).startswith(query.namespace))
            read(query)

        def releases(owner: Any) -> None:
            self._may_end(lambda one: one.owner is owner)
            release(owner)

        def clears(prefix: bytes) -> None:
            self._may_end(lambda one: next(iter(one.names)).startswith(prefix))
            clear(prefix)

        pins.begin_turns, pins.read = begins, reads
        pins.release_owner, pins.clear = releases, clears
        tell = state.ram.watch

        def notes(what: str, entry: Entry) -> None:
            self._note(what, entry)
            if tell is not None:
                tell(what, entry)

        state.ram.watch = notes

    def check(self, state: CacheState) -> None:
        state._handovers.expire()
        self._forget_late()
        names = {
            name
            for promise in self._promises
            if promise.owner._verbs  # its client is there
            for name in promise.names
        }
        for entry in state._handovers.kept():
            name = entry.key.hex()[-16:]
            if entry.key[:NAME_BYTES] not in names:
                self._world.find(f"{name} is kept, but no engine hands it over any more")
            if state.ram._entries.get(entry.key) is not entry:
                self._world.find(f"{name} is kept, but was removed")

    def _may_end(self, is_meant: Any) -> None:
        for promise in self._promises:
            if is_meant(promise):
                promise.may_end = True

    def _note(self, what: str, entry: Entry) -> None:
        self._forget_late()
        name, now = entry.key[:NAME_BYTES], self._world.now
        for promise in self._promises:
            if name not in promise.names:
                continue
            if what == ADMITTED:
                promise.since_s = now
            elif what == EVICTED and not promise.may_end:
                self._world.find(
                    f"{entry.key.hex()[-16:]} was evicted {now - promise.since_s:.3f} s after the "
                    f"last chunk, but is kept for another engine for {promise.keep_s} s"
                )

    def _forget_late(self) -> None:
        now = self._world.now
        self._promises = [one for one in self._promises if now < one.since_s + one.keep_s]
