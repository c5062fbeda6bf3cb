"""A client of the simulation: speaks the node's protocol, and keeps what `NodeClient` promises.

A late answer is a miss, and what it granted is given back. What is read or written in the arena is so slowly that anything may happen in
between. A connection that broke is closed when nobody touches its memory any longer. Several tasks use one connection, as threads do.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kvhold.codecs.frame import checksum
from kvhold.core.api import ABSENT
from kvhold.core.checksums import pack, unpack
from kvhold.core.keys import Namespace, Prompt, make_key, split_hashes
from kvhold.core.terms import FREE, Terms
from kvhold.lab.simulation.checker import kv
from kvhold.lab.simulation.node import SimNode
from kvhold.lab.simulation.wire import End, connect
from kvhold.lab.simulation.world import World
from kvhold.net import messages as m
from kvhold.net.wire import Decoder, Splitter, encode, split_number
from kvhold.node.conversation import _return_of

_greeting: Decoder[Any] = Decoder(m.Welcome | m.Refused)
_answers: Decoder[m.Answer] = Decoder(m.Answer)
Kind = TypeVar("Kind", bound=m.Message)


class Miss(Exception):
    """A call that came to nothing: late, refused, or the connection is lost."""


@dataclass
class _Call:
    done: "asyncio.Future[m.Answer]"
    late: bool = False


class Connection:
    """One joining of one node."""

    def __init__(self, client: "Client", node: SimNode) -> None:
        self.client = client
        self.node = node
        self.world = client.world
        self.end, far = connect(self.world)
        self.broken = False
        self.held = 0
        self.ready: asyncio.Future[None] = client.loop.create_future()
        self.news = asyncio.Event()
        self.registered: set[bytes] = set()
        self._splitter = Splitter()
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self._greeted = False
        self._broke_the_rules = False
        self.end.on_data = lambda data: self._soon(self._received, data)
        self.end.on_eof = lambda: self._soon(self.broke, "the node closed the connection")
        self.end.send(encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, client.name, client.number)))
        self.world.later(self.world.delay(), node.accept, far, lambda: not client.alive)

    def _soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self.client.loop.call_soon(callback, *args)

    async def call(self, request: m.Message, expected: type[Kind], *, deadline_s: float = 1.0) -> Kind:
        """The answer. Raises Miss where it does not come in time, or is another."""
        if self.broken:
            raise Miss("broken")
        call = _Call(self.client.loop.create_future())
        self._send(request, call)
        await asyncio.wait((call.done,), timeout=deadline_s)
        if not call.done.done():
            call.late = True
            self.world.note("%s: late: %s", self.client.name, type(request).__name__)
            raise Miss("late")
        answer = call.done.result()
        if not isinstance(answer, expected):
            if not isinstance(answer, (m.Refused, m.Gone)):
                self.world.find(f"{self.client.name}: {type(request).__name__} was answered with {answer}")
            raise Miss(type(answer).__name__)
        return answer

    def tell(self, request: m.Message) -> None:
        """Have it done, and wait for no answer."""
        if not self.broken:
            self._send(request, _Call(self.client.loop.create_future(), late=True))

    def hold(self) -> None:
        """One more reader or writer of the arena."""
        self.held += 1

    def break_the_rules(self) -> None:
        """Send what is no message."""
        self._broke_the_rules = True
        self.world.note("%s breaks the rules", self.client.name)
        self.end.send(b"\xff" * 16)

    def let_go(self) -> None:
        """One less."""
        self.held -= 1
        self._close_if_unused()

    def broke(self, why: str) -> None:
        """Nothing more comes."""
        if self.broken:
            return
        self.world.note("%s: connection broke: %s", self.client.name, why)
        self.broken = True
        if not self.ready.done():
            self.ready.set_exception(Miss(why))
            self.ready.exception()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_result(m.Refused(why, fatal=True))
        self._calls.clear()
        self.news.set()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.broken and not self.held:
            self.end.close()

    def _send(self, request: m.Message, call: _Call) -> None:
        self._last += 1
        self._calls[self._last] = call
        self.end.send(encode(request, self._last))

    def _received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            if self.broken:
                return
            if not self._greeted:
                self._greeted = True
                greeting = _greeting.decode(body)
                if isinstance(greeting, m.Refused):
                    self.broke(greeting.reason)
                elif not self.ready.done():
                    self.ready.set_result(None)
                continue
            number, record = split_number(body)
            self._deliver(number, _answers.decode(record))

    def _deliver(self, number: int, answer: m.Answer) -> None:
        if isinstance(answer, m.News):
            self.news.set()
        elif number == 0 and isinstance(answer, m.Refused):
            if not self._broke_the_rules:
                self.world.find(f"{self.client.name} was hung up on: {answer.reason}")
            self.broke(answer.reason)
        elif (call := self._calls.pop(number, None)) is None:
            self.world.find(f"{self.client.name}: an answer to nothing: {answer}")
        elif call.late:
            if (unwanted := _return_of(answer)) is not None:
                self.tell(unwanted)
        else:
            call.done.set_result(answer)


@dataclass(frozen=True)
class Share:
    """A ticket that one process gives to another."""

    ticket: int
    prompt: Prompt
    num_tokens: int
    shard: int


class Client:
    """One engine's process."""

    def __init__(self, world: World, number: int, checker: Any, find_node: Callable[[], SimNode | None], mailbox: list[Share]) -> None:
        self.world = world
        self.number = number
        self.name = f"client-{number}"
        self.loop = world.new_loop(self.name)
        self.checker = checker
        self.alive = True
        self._find_node = find_node
        self._mailbox = mailbox
        self._connection: Connection | None = None
        self.connections: list[Connection] = []
        self.slow = world.random.choice((0.0002, 0.002, 0.02, 0.2))

    def kill(self, forked_s: float) -> None:
        """The process ends at once. forked_s: a child that it forked keeps its sockets for so long."""
        self.alive = False
        self.world.kill(self.loop)
        ends = [connection.end for connection in self.connections]
        for end in ends:
            if forked_s:
                end.fork()
                self.world.later(forked_s, end.close)
            end.close()

    async def connection(self) -> Connection:
        """The connection in use, or a new one. Raises Miss."""
        if self._connection is None or self._connection.broken:
            node = self._find_node()
            if node is None:
                raise Miss("no node")
            self._connection = Connection(self, node)
            self.connections.append(self._connection)
        link = self._connection
        await asyncio.wait((link.ready,), timeout=5.0)
        if not link.ready.done() or link.broken:
            link.broke("no greeting")
            raise Miss("no greeting")
        return link

    async def register(self, link: Connection, space: Namespace) -> None:
        """Make its layout known to a node."""
        if space.digest not in link.registered:
            await link.call(m.Register(space.layout, space.digest, FREE), m.Done, deadline_s=5.0)
            link.registered.add(space.digest)

    # What it does.

    async def store(self, prompt: Prompt, *, first: int, shard: int, terms: Terms, leave: float) -> None:
        """Reserve, write, commit. leave: the chance that a chunk is not committed."""
        link = await self.connection()
        await self.register(link, prompt.namespace)
        names = prompt.chunks(first)
        link.hold()
        room = 0
        try:
            granted = await link.call(m.Reserve(prompt.namespace.layout.fingerprint, names, shard, terms), m.Granted)
            room = granted.room
            ready: dict[int, bytes] = {}
            for chunk, chain_hash in enumerate(split_hashes(names.hashes)):
                sums = b""
                tokens = int(names.num_tokens(prompt.namespace.layout)[chunk])
                for group, row in enumerate(granted.offsets):
                    if row[chunk] != ABSENT:
                        key = make_key(names.namespace, chain_hash, group, shard)
                        sums += await self._write(link, room, row[chunk], key, prompt.namespace, group, tokens)
                if sums and self.world.random.random() >= leave:
                    ready[chunk] = sums
                if ready and self.world.random.random() < 0.3:
                    await self._commit(link, room, ready)
            await self._commit(link, room, ready)
        finally:
            if room:
                link.tell(m.Abandon(room))
            link.let_go()

    async def _commit(self, link: Connection, room: int, ready: dict[int, bytes]) -> None:
        if ready:
            request = m.Commit(room, list(ready), b"".join(ready.values()))
            ready.clear()
            await link.call(request, m.Done)

    async def _write(self, link: Connection, room: int, offset: int, key: bytes, space: Namespace, group: int, tokens: int) -> bytes:
        """One chunk, layer by layer. Returns its checksums."""
        value = kv(key, space.layout.chunk_bytes(group, tokens))
        layers = space.layout.groups[group].layers
        size = len(value) // layers
        place = self.checker.place("room", link.node.number, room, offset)
        for layer in range(layers):
            await self._pause()
            self.checker.touches(place, f"{self.name} writes {key.hex()[-16:]}")
            link.node.data[offset + layer * size : offset + (layer + 1) * size] = value[layer * size : (layer + 1) * size]
        return pack([checksum(memoryview(value)[layer * size : (layer + 1) * size]) for layer in range(layers)])

    async def load(self, prompt: Prompt, *, have_tokens: int, work: Any, wait_s: float, share: bool) -> None:
        """Look up, wait, claim, read, let go."""
        link = await self.connection()
        await self.register(link, prompt.namespace)
        found = await link.call(m.Lookup(prompt.query(), work, have_tokens), m.Found)
        ticket = found.ticket
        try:
            until = self.world.now + wait_s
            while found.arriving:
                link.news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(link.news.wait(), 0.2)
                over = self.world.now >= until
                if self.world.random.random() < 0.2:
                    await self._read_hit(link, prompt, ticket, 0, arriving=True)
                found = await link.call(m.Refresh(ticket, over, self.world.random.random() < 0.5), m.Found)
            if not found.ticket:
                return
            for shard in range(prompt.namespace.shards):
                if share:
                    self._mailbox.append(Share(ticket, prompt, found.num_tokens, shard))
                else:
                    await self._read_hit(link, prompt, ticket, shard, num_tokens=found.num_tokens)
            if share:
                await asyncio.sleep(self.world.delay(0.05, slow=0.3, slow_s=4.0))
        finally:
            if ticket:
                link.tell(m.Release(ticket))

    async def take_share(self) -> None:
        """Read a hit that another process looked up."""
        if not self._mailbox:
            return
        shared = self.world.random.choice(self._mailbox)
        if self.world.random.random() < 0.5:
            self._mailbox.remove(shared)
        await asyncio.sleep(self.world.delay(0.01, slow=0.2, slow_s=3.0))
        link = await self.connection()
        await self._read_hit(link, shared.prompt, shared.ticket, shared.shard, num_tokens=shared.num_tokens)

    async def _read_hit(
        self, link: Connection, prompt: Prompt, ticket: int, shard: int, *, num_tokens: int = 0, arriving: bool = False
    ) -> None:
        layout = prompt.namespace.layout
        first = 0 if self.world.random.random() < 0.7 else self.world.random.randrange(3)
        link.hold()
        lent: m.Lent | None = None
        try:
            lent = await link.call(m.Claim(ticket, shard, first, arriving), m.Lent)
            if num_tokens and sum(lent.num_tokens) < num_tokens - first * layout.tokens_per_chunk:
                self.world.find(f"{self.name}: a hit of {num_tokens} tokens came to {lent.num_tokens} from chunk {first} on")
            hashes = list(split_hashes(prompt.chain))
            for group, row in enumerate(lent.offsets):
                sums = unpack(lent.checksums[group])
                layers = layout.groups[group].layers
                present = [chunk for chunk, offset in enumerate(row) if offset != ABSENT]
                if len(sums) != layers * len(present):
                    self.world.find(f"{self.name}: {len(sums)} checksums for {len(present)} chunks of {layers} layers")
                    return
                for at, chunk in enumerate(present):
                    tokens, number = lent.num_tokens[chunk], first + chunk
                    tail = None if number < len(hashes) and tokens == layout.tokens_per_chunk else prompt.tail_lengths.index(tokens)
                    chain_hash = hashes[number] if tail is None else list(split_hashes(prompt.tails))[tail]
                    key = make_key(prompt.namespace.digest, chain_hash, group, shard)
                    value = kv(key, layout.chunk_bytes(group, tokens))
                    if not await self._read(link, lent.loan, row[chunk], key, value, sums[at * layers : (at + 1) * layers]):
                        link.tell(m.Damaged(lent.loan, [row[chunk]]))
                        return
        finally:
            if lent is not None:
                link.tell(m.Release(lent.loan))
            link.let_go()

    async def _read(self, link: Connection, loan: int, offset: int, key: bytes, value: bytes, sums: Sequence[int]) -> bool:
        """One chunk, layer by layer, each compared. False where a checksum says that it is damaged."""
        place = self.checker.place("loan", link.node.number, loan, offset)
        size = len(value) // len(sums)
        for layer, stated in enumerate(sums):
            await self._pause()
            self.checker.touches(place, f"{self.name} reads {key.hex()[-16:]}")
            data = bytes(link.node.data[offset + layer * size : offset + (layer + 1) * size])
            if checksum(data) != stated:
                if (link.node.number, offset) not in self.checker.flipped:
                    self.world.find(f"{self.name}: {key.hex()[-16:]} at {offset} is damaged, and nobody damaged it on purpose")
                return False
            if data != value[layer * size : (layer + 1) * size]:
                self.world.find(f"{self.name}: a wrong byte in {key.hex()[-16:]}, layer {layer}, at {offset}")
                return False
        return True

    async def _pause(self) -> None:
        if self.world.random.random() < 0.5:
            await asyncio.sleep(self.world.delay(self.slow, slow=0.005, slow_s=3.0))

    async def clear(self, namespace: bytes | None) -> None:
        """Forget a namespace or all, and wait until tiers have, too."""
        link = await self.connection()
        await link.call(m.Clear(namespace), m.Done)
        await self.flush(0)

    async def flush(self, mark: int | None) -> None:
        """Wait, some seconds, until what was stored is below."""
        link = await self.connection()
        if mark is None:
            mark = (await link.call(m.Flushed(0), m.Done)).mark
        for _ in range(20):
            if (await link.call(m.Flushed(mark), m.Done)).count:
                return
            await asyncio.sleep(0.3)

    async def prefetch(self, prompt: Prompt) -> None:
        """Have tiers' chunks brought to memory."""
        link = await self.connection()
        await self.register(link, prompt.namespace)
        await link.call(m.Prefetch(prompt.query()), m.Done)

    async def watch(self, after: int) -> None:
        """A snapshot, page by page, and events."""
        link = await self.connection()
        page = 0
        while (await link.call(m.Snapshot(page), m.Happened)).more:
            page += 1
        await link.call(m.Events(after), m.Happened)

    async def recode(self, tier: str, codec: str, stop_s: float) -> None:
        """Have a tier re-encoded, for a while."""
        link = await self.connection()
        begun = await link.call(m.Recode(tier, codec), m.Recoding)
        await asyncio.sleep(stop_s)
        link.tell(m.Release(begun.number))

    async def hang_up(self) -> None:
        """Close the connection on purpose, when nobody touches its memory."""
        if self._connection is not None:
            self._connection.broke("closed on purpose")


def ends_of(clients: Sequence[Client]) -> list[End]:
    """All sockets of these."""
    return [connection.end for client in clients for connection in client.connections]
