"""Relays a scheduler's lookups to this host's node, in a worker's process.

A conversation's hits are released when it ends, or after `SILENT_S` of silence.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from secrets import token_hex

from kvhold import __version__
from kvhold.core.api import Hit
from kvhold.core.cleanup import on_error
from kvhold.core.config import SpanConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.metrics import Metrics
from kvhold.memory.placement import place_this_thread
from kvhold.net import span as s
from kvhold.net.login import quoted
from kvhold.net.stream import Stream
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.client import NodeClient
from kvhold.node.login_server import LoginServer, ServedProtocol

_PROTOCOL = ServedProtocol(
    s.SPAN_MAGIC, s.SPAN_VERSION, "kvhold relay of an engine", s.DEFAULT_PORT
)
_MOST_HITS = 4096  # of one scheduler
_CLOSE_WITHIN_S = 5.0
_request: Decoder[s.Request] = Decoder(s.Request)


@dataclass(frozen=True)
class _Held:
    hit: Hit
    namespace: bytes
    deadline_s: float


class Relay(LoginServer):
    address_setting = "listen"

    def __init__(
        self, config: SpanConfig, address: str, cache: NodeClient, *, cores: str = "inherit"
    ) -> None:
        """address: HOST:PORT; port 0: any free one
        cache:   the caller closes it after this relay

        Without a token in the settings, a random one is used. Raises ConfigError, NodeError.
        """
        if not config.token and not config.token_file:
            config = replace(config, token=token_hex(32))
        super().__init__(config, "span", address, _PROTOCOL)
        self.metrics = Metrics()
        self._cache = cache
        listener = self._listen()
        with on_error(listener.close):
            self._loop = asyncio.new_event_loop()
        self._caller = ThreadPoolExecutor(
            1,
            thread_name_prefix="kvhold-relay",
            initializer=place_this_thread,
            initargs=(cores,),
        )
        self._listener = listener
        self._accepting = self._loop.create_task(self._accept(listener))
        self._thread = threading.Thread(
            target=self._run, args=(cores,), name="kvhold-relay", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def token(self) -> str:
        return self._token

    @property
    def uses_tls(self) -> bool:
        return self._tls is not None

    def close(self) -> None:
        """Release all hits. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(self._accepting), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_WITHIN_S)
        self._listener.close()
        self._caller.shutdown(wait=True)

    def _run(self, cores: str) -> None:
        place_this_thread(cores)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _welcome(self, version: int) -> s.RelayWelcome:
        return s.RelayWelcome(version, __version__)

    async def _converse_with(self, stream: Stream) -> None:
        hits: dict[int, _Held] = {}
        try:
            while True:
                async with asyncio.timeout(s.SILENT_S):
                    prefix = await stream.read(LENGTH_BYTES)
                    request = _request.decode(await stream.read(body_length(prefix)))
                answer = await self._loop.run_in_executor(self._caller, self._answer, hits, request)
                async with asyncio.timeout(s.SILENT_S):
                    await stream.send([encode(answer)])
        finally:
            self._caller.submit(_close_all, hits)

    def _answer(self, hits: dict[int, _Held], request: s.Request) -> s.Answer:
        """A failing node is an answer, too."""
        match request:
            case s.LookUp():
                return self._look_up(hits, request)
            case s.LookAgain():
                return self._look_again(hits, request)
            case s.LetGo():
                if (held := hits.pop(request.ticket, None)) is not None:
                    held.hit.close()
                return self._alive()
            case s.RepeatClear():
                try:
                    self._cache.repeat_clear(request.namespace, request.at_ns)
                except KVHoldError as error:
                    return s.Alive(quoted(str(error)))
                return s.Alive()
            case s.Beat():
                return self._alive()

    def _alive(self) -> s.Alive:
        return s.Alive("" if self._cache.connected else f"no node on {self._cache.path}")

    def _look_up(self, hits: dict[int, _Held], request: s.LookUp) -> s.LookedUp:
        if len(hits) >= _MOST_HITS:
            return s.LookedUp(lost=f"the scheduler holds {_MOST_HITS} hits already")
        try:
            hit = self._cache.lookup(
                request.query,
                have_tokens=request.have_tokens,
                uses=request.uses,
                wait_s=0,
                deadline_s=request.deadline_s,
            )
        except KVHoldError as error:
            return s.LookedUp(lost=quoted(str(error)))
        held = _Held(hit, request.query.namespace, request.deadline_s)
        if hit.ticket:
            hits[hit.ticket] = held
        return self._looked_up(hits, hit.ticket, held)

    def _look_again(self, hits: dict[int, _Held], request: s.LookAgain) -> s.LookedUp:
        if (held := hits.get(request.ticket)) is None:
            return s.LookedUp(lost="the hit is not known")
        try:
            if request.settle:
                held.hit.settle()
            else:
                held.hit.refresh()
        except KVHoldError as error:
            hits.pop(request.ticket).hit.close()
            return s.LookedUp(lost=quoted(str(error)))
        return self._looked_up(hits, request.ticket, held)

    def _looked_up(self, hits: dict[int, _Held], ticket: int, held: _Held) -> s.LookedUp:
        hit = held.hit
        try:
            cleared_ns = self._cache.cleared_ns(held.namespace, deadline_s=held.deadline_s)
        except KVHoldError as error:
            hits.pop(ticket, None)
            hit.close()
            return s.LookedUp(lost=quoted(str(error)))
        if not hit.ticket:
            hits.pop(ticket, None)
            hit.close()
        return s.LookedUp(
            hit.ticket, hit.num_tokens, hit.arriving, hit.sources, hit.reason or "", cleared_ns
        )


def _close_all(hits: dict[int, _Held]) -> None:
    while hits:
        hits.popitem()[1].hit.close()
