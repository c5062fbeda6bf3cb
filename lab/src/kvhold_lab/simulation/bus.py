"""A NATS JetStream.

Messages come late, twice, forged or not at all.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any, NamedTuple

from kvhold.core.errors import TierUnavailable
from kvhold.node import peer_publisher
from kvhold.tiers.peers import bus
from kvhold.tiers.peers.bus import Inboxes, wait_for_end
from kvhold.tiers.peers.faults import TIER
from kvhold_lab.simulation.sizes import DrawnSizes
from kvhold_lab.simulation.world import SimLoop, World

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CALL_S = 2.0
_LONGEST_LAG_S = 15.0
_MOST_KEPT = 3000

BUS_SIZES = DrawnSizes(
    (bus, "_MOST_WAITING_BYTES", (300, 5_000, 4 << 20)),
    (peer_publisher, "BATCH_BYTES", (1, 300, 64 << 10)),
)


class _Message(NamedTuple):
    """sealed_s: before all times: it is forged"""

    incarnation: int
    data: bytes
    sealed_s: float


class _Away(Exception):
    """The server does not answer, or its answer is lost."""


class SimStream:
    """is_fair: nothing is lost at random"""

    def __init__(self, world: World, *, usual_s: float) -> None:
        self.world = world
        self.random: Random = world.random
        self.usual_s = usual_s
        self.is_up = True
        self._messages: deque[_Message] = deque()
        self.last = 0
        self._keeps = self.random.choice((5, 50, _MOST_KEPT))
        self._loses = self.random.choice((0.0, 0.02))
        self.is_fair = not self._loses
        self.lag_s: dict[str, float] = {}
        self._cut: set[str] = set()
        self.subscriptions: list[_Subscription] = []
        self.num_starts = 0

    @property
    def first(self) -> int:
        return self.last - len(self._messages) + 1

    def reaches(self, host: str) -> bool:
        return self.is_up and host not in self._cut

    def loses(self) -> bool:
        return not self.is_fair and self.random.random() < self._loses

    def append(self, message: _Message) -> None:
        self.last += 1
        self._messages.append(message)
        while len(self._messages) > self._keeps:
            self._messages.popleft()
        for subscription in self.subscriptions:
            subscription.wake()

    def after(self, number: int) -> list[_Message]:
        num_new = min(self.last - number, len(self._messages))
        return [self._messages[at - num_new] for at in range(num_new)]

    def trouble(self, hosts: list[str]) -> None:
        random, world = self.random, self.world
        seconds = random.choice((0.3, 3.0, 8.0, 30.0)) * random.random()
        host = random.choice(hosts)
        kind = random.choice(("down", "lag", "lag of all", "cut", "purge", "replay", "forge"))
        world.note("the bus: %s, %s, %.3f s", kind, host, seconds)
        match kind:
            case "down":
                self._go_down(keeps_messages=random.random() < 0.5)
                world.later(seconds, self._come_back)
            case "lag" | "lag of all":
                for one in hosts if kind == "lag of all" else [host]:
                    self.lag_s[one] = random.random() * _LONGEST_LAG_S
                    world.later(seconds, self.lag_s.pop, one, None)
            case "cut":
                self._cut.add(host)
                world.later(seconds, self._cut.discard, host)
            case "purge":
                self._messages.clear()
            case "replay" if self._messages and self.is_up:
                self.append(random.choice(self._messages))
            case "forge" if self._messages and self.is_up:
                self._forge(random.choice(self._messages))

    def end_trouble(self) -> None:
        self.is_fair = True
        self.lag_s.clear()
        self._cut.clear()
        self._come_back()

    def _forge(self, message: _Message) -> None:
        data = bytearray(message.data)
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.append(_Message(message.incarnation, bytes(data), -1.0))

    def _go_down(self, *, keeps_messages: bool) -> None:
        self.is_up = False
        if not keeps_messages:
            self._messages.clear()
            self.last = 0
            self.num_starts += 1
        for subscription in list(self.subscriptions):
            subscription.end()

    def _come_back(self) -> None:
        self.is_up = True


class SimBus:
    """newest_s: by incarnation, the sealing time of its newest message"""

    source = "the simulated bus"

    def __init__(self, stream: SimStream, host: str) -> None:
        self._stream, self._host = stream, host
        self._world, self._random = stream.world, stream.random
        self.fault = "not connected yet"
        self.newest_s: dict[int, float] = {}

    async def read(self, inboxes: Inboxes) -> None:
        pause_s, number = _FIRST_PAUSE_S, 0
        while True:
            with suppress(TierUnavailable):
                async with self.connected() as session:
                    subscription = session.subscribe(inboxes, after=number)
                    pause_s = _FIRST_PAUSE_S
                    try:
                        await subscription.ended()
                    finally:
                        number = subscription.number
                        subscription.end()
            await asyncio.sleep(pause_s * (0.5 + self._random.random()))
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["_Session"]:
        session = _Session(self, self._stream, self._host)
        try:
            await session.round_trip()
            self.fault = ""
            yield session
        except _Away:
            self.fault = "the simulated bus does not answer"
            raise TierUnavailable(TIER, "bus", self.fault) from None

    async def check(self) -> list[str]:
        return [self.fault] if self.fault else []


class _Session:
    def __init__(self, own: SimBus, stream: SimStream, host: str) -> None:
        self._own, self._stream, self._host = own, stream, host
        self._num_starts = stream.num_starts

    async def round_trip(self) -> None:
        await asyncio.sleep(self._stream.world.delay(0.0005, slow=0.01))
        if not self._stream.reaches(self._host):
            await asyncio.sleep(_CALL_S * self._stream.random.random())
            raise _Away

    async def publish(self, incarnation: int, data: bytes) -> None:
        stream = self._stream
        message = _Message(incarnation, data, stream.world.now)
        await self.round_trip()
        if stream.num_starts != self._num_starts:
            raise _Away
        stream.append(message)
        if stream.loses():
            await asyncio.sleep(_CALL_S)
            raise _Away

    def subscribe(self, inboxes: Inboxes, *, after: int) -> "_Subscription":
        """after: number of the last read message; 0: begin with new ones"""
        stream = self._stream
        resumes = 0 < after <= stream.last
        return _Subscription(
            self._own, stream, self._host, inboxes, after if resumes else stream.last
        )


class _Subscription:
    def __init__(
        self, own: SimBus, stream: SimStream, host: str, inboxes: Inboxes, number: int
    ) -> None:
        self.number = self._sent = number
        self._own, self._stream, self._host, self._inboxes = own, stream, host, inboxes
        self._loop: Any = asyncio.get_running_loop()
        assert isinstance(self._loop, SimLoop)
        self._is_on_its_way = self._has_ended = False
        self._num_taken = 0
        self._end = asyncio.Event()
        stream.subscriptions.append(self)
        self.wake()

    def wake(self) -> None:
        stream = self._stream
        if self._is_on_its_way or self._sent >= stream.last:
            return
        self._is_on_its_way = True
        delay_s = stream.world.delay(stream.usual_s, slow=0.01, slow_s=2.0)
        stream.world.later(delay_s + stream.lag_s.get(self._host, 0.0), self._arrive)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._stream.subscriptions.remove(self)
            self._loop.call_soon(self._end.set)

    async def ended(self) -> None:
        await wait_for_end(self._end, lambda: self._num_taken)

    def _arrive(self) -> None:
        self._is_on_its_way = False
        stream = self._stream
        if self._loop.dead:
            self.end()
        if self._has_ended or not stream.reaches(self._host):
            return
        messages = stream.after(self._sent)
        begin = stream.last - len(messages) + 1
        if len(messages) > 1 and stream.random.random() < 0.3:
            messages = messages[: stream.random.randrange(1, len(messages))]
        self._sent = begin + len(messages) - 1
        self._loop.call_soon(self._take, begin, messages)
        self.wake()

    def _take(self, begin: int, messages: list[_Message]) -> None:
        self._num_taken += len(messages)
        self.number = begin + len(messages) - 1
        stream, newest_s = self._stream, self._own.newest_s
        for incarnation, data, sealed_s in messages:
            if not stream.is_fair and stream.loses():
                continue
            if sealed_s > newest_s.get(incarnation, -1.0):
                newest_s[incarnation] = sealed_s
            self._inboxes.put(incarnation, data)
