"""A central cache: the real server, simulated sockets, a failing tier."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from kvhold.core.config import Config, ListenConfig
from kvhold.core.errors import TierError
from kvhold.core.keys import KEY_BYTES
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import EVICTED
from kvhold.net import central as c
from kvhold.net import login
from kvhold.net import pool as pool_module
from kvhold.net import stream as stream_module
from kvhold.net.stream import Address, Stream
from kvhold.net.wire import LENGTH_BYTES, Decoder, encode
from kvhold.node.central import Central
from kvhold.node.central_store import CentralStore
from kvhold.node.logins import Logins
from kvhold.tiers import exchanges as exchanges_module
from kvhold.tiers.base import Parts, TierTraits
from kvhold.tiers.central import CentralConfig, CentralTier
from kvhold.tiers.faults import FaultConfig, FaultTier
from kvhold.tiers.generations import is_marker
from kvhold.tiers.guard import Guard
from kvhold.tiers.ram import ADMITTED, Entry
from kvhold.tiers.stack import Stack
from kvhold_lab.simulation.checker import CheckedMemory, Checker, MemoryPlace
from kvhold_lab.simulation.clears import Markers
from kvhold_lab.simulation.draw import draw_guard, draw_rules
from kvhold_lab.simulation.node import SimArena
from kvhold_lab.simulation.sizes import DrawnSizes
from kvhold_lab.simulation.sockets import Network, SimListener, SimSocket
from kvhold_lab.simulation.store import SimTier, SimTierStore
from kvhold_lab.simulation.world import SimLoop, World

_HOST, _PORT, _TOKEN = "10.0.0.9", 7710, "the token"
_ADDRESS = f"{_HOST}:{_PORT}"
_PAGE_BYTES = 4096
_STRANGE = b"stranger".ljust(KEY_BYTES, b"-")
_REST_S = 300.0
_HARMLESS = ("error", "delay", "hang")
_MOST_OF_STRANGER = LENGTH_BYTES + login.MAX_HELLO_BYTES
_greeting: Decoder[Any] = Decoder(c.Greeting)


CENTRAL_SIZES = DrawnSizes(
    (stream_module, "AHEAD_BYTES", (64, 300, 16 << 10)),
    (stream_module, "_STEP_BYTES", (100, 1 << 20)),
    (stream_module, "_MERGE_BYTES", (1, 50, 4 << 10)),
    (pool_module, "_LANE_BYTES", (500, 1 << 20)),
    (pool_module, "_MAX_IN_FLIGHT_BYTES", (500, 4 << 20)),
    (exchanges_module, "_BATCH_BYTES", (300, 8 << 20)),
)


class _Arena(SimArena):
    regions: ClassVar[tuple[()]] = ()

    def close(self) -> None:
        """The garbage collector frees it."""


class _SimStore(CentralStore):
    def __init__(
        self,
        world: World,
        checker: Checker,
        config: Config,
        arena: _Arena,
        guards: list[Guard],
        metrics: Metrics,
    ) -> None:
        self._prepare(config, arena, Stack(guards), metrics, clock=world.wall)  # type: ignore[arg-type]
        self.memory: CheckedMemory = checker.watch(0, self, arena.data)  # type: ignore[arg-type]


class _SimCentral(Central):
    def __init__(
        self, config: Config, central_store: CentralStore, network: Network, most_strangers: int
    ) -> None:
        super().__init__(config, central_store)
        self._network = network
        self._logins = Logins(most=most_strangers, most_of_network=max(1, most_strangers // 2))

    def _listen(self) -> Any:
        return SimListener(self._network, _ADDRESS)

    async def _connection(self, listener: Any) -> Any:
        return await asyncio.get_running_loop().sock_accept(listener)


class Borrowed:
    def __init__(self, world: World, checker: Checker, who: str) -> None:
        self.world = world
        self._checker = checker
        self._who = who
        self._parts: dict[int, list[tuple[int, int, MemoryPlace]]] = {}
        self._last = 0

    def lend(self, parts: Sequence[Parts]) -> int:
        self._last += 1
        found = [
            (_address(part), part.nbytes, self._checker.place_of(part))
            for of_key in parts
            for part in of_key
            if part.nbytes
        ]
        self._parts[self._last] = [
            (at, size, place) for at, size, place in found if place.node is not None
        ]
        return self._last

    def give_back(self, number: int) -> None:
        del self._parts[number]

    def touch(self, view: memoryview, verb: str) -> None:
        if self._checker.place_of(view).node is None or not view.nbytes:
            return
        at = _address(view)
        for parts in self._parts.values():
            for start, size, place in parts:
                if start <= at < start + size:
                    self._checker.touches(place, f"{self._who} {verb}")
                    return
        self.world.find(f"{self._who} {verb} memory that none of its calls has")


class _WatchedTier:
    def __init__(self, tier: CentralTier, borrowed: Borrowed) -> None:
        self.traits: TierTraits = replace(tier.traits, durable=True)
        self._tier = tier
        self._borrowed = borrowed
        self.removal_s = borrowed.world.random.choice((0.0, 0.1, 3.0))

    async def check(self) -> None:
        await self._tier.check()

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        return await self._tier.probe(keys)

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        number = self._borrowed.lend(into)
        try:
            return await self._tier.get(keys, into, starts=starts)
        finally:
            self._borrowed.give_back(number)

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        number = self._borrowed.lend([parts for _, parts in items])
        try:
            return await self._tier.put(items, ttl_s=ttl_s)
        finally:
            self._borrowed.give_back(number)

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        return await self._tier.delete(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        if self.removal_s:
            await asyncio.sleep(self._borrowed.world.random.random() * self.removal_s)
        async for key in self._tier.scan(prefix):
            yield key

    async def close(self) -> None:
        await self._tier.close()


class SimCentral:
    shared = True
    name = "central"

    def __init__(self, world: World, markers: Markers) -> None:
        CENTRAL_SIZES.draw(world.random)
        self.world = world
        self.markers = markers
        self.random = random = world.random
        self.down = False
        self.most_bytes = 0
        self.over = False
        self.lower = SimTierStore("below", 1 << 20)
        self._network = Network(world)
        self._sockets: dict[SimLoop, list[SimSocket]] = {}
        self._strangers: list[tuple[SimSocket, bool]] = []
        self._pressure_s = random.choice((0.05, 0.05, 0.2))
        self._reads_s = random.choice((0.0, 0.02, 0.1))
        self._checker = Checker(world)
        self._arena_bytes = _PAGE_BYTES * random.choice((4, 8, 16, 64))
        self._has_lower = random.random() < 0.7
        hasty_s = random.choice((0.02, 0.1, 2.0))
        self._guard = replace(
            draw_guard(random, 0), name="below", codec="raw", read_only=False, get_timeout_s=hasty_s
        )
        self._config = Config(
            ram_bytes=self._arena_bytes,
            policy=random.choice(("lru", "s3fifo")),
            write_behind_bytes=random.choice((300, 3_000, 1 << 20)),
            drain_timeout_s=random.choice((0.0, 1.0)),
            listen=ListenConfig(
                address=_ADDRESS,
                token=_TOKEN,
                insecure=True,
                max_value_bytes=random.choice((2_000, 1 << 20)),
                max_connections=random.choice((16, 40)),
                request_timeout_s=random.choice((0.1, 2.0, 60.0)),
            ),
        )
        self._most_strangers = random.choice((2, 8, 256))
        self._loop: SimLoop | None = None
        self._central: _SimCentral | None = None
        self._serving: asyncio.Task[None] | None = None
        self._num_starts = 0

    def start(self) -> None:
        world = self.world
        self._num_starts += 1
        self._loop = loop = world.new_loop(f"central-{self._num_starts}")
        metrics = Metrics()
        below = SimTier(world, self.lower, self._checker)
        below.hangs = 0.0 if self.over else self.random.choice((0.0, 0.05, 0.2))
        self._fault = FaultTier(below, FaultConfig(seed=self.random.getrandbits(30)))
        guards = (
            [Guard(self._fault, self._guard, name="below", metrics=metrics)]
            if self._has_lower
            else []
        )
        central_store = _SimStore(
            world, self._checker, self._config, _Arena(self._arena_bytes), guards, metrics
        )
        central_store.ram.watch = self._changed
        self._central = _SimCentral(
            self._config, central_store, self._network, self._most_strangers
        )
        self._serving = loop.create_task(self._central.serve())
        world.note("the central cache starts")
        if self._pressure_s:
            world.later(self._pressure_s, self._evict, central_store)
        if self._reads_s:
            world.later(self._reads_s, self._read, central_store)

    def tier(self, checker: Checker, loop: SimLoop, host: str) -> Any:
        borrowed = Borrowed(self.world, checker, f"{host}'s tier")

        async def connect(address: Address, tls: ssl.SSLContext | None) -> Stream:
            sock: Any = await self._network.connect(str(address), loop, host, borrowed.touch)
            self._sockets.setdefault(loop, []).append(sock)
            return Stream(sock)

        config = CentralConfig(
            host=_HOST,
            port=_PORT,
            token=_TOKEN,
            insecure=True,
            connections=self.random.choice((1, 2, 3)),
        )
        return _WatchedTier(CentralTier(config, connect=connect), borrowed)

    def host_died(self, loop: SimLoop) -> None:
        for sock in self._sockets.pop(loop, ()):
            sock.close()

    @property
    def values(self) -> list[bytes]:
        here = (
            [entry.key for entry in self._central.central_store.ram.entries()]
            if self._central is not None
            else []
        )
        return [key for key in (*here, *self.lower.values) if key != _STRANGE]

    def lose(self, key: bytes) -> None:
        self.lower.values.pop(key, None)
        if (
            self._central is not None
            and (entry := self._central.central_store.ram.find(key)) is not None
        ):
            self._central.central_store.ram.remove(entry)

    def _evict(self, central_store: CentralStore) -> None:
        if self.over or self._central is None or self._central.central_store is not central_store:
            return
        ram = central_store.ram
        for entry in ram.entries():
            if (
                entry.committed
                and not entry.pins
                and not is_marker(entry.key)
                and self.random.random() < 0.7
            ):
                ram.remove(entry, why=EVICTED)
        self.world.later(self.random.expovariate(1 / self._pressure_s), self._evict, central_store)

    def _read(self, central_store: _SimStore) -> None:
        if self.over or self._central is None or self._central.central_store is not central_store:
            return
        keys = sorted(key for key in self.lower.values if not is_marker(key))
        if keys and self._loop is not None:
            self._loop.create_task(central_store.bring(self.random.choices(keys, k=3)))
        self.world.later(self.random.expovariate(1 / self._reads_s), self._read, central_store)

    def _changed(self, what: str, entry: Entry) -> None:
        if what == ADMITTED:
            self.markers.came(entry.key)
        else:
            self.markers.went(entry.key)

    def trouble(self) -> None:
        if not self.over:
            random = self.random
            kinds = (
                self._die,
                self._stop,
                self._fail,
                self._fail,
                self._fail,
                self._stand_still,
                self._break,
                self._knock,
                self._knock,
            )
            random.choice(kinds)()

    def _die(self) -> None:
        if self._loop is None:
            return
        self.world.kill(self._loop)
        self._gone("is killed")

    def _stop(self) -> None:
        central, serving, loop = self._central, self._serving, self._loop
        if central is None or serving is None or loop is None or central._stopped.is_set():
            return
        self.world.note("the central cache is told to stop")
        loop.call_soon(central.stop)

        def ended(_: Any) -> None:
            if self._loop is loop:
                self.world.kill(loop)
                self._gone("has stopped")

        serving.add_done_callback(lambda done: self.world.later(0.0, ended, done))

    def _gone(self, how: str) -> None:
        self.world.note("the central cache %s", how)
        self._loop = self._central = self._serving = None
        if (listener := self._network.listeners.get(_ADDRESS)) is not None:
            listener.close()
        for sock in self.world.sockets.values():
            if sock.is_of_server:
                sock.close()
        self.markers.all_went()
        self.world.later(self.random.random() * 3.0, self._start_again)

    def _start_again(self) -> None:
        if self._loop is None:
            self.start()

    def _fail(self) -> None:
        fault = self._fault
        fault.rules = [rule for rule in draw_rules(self.random) if rule.kind in _HARMLESS]
        self.world.note("below the central cache: %s", fault.rules)

        def works_again() -> None:
            fault.release()
            fault.rules = ()

        self.world.later(self.random.random() * 6.0, works_again)

    def _stand_still(self) -> None:
        if self._loop is not None:
            self._loop.stall(self.random.choice((0.05, 1.0, 5.0)))

    def _break(self) -> None:
        living = [
            sock
            for socks in self._sockets.values()
            for sock in socks
            if not sock.closed and not sock.peer.closed
        ]
        if living:
            sock = self.random.choice(living)
            sock.reset()
            sock.peer.reset()

    def _knock(self) -> None:
        for _ in range(self.random.choice((1, 3, 20))):
            says, may_enter = self._draw_words()
            sock = self._network.knock(_ADDRESS, f"10.9.{self.random.randrange(3)}.1", None)
            if sock is None:
                return
            self._strangers.append((sock, may_enter))
            for at in range(0, len(says), 3_000):
                self.world.later(self.world.delay(0.01), _say, sock, says[at : at + 3_000])
            if self.random.random() < 0.5:
                self.world.later(self.random.random() * 8.0, sock.close)

    def _draw_words(self) -> tuple[bytes, bool]:
        random = self.random
        hello = bytes(encode(login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION, _TOKEN)))
        outside = (
            b"",
            random.randbytes(random.choice((1, 100, 20_000))),
            b"\xff\xff\xff\xff" + bytes(9_000),
            (9_000).to_bytes(LENGTH_BYTES, "little") + bytes(9_000),
            hello[: random.randrange(1, len(hello))],
            bytes(
                encode(
                    login.LoginHello(
                        c.CENTRAL_MAGIC,
                        c.CENTRAL_VERSION,
                        random.choice(("", "another", "x" * 3_000)),
                    )
                )
            ),
            bytes(encode(login.LoginHello("another", c.CENTRAL_VERSION, _TOKEN))),
            bytes(encode(login.LoginHello(c.CENTRAL_MAGIC, 99, _TOKEN))) + b"x" * 9_000,
        )
        value = random.randbytes(500)
        inside = (
            random.randbytes(50),
            bytes(encode(c.Put(_STRANGE, [500], None))) + value[: random.choice((0, 100, 500))],
            bytes(encode(c.Put(_STRANGE, [1 << 40], None))) + value,
            bytes(encode(c.Get(_STRANGE * 30, [1 << 20] * 30))) * 20,
            bytes(encode(c.Get(_STRANGE, [1, 2]))),
            bytes(encode(c.Scan(b"", b""))) * 5,
        )
        may_enter = random.random() < 0.4
        return (
            (hello + random.choice(inside), True) if may_enter else (random.choice(outside), False)
        )

    def end_trouble(self) -> None:
        self.over = True
        if self._loop is None:
            self.start()
        self._fault.rules = ()
        self._fault.release()
        self._fault._inner.hangs = 0.0  # type: ignore[attr-defined]

    def rest(self) -> None:
        def rests() -> bool:
            central = self._central
            if central is None or len(central._logins):
                return False
            central_store = central.central_store
            below = all(
                guard.available and not guard._stuck for guard in central_store._stack.guards
            )
            moving = central_store._bringing or central_store._writes or central_store._tasks
            return below and not moving

        if not self.world.run(rests, most_s=_REST_S):
            self.world.find(
                "the central cache does not come to rest: "
                f"{self._central and len(self._central._logins)} strangers"
            )
        for sock, may_enter in self._strangers:
            if not may_enter:
                self._check_stranger(sock)

    def _check_stranger(self, sock: SimSocket) -> None:
        if sock.peer.num_received > _MOST_OF_STRANGER:
            self.world.find(f"{sock.peer.num_received} bytes were read from a stranger")
        data = bytes(sock._in)
        body = data[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")]
        whole = body and len(data) >= LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
        if whole and not isinstance(_greeting.decode(body), login.LoginRefused):
            self.world.find("a stranger was welcomed")

    def check_end(self) -> None:
        for sock, _ in self._strangers:
            sock.close()
        self.rest()
        if self.world.findings or self._central is None:
            return
        central_store: Any = self._central.central_store

        def is_idle() -> bool:
            return (
                all(entry.committed for entry in central_store.ram.entries())
                and not central_store.ram.num_pinned
                and not central_store._writes.queued_bytes
            )

        if not self.world.run(is_idle, most_s=_REST_S):
            self.world.find(
                "the central cache ends with reserved or pinned memory, or with unfinished writes"
            )
        entries = central_store.ram.entries()
        if len(central_store.memory.allocations) != len(entries):
            self.world.find(
                f"the central cache has {len(entries)} values and "
                f"{len(central_store.memory.allocations)} allocations"
            )
        if self._serving is None or self._serving.done():
            self.world.find("the central cache has ended by itself")


def _say(sock: SimSocket, data: bytes) -> None:
    try:
        sock.sendmsg([memoryview(data)])
    except OSError:
        return


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view.cast("B"), np.uint8).ctypes.data)
