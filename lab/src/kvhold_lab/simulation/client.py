import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar, get_args

from kvhold.codecs.frame import checksum
from kvhold.core.api import Uses
from kvhold.core.checksums import pack, unpack
from kvhold.core.errors import DeadlineExceeded, KVHoldError, NodeError, ProtocolError
from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace, Prompt, make_key, split_hashes
from kvhold.core.planning import ComputeIntent
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.net import messages as m
from kvhold.net import offsets
from kvhold.node.membership import Departures, Duty, Membership
from kvhold_lab.simulation.checker import MemoryPlace, kv
from kvhold_lab.simulation.device import SimDevice
from kvhold_lab.simulation.link import SimLink, join
from kvhold_lab.simulation.node import SimNode
from kvhold_lab.simulation.world import SimLoop, World

Kind = TypeVar("Kind", bound=m.Message)

_CONNECT_TIMEOUT_S = 5.0
_TEND_S = 0.5
_PATIENCE_S = 5.0
_WITH_DEVICE = 0.3
_LAYOUT_IS_UNKNOWN = "was not registered"


@dataclass(frozen=True)
class Share:
    ticket: int
    prompt: Prompt
    num_tokens: int
    shard: int


class Signal:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        self._end()

    def clear(self) -> None:
        self._is_set = False

    async def wait(self, seconds: float) -> None:
        if self._is_set:
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, self._end)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SimClient:
    def __init__(
        self,
        world: World,
        number: int,
        checker: Any,
        find_node: Callable[[], SimNode | None],
        mailbox: list[Share],
    ) -> None:
        self.world = world
        self.number = number
        self.name = f"client-{number}"
        self.loop = world.new_loop(self.name)
        self.checker = checker
        self.alive = True
        self.links: list[SimLink] = []
        self.slow = world.random.choice((0.0002, 0.002, 0.02, 0.2))
        self.call_timeout_s = world.random.choice((0.2, 1.0, 1.0))
        self.heartbeat_s = world.random.choice((1.0, 5.0))
        self.reconnect_s = world.random.choice((0.05, 0.5))
        self._find_node = find_node
        self._mailbox = mailbox
        self._uses = cycle(get_args(Uses))
        self._device = (
            SimDevice(world, checker, self.name) if world.random.random() < _WITH_DEVICE else None
        )
        self._at_end: list[Callable[[], object]] = []
        self._ended = False
        self._departures = Departures()
        self._begin()

    def _begin(self) -> None:
        self.membership: Membership[SimLink] = Membership(
            "the node's socket", departures=self._departures
        )
        self._wake = Signal(self.loop)
        self._joined = asyncio.Event()
        self._with_device: set[SimLink] = set()
        self._told: set[bytes] = set()
        self.loop.create_task(self._keep(self.membership))

    def hurry(self) -> None:
        """Its device is fast: in a large fleet, all wait for the slowest."""
        if self._device is not None:
            self._device.hurry()

    def was_kicked(self) -> bool:
        return self.name in self.checker.kicked

    def kill(self, forked_s: float) -> None:
        """forked_s: how long a forked child keeps the sockets"""
        self.alive = False
        self.world.kill(self.loop)
        self._die()
        for end in [link.end for link in self.links if not link.end.closed]:
            if forked_s:
                end.fork()
                self.world.later(forked_s, end.close)
            end.close()

    def exit(self) -> None:
        self.leave()
        self._die()

    def _die(self) -> None:
        if self._device is not None:
            self._device.end(self._end)
        else:
            self._end()

    def has_ended(self) -> bool:
        return self._ended

    def when_ended(self, callback: Callable[[], object]) -> None:
        if self._ended:
            callback()
        else:
            self._at_end.append(callback)

    def _end(self) -> None:
        self._ended = True
        for callback in self._at_end:
            callback()

    def leave(self) -> None:
        link = self.membership.close()
        self._wake.set()
        if link is not None:
            link.retire()

    async def link(self) -> SimLink:
        if self.membership.link is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), _PATIENCE_S)
        return self.membership.current("call")

    async def call(
        self, link: SimLink, request: m.Message, expected: type[Kind], within_s: float | None = None
    ) -> Kind:
        answer = await self._ask(link, request, within_s)
        if not isinstance(answer, expected):
            if isinstance(answer, m.NotFound):
                raise NodeError("gone")
            self._break(link, "an answer of the wrong kind")
            self.world.find(f"{self.name}: {type(request).__name__} was answered with {answer}")
            raise ProtocolError("an answer of the wrong kind")
        return answer

    async def _ask(
        self, link: SimLink, request: m.Message, within_s: float | None, *, keep: bool = False
    ) -> m.Answer:
        operation = type(request).__name__.lower()
        if not keep and self.membership.is_silent(link, self.call_timeout_s):
            raise self.membership.silence(link, operation)
        try:
            answer = await link.call(request, within_s or self.call_timeout_s, keep=keep)
        except DeadlineExceeded:
            self._wake.set()
            raise
        except OSError as error:
            self._break(link, str(error))
            raise NodeError(f"{operation}: lost the node: {error}") from None
        except BaseException as error:
            if link.is_broken:
                self._break(link, str(error) or type(error).__name__)
            self._wake.set()
            raise
        if isinstance(answer, m.Refused):
            self._check_refusal(request, answer)
            raise NodeError(f"{operation}: the node refused: {answer.reason}")
        return answer

    def _check_refusal(self, request: m.Message, answer: m.Refused) -> None:
        told = isinstance(request, m.Lookup | m.Prefetch) and request.query.namespace in self._told
        told = told or (isinstance(request, m.Reserve) and request.names.namespace in self._told)
        if told and _LAYOUT_IS_UNKNOWN in answer.reason:
            self.world.find(f"{self.name}: a namespace is no longer known: {answer.reason}")

    async def give_back(
        self, link: SimLink, request: m.Message | None, *, held: bool = False
    ) -> None:
        if held:
            link.let_go()
            if link.closed:
                self._wake.set()
        within_s = self.membership.return_within_s(link, self.call_timeout_s)
        if request is not None and within_s is not None:
            with suppress(KVHoldError):
                await self._ask(link, request, within_s, keep=True)

    async def register(self, space: Namespace) -> None:
        if space.digest not in self._told:
            request = m.Register(space.layout, space.digest, DEFAULT_OPTIONS)
            self.membership.register(request)
            told = self._told
            await self.call(await self.link(), request, m.Done, _CONNECT_TIMEOUT_S)
            told.add(space.digest)

    def _break(self, link: SimLink, why: str) -> None:
        if self.membership.lose(link):
            self.world.note("%s: lost the node: %s", self.name, why)
            self._joined.clear()
            self._wake.set()
        link.retire()

    async def _keep(self, membership: Membership[SimLink]) -> None:
        while not membership.closed:
            link = membership.link
            if link is None:
                await self._rejoin(membership)
                continue
            if not link.has_loose_ends:
                await self._wake.wait(self.heartbeat_s)
            self._wake.clear()
            duty = membership.duty(link, self.world.now, self.heartbeat_s)
            try:
                if duty is Duty.TEND:
                    await link.tend(min(self.heartbeat_s, _TEND_S))
                elif duty is Duty.DEPART:
                    for departed in self._departures.due(link):
                        await self.call(link, departed, m.Done)
                        self._departures.told(departed)
                elif duty is Duty.PING:
                    await self.call(link, m.Ping(), m.Done)
            except KVHoldError as error:
                if link.is_broken:
                    self._break(link, str(error))
            except OSError as error:
                self._break(link, str(error))

    async def _rejoin(self, membership: Membership[SimLink]) -> None:
        link, told = None, set[bytes]()
        try:
            link = await join(self, self._find_node(), within_s=_CONNECT_TIMEOUT_S)
            self.links.append(link)
            while missing := membership.introduce(link, told):
                for request in missing:
                    await link.call(request, _CONNECT_TIMEOUT_S)
                    told.add(request.namespace)
        except (OSError, KVHoldError) as error:
            self.world.note("%s: no node yet: %s", self.name, error)
            if link is not None:
                link.retire()
            await asyncio.sleep(self.reconnect_s)
            return
        if membership.link is link:
            self.world.note("%s joined node %d", self.name, link.node.number)
            self._joined.set()
        else:
            link.retire()

    async def store(
        self, prompt: Prompt, *, first: int, shard: int, store_options: StoreOptions, leave: float
    ) -> None:
        await self.register(prompt.namespace)
        link = await self.link()
        names = prompt.chunks(first)
        link.hold(writable=True)
        granted: m.Granted | None = None
        try:
            device = await self._reached_by_device(link)
            granted = await self.call(
                link,
                m.Reserve(prompt.namespace.layout.fingerprint, names, shard, store_options),
                m.Granted,
            )
            reservation = granted.reservation
            layout = prompt.namespace.layout
            rows = offsets.unpack(granted.offsets, len(layout.groups), len(names)).tolist()
            ready: dict[int, bytes] = {}
            for chunk, chain_hash in enumerate(split_hashes(names.hashes)):
                sums = b""
                tokens = int(names.num_tokens(layout)[chunk])
                for group, row in enumerate(rows):
                    if row[chunk] != ABSENT:
                        key = make_key(names.namespace, chain_hash, group, shard)
                        value = kv(key, layout.chunk_bytes(group, tokens))
                        layers = layout.groups[group].layers
                        place = self.checker.place(
                            "reservation", link.node.number, reservation, row[chunk]
                        )
                        if device is not None:
                            sums += await device.store(
                                link.node.data, row[chunk], place, value, layers
                            )
                        else:
                            sums += await self._write(link, row[chunk], place, key, value, layers)
                if sums and self.world.random.random() >= leave:
                    ready[chunk] = sums
                if ready and self.world.random.random() < 0.3:
                    await self._commit(link, reservation, ready)
            await self._commit(link, reservation, ready)
        finally:
            await self.give_back(
                link,
                m.Abandon(granted.reservation)
                if granted is not None and granted.reservation
                else None,
                held=True,
            )

    async def _commit(self, link: SimLink, reservation: int, ready: dict[int, bytes]) -> None:
        if ready:
            request = m.Commit(reservation, list(ready), b"".join(ready.values()))
            ready.clear()
            await self.call(link, request, m.Done)

    async def _reached_by_device(self, link: SimLink) -> SimDevice | None:
        if self._device is None:
            return None
        if link not in self._with_device:
            link.uses_device = True
            try:
                await self.call(link, m.UseDevice(), m.Done)
            except KVHoldError:
                return None
            self._with_device.add(link)
        return self._device

    async def _write(
        self,
        link: SimLink,
        offset: int,
        place: MemoryPlace | None,
        key: bytes,
        value: bytes,
        layers: int,
    ) -> bytes:
        size = len(value) // layers
        for layer in range(layers):
            await self._pause()
            self.checker.touches(place, f"{self.name} writes {key.hex()[-16:]}")
            link.node.data[offset + layer * size : offset + (layer + 1) * size] = value[
                layer * size : (layer + 1) * size
            ]
        return pack(
            [
                checksum(memoryview(value)[layer * size : (layer + 1) * size])
                for layer in range(layers)
            ]
        )

    async def load(
        self,
        prompt: Prompt,
        *,
        have_tokens: int,
        work: Any,
        wait_s: float,
        share: bool,
        intent: ComputeIntent | None = None,
    ) -> None:
        await self.register(prompt.namespace)
        link = await self.link()
        lookup = m.Lookup(prompt.query(), work, have_tokens, next(self._uses), intent)
        found = await self.call(link, lookup, m.LookupAnswer)
        ticket = found.ticket or found.announcement
        try:
            until = self.world.now + wait_s
            while found.arriving:
                await link.pause(0.2)
                over = self.world.now >= until
                if self.world.random.random() < 0.2:
                    await self._read_hit(link, prompt, ticket, 0, arriving=True)
                found = await self.call(
                    link, m.Refresh(ticket, over, self.world.random.random() < 0.5), m.LookupAnswer
                )
            for shard in range(prompt.namespace.shards if found.ticket else 0):
                if share:
                    self._mailbox.append(Share(ticket, prompt, found.num_tokens, shard))
                else:
                    await self._read_hit(link, prompt, ticket, shard, num_tokens=found.num_tokens)
            if share and found.ticket:
                await asyncio.sleep(self.world.delay(0.05, slow=0.3, slow_s=4.0))
            if found.announcement:
                await self.give_back(link, m.Release(ticket, keep_announcement=True))
                await self._compute(link, prompt, found)
        finally:
            await self.give_back(link, m.Release(ticket) if ticket else None)

    async def _compute(self, link: SimLink, prompt: Prompt, found: m.LookupAnswer) -> None:
        random = self.world.random
        await asyncio.sleep(self.world.delay(0.1, slow=0.3, slow_s=4.0))
        if random.random() < 0.2:
            return
        if random.random() < 0.2:
            await self.give_back(link, m.Release(found.announcement))
        for shard in range(prompt.namespace.shards):
            await self.store(
                prompt,
                first=found.num_tokens // prompt.namespace.layout.tokens_per_chunk,
                shard=shard,
                store_options=DEFAULT_OPTIONS,
                leave=random.choice((0, 0, 0.2, 1)),
            )

    async def take_share(self) -> None:
        if not self._mailbox:
            return
        shared = self.world.random.choice(self._mailbox)
        if self.world.random.random() < 0.5:
            self._mailbox.remove(shared)
        await asyncio.sleep(self.world.delay(0.01, slow=0.2, slow_s=3.0))
        link = await self.link()
        await self._read_hit(
            link, shared.prompt, shared.ticket, shared.shard, num_tokens=shared.num_tokens
        )

    async def _read_hit(
        self,
        link: SimLink,
        prompt: Prompt,
        ticket: int,
        shard: int,
        *,
        num_tokens: int = 0,
        arriving: bool = False,
    ) -> None:
        layout = prompt.namespace.layout
        first = 0 if self.world.random.random() < 0.7 else self.world.random.randrange(3)
        link.hold()
        leased: m.Leased | None = None
        try:
            device = await self._reached_by_device(link)
            leased = await self.call(link, m.Claim(ticket, shard, first, arriving), m.Leased)
            if num_tokens and sum(leased.num_tokens) < num_tokens - first * layout.tokens_per_chunk:
                self.world.find(
                    f"{self.name}: a hit of {num_tokens} tokens was leased with "
                    f"{leased.num_tokens} from chunk {first} on"
                )
            hashes = list(split_hashes(prompt.chain))
            num_chunks = len(leased.num_tokens)
            rows = offsets.unpack(leased.offsets, len(layout.groups), num_chunks).tolist()
            for group, row in enumerate(rows):
                sums = unpack(leased.checksums[group])
                layers = layout.groups[group].layers
                present = [chunk for chunk, offset in enumerate(row) if offset != ABSENT]
                if len(sums) != layers * len(present):
                    self.world.find(
                        f"{self.name}: {len(sums)} checksums for {len(present)} chunks of "
                        f"{layers} layers"
                    )
                    return
                for at, chunk in enumerate(present):
                    tokens, number = leased.num_tokens[chunk], first + chunk
                    tail = (
                        None
                        if number < len(hashes) and tokens == layout.tokens_per_chunk
                        else prompt.tail_lengths.index(tokens)
                    )
                    chain_hash = (
                        hashes[number] if tail is None else list(split_hashes(prompt.tails))[tail]
                    )
                    key = make_key(prompt.namespace.digest, chain_hash, group, shard)
                    value = kv(key, layout.chunk_bytes(group, tokens))
                    of_chunk = sums[at * layers : (at + 1) * layers]
                    if not await self._read(
                        link, device, leased.lease, row[chunk], key, value, of_chunk
                    ):
                        with suppress(KVHoldError):
                            await self.call(link, m.Damaged(leased.lease, [row[chunk]]), m.Done)
                        return
        finally:
            await self.give_back(
                link, m.Release(leased.lease) if leased is not None else None, held=True
            )

    async def _read(
        self,
        link: SimLink,
        device: SimDevice | None,
        lease: int,
        offset: int,
        key: bytes,
        value: bytes,
        sums: Sequence[int],
    ) -> bool:
        place = self.checker.place("lease", link.node.number, lease, offset)
        if device is not None:
            data = await device.load(link.node.data, offset, place, len(value), sums)
            return self._is_right(link, offset, key, data, value)
        size = len(value) // len(sums)
        for layer, stated in enumerate(sums):
            await self._pause()
            self.checker.touches(place, f"{self.name} reads {key.hex()[-16:]}")
            data = bytes(link.node.data[offset + layer * size : offset + (layer + 1) * size])
            expected = value[layer * size : (layer + 1) * size]
            if not self._is_right(
                link, offset, key, data if checksum(data) == stated else None, expected
            ):
                return False
        return True

    def _is_right(
        self, link: SimLink, offset: int, key: bytes, data: bytes | None, expected: bytes
    ) -> bool:
        if data is None and not self.checker.may_be_damaged(link.node.number, offset):
            self.world.find(
                f"{self.name}: {key.hex()[-16:]} at {offset} is damaged, but no fault damaged it"
            )
        if data is not None and data != expected:
            self.world.find(f"{self.name}: a wrong byte in {key.hex()[-16:]} at {offset}")
        return data == expected

    async def _pause(self) -> None:
        if self.world.random.random() < 0.5:
            await asyncio.sleep(self.world.delay(self.slow, slow=0.005, slow_s=3.0))

    async def clear(self, namespace: bytes | None, tier: str = "") -> None:
        await self.call(await self.link(), m.Clear(namespace, tier=tier), m.Done)
        await self.flush(0)

    async def clear_prompt(self, prompt: Prompt, *, only_end: bool) -> None:
        await self.register(prompt.namespace)
        await self.call(await self.link(), m.ClearPrompt(prompt.query(), only_end), m.Done)

    async def flush(self, mark: int | None) -> None:
        link = await self.link()
        if mark is None:
            mark = (await self.call(link, m.Flushed(0), m.Done)).mark
            assert mark is not None
        for _ in range(20):
            if (await self.call(link, m.Flushed(mark), m.Done)).count:
                return
            await link.pause(0.3)

    async def prefetch(self, prompt: Prompt) -> None:
        await self.register(prompt.namespace)
        await self.call(await self.link(), m.Prefetch(prompt.query()), m.Done)

    async def watch(self, after: int) -> None:
        link = await self.link()
        page = 0
        while (await self.call(link, m.Snapshot(page), m.Happened)).more:
            page += 1
        await self.call(link, m.Events(after), m.Happened)

    async def reencode(self, tier: str, codec: str, stop_s: float) -> None:
        link = await self.link()
        begun = await self.call(link, m.Reencode(tier, codec), m.ReencodeStatus)
        try:
            await asyncio.sleep(stop_s)
        finally:
            await self.give_back(link, m.Release(begun.number))

    async def kick(self) -> None:
        link = await self.link()
        victim = self.world.random.choice(
            (await self.call(link, m.Clients(), m.ClientList)).clients
        )
        self.checker.kicked.add(victim.name)
        self.world.note("%s kicks %s", self.name, victim.name)
        by_pid = self.world.random.random() < 0.3
        await self.call(
            link, m.Kick(pid=victim.pid) if by_pid else m.Kick(victim.number), m.ClientList
        )

    async def hang_up(self) -> None:
        self.leave()
        self._begin()
