"""Lookups on an engine's hosts. `OwnHost` asks the scheduler's node, `OtherHost` a relay.

A host that is away, or silent for a call's deadline, is lost.
"""

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvhold.core.api import Hit, Uses
from kvhold.core.config import SpanConfig
from kvhold.core.errors import ConfigError, KVHoldError, NodeError, ProtocolError
from kvhold.core.keys import Query
from kvhold.memory.placement import place_this_thread
from kvhold.net import login
from kvhold.net import span as s
from kvhold.net.addresses import is_loopback
from kvhold.net.login import quoted
from kvhold.net.stream import Address, Stream, open_stream
from kvhold.net.tls import client_context
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.client import NodeClient

log = logging.getLogger(__name__)

_CONNECT_WITHIN_S = 5.0
_PAUSE_S = 1.0
_CLOSE_WITHIN_S = 5.0
_greeting: Decoder[s.Greeting] = Decoder(s.Greeting)
_answer: Decoder[s.Answer] = Decoder(s.Answer)


class Host(Protocol):
    """shards: of its workers, in order"""

    name: str
    shards: tuple[int, ...]

    def look_up(
        self, query: Query, *, have_tokens: int, uses: Uses, deadline_s: float
    ) -> Callable[[], s.LookedUp]:
        """Call the result to wait for the answer."""

    def look_again(
        self, ticket: int, *, settle: bool, deadline_s: float
    ) -> Callable[[], s.LookedUp]: ...

    def let_go(self, ticket: int) -> None: ...

    def repeat_clear(self, namespace: bytes, at_ns: int, *, deadline_s: float) -> bool:
        """True: it has cleared the namespace since."""


class OwnHost:
    """Waits raise the node's errors. One thread."""

    def __init__(self, cache: NodeClient, shards: Sequence[int]) -> None:
        self.name = "this host"
        self.shards = tuple(shards)
        self._cache = cache
        self._hits: dict[int, tuple[Hit, bytes]] = {}

    def look_up(
        self, query: Query, *, have_tokens: int, uses: Uses, deadline_s: float
    ) -> Callable[[], s.LookedUp]:
        def wait() -> s.LookedUp:
            hit = self._cache.lookup(
                query, have_tokens=have_tokens, uses=uses, wait_s=0, deadline_s=deadline_s
            )
            if hit.ticket:
                self._hits[hit.ticket] = hit, query.namespace
            return self._looked_up(hit.ticket, hit, query.namespace, deadline_s)

        return wait

    def look_again(
        self, ticket: int, *, settle: bool, deadline_s: float
    ) -> Callable[[], s.LookedUp]:
        def wait() -> s.LookedUp:
            hit, namespace = self._hits[ticket]
            if settle:
                hit.settle()
            else:
                hit.refresh()
            return self._looked_up(ticket, hit, namespace, deadline_s)

        return wait

    def let_go(self, ticket: int) -> None:
        if (held := self._hits.pop(ticket, None)) is not None:
            held[0].close()

    def repeat_clear(self, namespace: bytes, at_ns: int, *, deadline_s: float) -> bool:
        self._cache.repeat_clear(namespace, at_ns, deadline_s=deadline_s)
        return True

    def _looked_up(self, ticket: int, hit: Hit, namespace: bytes, deadline_s: float) -> s.LookedUp:
        """Ask for the last clear after the pins, so a later clear shows."""
        try:
            cleared_ns = self._cache.cleared_ns(namespace, deadline_s=deadline_s)
        except KVHoldError:
            self.let_go(ticket)
            hit.close()
            raise
        if not hit.ticket:
            self.let_go(ticket)
        return s.LookedUp(
            hit.ticket, hit.num_tokens, hit.arriving, hit.sources, hit.reason or "", cleared_ns
        )


@dataclass(frozen=True)
class RelayPlace:
    name: str
    address: str
    token: str = field(repr=False)
    uses_tls: bool
    shards: tuple[int, ...]


@dataclass
class _Call:
    request: s.Request
    deadline_s: float
    answer: "Future[s.Answer]" = field(default_factory=Future)


class OtherHost:
    def __init__(self, place: RelayPlace, tls: ssl.SSLContext | None) -> None:
        self.name, self.shards = place.name, place.shards
        self.lost: str | None = "not connected yet"
        self._place = place
        host, _, port = place.address.rpartition(":")
        self._address = Address(host.strip("[]"), int(port))
        self._tls = tls if place.uses_tls else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._unanswered: _Call | None = None
        self._sent_s = 0.0
        self._is_loss_logged = True
        self.tried = threading.Event()
        """Set after the first attempt to connect."""

    def look_up(
        self, query: Query, *, have_tokens: int, uses: Uses, deadline_s: float
    ) -> Callable[[], s.LookedUp]:
        request = s.LookUp(query, have_tokens, uses, min(60.0, deadline_s))
        return self._ask_relay(request, deadline_s)

    def look_again(
        self, ticket: int, *, settle: bool, deadline_s: float
    ) -> Callable[[], s.LookedUp]:
        return self._ask_relay(s.LookAgain(ticket, settle), deadline_s)

    def let_go(self, ticket: int) -> None:
        self._submit(_Call(s.LetGo(ticket), s.SILENT_S))

    def repeat_clear(self, namespace: bytes, at_ns: int, *, deadline_s: float) -> bool:
        call = _Call(s.RepeatClear(namespace, at_ns), deadline_s)
        if self._why_lost() is not None or not self._submit(call):
            return False
        answer = _result_of(call)
        return isinstance(answer, s.Alive) and not answer.lost

    def _ask_relay(self, request: s.Request, deadline_s: float) -> Callable[[], s.LookedUp]:
        call = _Call(request, deadline_s)
        why = self._why_lost()
        if why is None and not self._submit(call):
            why = self.lost or "the connection to its relay is lost"

        def wait() -> s.LookedUp:
            if why is not None:
                return s.LookedUp(lost=why)
            answer = _result_of(call)
            if answer is None:
                return s.LookedUp(lost=self.lost or f"no answer within {deadline_s:g} s")
            if not isinstance(answer, s.LookedUp):
                return s.LookedUp(lost="its relay misunderstands lookups")
            return answer

        return wait

    def _why_lost(self) -> str | None:
        call, sent_s = self._unanswered, self._sent_s
        silent_s = time.monotonic() - sent_s
        if call is not None and silent_s > call.deadline_s:
            return f"no answer for {silent_s:.1f} s"
        return self.lost

    def _submit(self, call: _Call) -> bool:
        if self.lost is not None or self._loop is None:
            return False
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._enqueue, call)
            return True
        return False

    def _enqueue(self, call: _Call) -> None:
        if self.lost is None:
            self._calls.put_nowait(call)
        else:
            call.answer.cancel()

    async def keep(self) -> None:
        self._loop = asyncio.get_running_loop()
        while True:
            why = "its relay has closed the connection"
            try:
                async with asyncio.timeout(_CONNECT_WITHIN_S):
                    stream = await self._connect()
                try:
                    self._note_connection()
                    await self._converse(stream)
                finally:
                    stream.close()
            except TimeoutError:
                why = f"its relay at {self._address} does not answer"
            except (OSError, EOFError) as error:
                why = str(error) or why
            except KVHoldError as error:
                why = str(error)
            finally:
                self._lose(why)
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self) -> Stream:
        stream = await open_stream(self._address, self._tls)
        try:
            hello = login.LoginHello(s.SPAN_MAGIC, s.SPAN_VERSION, self._place.token)
            await stream.send([encode(hello)])
            prefix = await stream.read(LENGTH_BYTES)
            greeting = _greeting.decode(
                await stream.read(body_length(prefix, login.MAX_HELLO_BYTES))
            )
            if isinstance(greeting, login.LoginRefused):
                raise NodeError(f"its relay refuses this engine: {quoted(greeting.reason)}")
            if greeting.version != s.SPAN_VERSION:
                raise NodeError("its relay has another version of kvhold")
        except BaseException:
            stream.close()
            raise
        return stream

    async def _converse(self, stream: Stream) -> None:
        while True:
            try:
                async with asyncio.timeout(s.BEAT_S):
                    call = await self._calls.get()
            except TimeoutError:
                call = _Call(s.Beat(), s.BEAT_S)
            self._sent_s, self._unanswered = time.monotonic(), call
            async with asyncio.timeout(2 * call.deadline_s + s.SILENT_S):
                await stream.send([encode(call.request)])
                prefix = await stream.read(LENGTH_BYTES)
                answer = _answer.decode(await stream.read(body_length(prefix)))
            self._unanswered = None
            try:
                call.answer.set_result(answer)
            except InvalidStateError:
                if isinstance(answer, s.LookedUp) and answer.ticket:
                    self._calls.put_nowait(_Call(s.LetGo(answer.ticket), s.SILENT_S))

    def _note_connection(self) -> None:
        self.lost = None
        self.tried.set()
        log.info("kvhold: the node of %s is asked by its relay at %s", self.name, self._address)
        self._is_loss_logged = False

    def _lose(self, why: str) -> None:
        self.lost = why
        self._calls, waiting = asyncio.Queue(), self._calls
        unanswered, self._unanswered = self._unanswered, None
        calls = [] if unanswered is None else [unanswered]
        while not waiting.empty():
            calls.append(waiting.get_nowait())
        for call in calls:
            call.answer.cancel()
        if not self._is_loss_logged:
            self._is_loss_logged = True
            log.warning(
                "kvhold: %s of this engine cannot be asked (%s); prompts are computed until it can",
                self.name,
                why,
            )
        self.tried.set()


class OtherHosts:
    def __init__(
        self, places: Sequence[RelayPlace], config: SpanConfig, *, cores: str = "inherit"
    ) -> None:
        """Raises ConfigError for unusable TLS settings."""
        tls = None
        if any(place.uses_tls for place in places):
            try:
                tls = client_context(config.ca_file, config.cert_file, config.key_file)
            except ConfigError as error:
                raise ConfigError(f"span.{error}") from None
        for place in places:
            host = place.address.rpartition(":")[0].strip("[]")
            if not place.uses_tls and not config.insecure and not is_loopback(host):
                raise ConfigError(
                    f"span: the relay at {place.address} speaks no TLS, so the token would cross "
                    "the network in clear text; set span.tls_cert on the workers' hosts, or "
                    "span.insecure=true if nobody else can read that traffic"
                )
        self.hosts = [OtherHost(place, tls) for place in places]
        self._loop = asyncio.new_event_loop()
        self._tasks = [self._loop.create_task(host.keep()) for host in self.hosts]
        self._thread = threading.Thread(
            target=self._run, args=(cores,), name="kvhold-span", daemon=True
        )
        self._thread.start()

    def wait_until_tried(self, within_s: float) -> list[str]:
        """Why hosts cannot be asked; empty: all can."""
        until_s = time.monotonic() + within_s
        for host in self.hosts:
            host.tried.wait(max(0.0, until_s - time.monotonic()))
        return [f"{host.name}: {host.lost}" for host in self.hosts if host.lost is not None]

    def close(self) -> None:
        """The relays then release their hits. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_WITHIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_WITHIN_S)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _run(self, cores: str) -> None:
        place_this_thread(cores)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


def _result_of(call: _Call) -> s.Answer | None:
    """None: no answer within the deadline; a later one is released."""
    try:
        return call.answer.result(timeout=call.deadline_s)
    except FutureTimeout:
        if call.answer.cancel():
            return None
        return call.answer.result()
    except BaseException as error:
        if call.answer.cancelled():
            return None
        raise ProtocolError(str(error)) from error
