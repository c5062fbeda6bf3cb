"""`Link`'s methods, with tasks and a simulated socket.

Bytes are read only while a caller waits.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kvhold.core.errors import DeadlineExceeded, NodeError, NodeRefused, ProtocolError
from kvhold.net import messages as m
from kvhold.net.wire import Decoder, Splitter, encode
from kvhold.node.conversation import Conversation, again
from kvhold.node.membership import Lifetime
from kvhold_lab.simulation.node import SimNode
from kvhold_lab.simulation.wire import connect
from kvhold_lab.simulation.world import SimLoop, World

_greeting: Decoder[m.Welcome | m.Refused] = Decoder(m.Welcome | m.Refused)
_BUFFERS = (150, 1000, 1 << 20, 1 << 20)


class Process(Protocol):
    world: World
    loop: SimLoop
    name: str
    number: int

    def has_ended(self) -> bool: ...

    def when_ended(self, callback: Callable[[], object]) -> None: ...

    def was_kicked(self) -> bool: ...


async def join(process: Process, node: SimNode | None, *, within_s: float) -> "SimLink":
    if node is None:
        raise NodeError("there is no node")
    try:
        process.world.descriptors.take()
    except OSError as error:
        raise NodeError(f"cannot join a node: {error}") from None
    link = SimLink(process, node)
    try:
        await link.greet(within_s)
    except BaseException:
        link.retire()
        raise
    return link


class SimLink:
    def __init__(self, process: Process, node: SimNode) -> None:
        self.process = process
        self.node = node
        self.world = process.world
        self.conversation = Conversation(self.world.now)
        self.breaks_the_rules = False
        self._is_half_sent = False
        self.welcome = m.Welcome(0, "", 0, 0, False)
        self.uses_device = False
        self._lifetime = Lifetime()
        self._mapped: set[bool] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self.end, far = connect(self.world)
        self.end.most_bytes = self.world.random.choice(_BUFFERS)
        self.end.on_change = self._changed
        self.end.on_closed = self.world.descriptors.put_back
        far.process = process
        self.world.later(self.world.delay(), node.listening.arrive, far)

    async def greet(self, within_s: float) -> None:
        until, splitter = self.world.now + within_s, Splitter(m.MAX_HELLO_BYTES)
        self.end.send(
            encode(m.Hello(m.MAGIC, m.PROTOCOL_VERSION, self.process.name, self.process.number))
        )
        while True:
            with suppress(BlockingIOError):
                data = self.end.pull()
                if not data:
                    raise NodeError("the connection was closed")
                for body in splitter.feed(data):
                    greeting = _greeting.decode(body)
                    if isinstance(greeting, m.Refused):
                        raise NodeRefused(greeting.reason)
                    self.welcome = greeting
                    return
                continue
            if self.world.now >= until:
                raise NodeError("no greeting in time")
            await self._until_woken(until)

    @property
    def retired(self) -> bool:
        return self._lifetime.retired

    @property
    def closed(self) -> bool:
        return self.end.closed

    @property
    def silent_s(self) -> float:
        return self.conversation.silent_s(self.world.now)

    @property
    def last_heard_s(self) -> float:
        return self.conversation.last_heard_s

    @property
    def has_loose_ends(self) -> bool:
        return self.conversation.has_loose_ends

    @property
    def is_broken(self) -> bool:
        return self.conversation.error is not None

    async def call(self, request: m.Message, deadline_s: float, *, keep: bool = False) -> m.Answer:
        asked_s = self.world.now
        until = asked_s + deadline_s
        call = self.conversation.prepare(request, keep=keep)
        self._lifetime.enter()
        try:
            self.conversation.begin(call, asked_s)
            with suppress(TimeoutError):
                await self._send(until)
                await self._wait(lambda: call.answer is not None, until)
            if call.answer is None:
                self.conversation.give_up(call)
                self.world.note("%s: late: %s", self.process.name, type(request).__name__)
                raise DeadlineExceeded(type(request).__name__.lower(), deadline_s)
            return call.answer
        except BaseException:
            self.conversation.give_up(call)
            raise
        finally:
            self._leave()

    async def pause(self, seconds: float) -> None:
        try:
            self._lifetime.enter()
        except ConnectionError:
            return
        try:
            await self._wait(self.conversation.take_news, self.world.now + seconds)
        except (OSError, ProtocolError):
            return
        finally:
            self._leave()

    async def tend(self, seconds: float) -> None:
        until, talk = self.world.now + seconds, self.conversation
        self._lifetime.enter()
        try:
            with suppress(TimeoutError):
                while talk.has_loose_ends and self.world.now < until:
                    await self._send(until)
                    await self._wait(lambda: talk.is_unsent or not talk.is_owed, until)
        finally:
            self._leave()

    def hold(self, *, writable: bool = False) -> None:
        if writable not in self._mapped and self.world.descriptors.are_short:
            raise NodeError("the node's arena could not be mapped")
        self._lifetime.hold()
        self._mapped.add(writable)

    def let_go(self) -> None:
        self._lifetime.let_go()
        self._close_if_unused()

    def retire(self) -> None:
        self._lifetime.retired = True
        self._wake()
        self._close_if_unused()

    def send_garbage(self) -> None:
        self.breaks_the_rules = True
        if self._is_half_sent:  # the garbage may become a commit's checksums
            self.node.checker.garbled.add(self.node.number)
        self.end.send(b"\xff" * 16)

    def _leave(self) -> None:
        self._lifetime.leave()
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._lifetime.is_over and not self.end.closed:
            self.end.close()

    async def _send(self, until: float) -> None:
        while (data := self.conversation.to_send()) is not None:
            self._check()
            try:
                num_sent = self.end.push(data)
                self.conversation.sent(num_sent)
                self._is_half_sent = num_sent < len(data)
            except BlockingIOError:
                if self.world.now >= until:
                    raise TimeoutError from None
                await self._until_woken(until)
            except OSError as error:
                self.conversation.fail(error)
                raise

    async def _wait(self, is_done: Callable[[], bool], until: float) -> bool:
        while True:
            self._check()
            if is_done():
                return True
            if self.world.now >= until:
                return False
            if not self._read():
                await self._until_woken(until)

    def _read(self) -> bool:
        try:
            data = self.end.pull()
            if not data:
                raise ConnectionError("the node closed the connection")
            for number, answer in self.conversation.read(data, self.world.now):
                self.conversation.deliver(number, answer)
        except BlockingIOError:
            return False
        except OSError as error:
            self.conversation.fail(error)
        self._judge()
        self._wake()
        return True

    def _judge(self) -> None:
        error = self.conversation.error
        if error is None or self.breaks_the_rules:
            return
        was_kicked = "kvhold kick" in str(error) and self.process.was_kicked()
        if isinstance(error, ProtocolError) or ("refused" in str(error) and not was_kicked):
            self.world.find(f"{self.process.name}: the conversation ended: {error}")

    def _changed(self) -> None:
        if self._waiting:
            self.process.loop.call_soon(self._wake)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _until_woken(self, until: float) -> None:
        loop = self.process.loop
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        timer = loop.call_at(until, _end, waiter)
        try:
            await waiter
        finally:
            timer.cancel()

    def _check(self) -> None:
        if self.conversation.error is not None:
            raise again(self.conversation.error)
        if self.retired:
            raise ConnectionError("the connection is closed")


def _end(waiter: "asyncio.Future[Any]") -> None:
    if not waiter.done():
        waiter.set_result(None)
