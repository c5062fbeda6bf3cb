"""TCP relays on loopback that fail, in one thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Self, TypeVar

_PIECE_BYTES = 256 << 10
Result = TypeVar("Result")


class RelayedLink:
    def __init__(self, network: "RelayedNetwork", target: tuple[str, int]) -> None:
        self._network = network
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._forgotten = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self._server: asyncio.Server | None = None
        self.port = 0

    def cut(self) -> None:
        """Hold all bytes and new connections open."""
        self._network.run(_called(self._whole.clear))

    def mend(self) -> None:
        self._network.run(_called(self._whole.set))

    def forget(self) -> None:
        """Drop present connections silently."""

        def swap() -> None:
            self._forgotten.set()
            self._forgotten = asyncio.Event()

        self._network.run(_called(swap))

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        forgotten = self._forgotten
        try:
            await self._whole.wait()
            with suppress(OSError):
                there, to_there = await asyncio.open_connection(*self._target)
                writers.append(to_there)
                lost = asyncio.create_task(forgotten.wait())
                ways = [
                    asyncio.create_task(self._carry(reader, to_there)),
                    asyncio.create_task(self._carry(there, writer)),
                ]
                try:
                    await asyncio.wait((lost, *ways), return_when=asyncio.FIRST_COMPLETED)
                    if lost.done():
                        for way in ways:
                            way.cancel()
                        await asyncio.Event().wait()
                finally:
                    for part in (lost, *ways):
                        part.cancel()
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            for one in writers:
                one.close()

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._whole.wait()
                target.write(piece)
                await target.drain()


class RelayedNetwork:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)
        self._links: list[RelayedLink] = []

    def link(self, target: tuple[str, int]) -> RelayedLink:
        link = RelayedLink(self, target)
        self.run(link.open())
        self._links.append(link)
        return link

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            self.run(link.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _called(call: Callable[[], None]) -> None:
    call()
