"""The InfiniStore tier's logic: values in a store of RDMA blocks.

The store overwrites blocks, and evicts single ones. So a put has equal blocks under new names, and
a *head*: a small block under the key's name, written last.

A slot of memory belongs to its operation until the end. One event loop, a thread for blocking
calls, and a client thread that reports completions.
"""

import asyncio
import logging
import mmap
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from kvhold.core.cleanup import on_error
from kvhold.core.errors import TierCannotList, TierError, TierFull, TierUnavailable
from kvhold.tiers.base import Parts, TierTraits, check_lengths, in_thread, size_of
from kvhold.tiers.files.opener import Opener

Result = TypeVar("Result")

HEAD_BYTES = 64
_HEAD = struct.Struct("<8sQI16s")  # magic, value bytes, block bytes, put id
_MAGIC = b"kvholdI1"
_COPY_IN_THREAD = 256 << 10  # below it, a thread costs more than the copy
_LAST_MOVES_S = 5.0  # how long to wait for the moves of cancelled calls
_NAMES_AT_ONCE = 1000
_MOVES_AT_ONCE = 64  # the client aborts beyond its 128 request buffers

log = logging.getLogger(__name__)

_DONE, _MISSING, _NO_ROOM = 200, 404, 507


class Connection(Protocol):
    """A negative result is a failure. A callback gets an HTTP status code."""

    def register_mr(self, pointer: int, size: int, /) -> int: ...
    def w_rdma_async(
        self,
        names: list[str],
        offsets: list[int],
        block: int,
        base: int,
        done: Callable[[int], None],
        /,
    ) -> int: ...
    def r_rdma_async(
        self,
        names: list[str],
        offsets: list[int],
        block: int,
        base: int,
        done: Callable[[int], None],
        /,
    ) -> int: ...
    def check_exist(self, name: str, /) -> int: ...
    def delete_keys(self, names: list[str], /) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class BlockLayout:
    root: str
    block_bytes: int
    slot_bytes: int
    slots: int


@dataclass(frozen=True)
class _Head:
    nbytes: int
    block_bytes: int
    put_id: bytes

    def pack(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.nbytes, self.block_bytes, self.put_id)

    @classmethod
    def unpack(cls, data: bytes) -> "_Head | None":
        magic, nbytes, block_bytes, put_id = _HEAD.unpack_from(data)
        return cls(nbytes, block_bytes, put_id) if magic == _MAGIC and block_bytes else None

    @property
    def num_blocks(self) -> int:
        return -(-self.nbytes // self.block_bytes)


@dataclass(frozen=True)
class _Session:
    connection: Connection
    memory: mmap.mmap
    free: "asyncio.Queue[int]"
    thread: ThreadPoolExecutor


class _Refused(Exception):
    def __init__(self, code: int, session: _Session) -> None:
        super().__init__(code)
        self.code = code
        self.session = session


class BlockTier:
    """A tier over RDMA blocks. `connect` runs in the tier's thread. It raises TierError."""

    traits: ClassVar[TierTraits] = TierTraits(name="infinistore", shared=True, lists=False)

    def __init__(self, layout: BlockLayout, connect: Callable[[], Connection], place: str) -> None:
        assert layout.slot_bytes % layout.block_bytes == 0 and layout.slot_bytes >= HEAD_BYTES
        self._layout = layout
        self._connect = connect
        self._place = place
        self._moves = asyncio.Semaphore(_MOVES_AT_ONCE)
        self._closing = False
        self._hanging_up: set[asyncio.Task[None]] = set()
        closed = TierUnavailable(self.traits.name, "open", f"{place} was closed")
        self._opener = Opener(self._open, self._begin_hang_up, closed=closed)

    async def check(self) -> None:
        name = f"{self._layout.root}check"
        await self._blocking("check", lambda connection: connection.check_exist(name))

    async def probe(self, keys: Sequence[bytes]) -> list[int | None]:
        heads = await _all([self._whole("probe", partial(self._head, key)) for key in keys])
        return [head.nbytes if head else None for head in heads]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        return await _all(
            [
                self._item(
                    "get", partial(self._get, key, parts, None if starts is None else starts[i])
                )
                for i, (key, parts) in enumerate(zip(keys, into, strict=True))
            ]
        )

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        first = dict(reversed(items))
        faults = await _all(
            [self._item("put", partial(self._put, key, parts)) for key, parts in first.items()]
        )
        answers = dict(zip(first, faults, strict=True))
        return [answers[key] for key, _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove heads first, so that no reader finds a partial value."""
        unique = list(dict.fromkeys(keys))
        heads = await _all([self._whole("delete", partial(self._head, key)) for key in unique])
        removed = set()
        for key, head in zip(unique, heads, strict=True):
            if head and await self._drop([self._name_of(key)]):
                removed.add(key)
                await self._drop_blocks(key, head)
        return [key in removed and key not in keys[:i] for i, key in enumerate(keys)]

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        raise TierCannotList(
            self.traits.name,
            "scan",
            "InfiniStore does not list its keys; clear it by its own tools",
        )
        yield b""  # type: ignore[unreachable]  # makes this a generator

    async def close(self) -> None:
        self._closing = True
        await self._opener.close()
        await self._wait_for_hang_ups()

    async def _get(self, key: bytes, parts: Parts, start: int | None) -> int | None:
        head, room = await self._head(key), size_of(parts)
        if head is None or (head.nbytes > room if start is None else start + room > head.nbytes):
            return None
        first, wanted = (0, head.nbytes) if start is None else (start, room)
        block = head.block_bytes
        if block > self._layout.slot_bytes:
            return None
        target, at = _Cursor(parts), first // block * block
        while at < first + wanted:
            count = min(self._layout.slot_bytes // block, -(-(first + wanted - at) // block))
            batch = self._blocks(key, head, at // block, count)
            inside = slice(max(first - at, 0), min(first + wanted - at, count * block))
            await self._move(batch, block, after=partial(target.fill, inside=inside))
            at += count * block
        return wanted

    async def _put(self, key: bytes, parts: Parts) -> None:
        if await self._head(key) is not None:
            return
        head = _Head(size_of(parts), self._layout.block_bytes, secrets.token_bytes(16))
        source, at_once = _Cursor(parts), self._layout.slot_bytes // head.block_bytes
        try:
            for at in range(0, head.num_blocks, at_once):
                batch = self._blocks(key, head, at, min(at_once, head.num_blocks - at))
                await self._move(batch, head.block_bytes, before=source.drain)
            if await self._head(key) is None:
                await self._move(
                    [self._name_of(key)],
                    HEAD_BYTES,
                    before=_Cursor([memoryview(head.pack())]).drain,
                )
        except _Refused:
            await self._drop_blocks(key, head)
            raise
        there = await self._head(key)
        if there is not None and there.put_id != head.put_id:
            await self._drop_blocks(key, head)

    async def _head(self, key: bytes) -> _Head | None:
        found: list[_Head | None] = []
        try:
            await self._move(
                [self._name_of(key)],
                HEAD_BYTES,
                after=lambda slot: found.append(_Head.unpack(bytes(slot[:HEAD_BYTES]))),
            )
        except _Refused as refused:
            if refused.code == _MISSING:
                return None
            raise
        return found[0]

    async def _move(
        self,
        names: list[str],
        block: int,
        *,
        before: Callable[[memoryview], None] | None = None,
        after: Callable[[memoryview], None] | None = None,
    ) -> None:
        async with self._opener.use() as session, self._moves:
            connection, memory, free = session.connection, session.memory, session.free
            at = await free.get()
            slot = memoryview(memory)[at : at + self._layout.slot_bytes]
            loop = asyncio.get_running_loop()
            done: asyncio.Future[int] = loop.create_future()

            def ended(code: int) -> None:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(done.set_result, code)

            with on_error(lambda: free.put_nowait(at)):
                if before is not None:
                    await _copy(
                        session, partial(before, slot[: len(names) * block]), len(names) * block
                    )
                move = connection.w_rdma_async if before is not None else connection.r_rdma_async
                offsets = [at + i * block for i in range(len(names))]
                if move(names, offsets, block, _address(memory), ended) < 0:
                    done.set_result(-1)
            try:
                code = await asyncio.shield(done)
            except asyncio.CancelledError:
                done.add_done_callback(partial(_give_back, free, at, memory))
                late = loop.call_later(_LAST_MOVES_S, self._give_up, session)
                done.add_done_callback(lambda _: late.cancel())
                raise
            try:
                if code != _DONE:
                    raise _Refused(code, session)
                if after is not None:
                    await _copy(session, partial(after, slot), len(names) * block)
            finally:
                free.put_nowait(at)

    async def _drop_blocks(self, key: bytes, head: _Head) -> None:
        for at in range(0, head.num_blocks, _NAMES_AT_ONCE):
            if not await self._drop(
                self._blocks(key, head, at, min(_NAMES_AT_ONCE, head.num_blocks - at))
            ):
                return

    async def _drop(self, names: list[str]) -> int:
        return await self._blocking("delete", lambda connection: connection.delete_keys(names))

    async def _blocking(self, operation: str, work: Callable[[Connection], int]) -> int:
        async with self._opener.use() as session:
            answer = await in_thread(session.thread, lambda: work(session.connection))
            if answer < 0:
                raise self._lost(operation, session)
            return answer

    async def _open(self) -> _Session:
        await self._wait_for_hang_ups()
        nbytes = self._layout.slots * self._layout.slot_bytes
        thread = ThreadPoolExecutor(1, thread_name_prefix="kvhold-infinistore")
        memory, free = mmap.mmap(-1, nbytes), asyncio.Queue[int]()
        for i in range(self._layout.slots):
            free.put_nowait(i * self._layout.slot_bytes)
        with on_error(partial(thread.shutdown, wait=False)):
            connection = await in_thread(thread, partial(self._set_up, memory, nbytes))
        return _Session(connection, memory, free, thread)

    def _set_up(self, memory: mmap.mmap, nbytes: int) -> Connection:
        connection = self._connect()
        with on_error(connection.close):
            if connection.register_mr(_address(memory), nbytes) < 0:
                raise TierUnavailable(
                    self.traits.name,
                    "open",
                    f"{self._place}: the device does not register {nbytes} bytes (see ulimit -l)",
                )
        return connection

    def _begin_hang_up(self, session: _Session) -> None:
        task = asyncio.create_task(self._hang_up(session, wait=self._closing))
        self._hanging_up.add(task)
        task.add_done_callback(self._hanging_up.discard)

    async def _hang_up(self, session: _Session, *, wait: bool) -> None:
        if wait:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MOVES_S):
                    for _ in range(self._layout.slots):
                        await session.free.get()
        await in_thread(session.thread, session.connection.close)
        session.thread.shutdown(wait=False)

    async def _wait_for_hang_ups(self) -> None:
        while self._hanging_up:
            await asyncio.wait(self._hanging_up)

    async def _item(
        self, operation: str, call: Callable[[], Awaitable[Result]]
    ) -> Result | TierError | None:
        try:
            return await call()
        except _Refused as refused:
            return None if refused.code == _MISSING else self._fault(refused, operation)

    async def _whole(self, operation: str, call: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await call()
        except _Refused as refused:
            raise self._fault(refused, operation) from None

    def _fault(self, refused: _Refused, operation: str) -> TierError:
        name, code = self.traits.name, refused.code
        if code == _NO_ROOM:
            return TierFull(name, operation, f"{self._place} has no room for it")
        if code < 0:
            return self._lost(operation, refused.session)
        return TierError(name, operation, f"{self._place} answered {code}")

    def _lost(self, operation: str, session: _Session) -> TierError:
        self._opener.lose(session)
        return TierUnavailable(self.traits.name, operation, f"no answer from {self._place}")

    def _give_up(self, session: _Session) -> None:
        if self._opener.lose(session):
            log.warning(
                "infinistore: %s did not complete a request; a new connection is made", self._place
            )

    def _name_of(self, key: bytes) -> str:
        return self._layout.root + key.hex()

    def _blocks(self, key: bytes, head: _Head, first: int, count: int) -> list[str]:
        return [
            f"{self._name_of(key)}.{head.put_id.hex()}.{i}" for i in range(first, first + count)
        ]


class _Cursor:
    def __init__(self, parts: Parts) -> None:
        self._left: Iterator[memoryview] = (part.cast("B") for part in parts if part.nbytes)
        self._part = memoryview(b"")

    def fill(self, data: memoryview, inside: slice) -> None:
        self._over(
            data[inside],
            lambda part, piece: np.copyto(
                np.frombuffer(part, np.uint8), np.frombuffer(piece, np.uint8)
            ),
        )

    def drain(self, data: memoryview) -> None:
        self._over(
            data,
            lambda part, piece: np.copyto(
                np.frombuffer(piece, np.uint8), np.frombuffer(part, np.uint8)
            ),
        )

    def _over(self, data: memoryview, copy: Callable[[memoryview, memoryview], None]) -> None:
        while data.nbytes:
            if not self._part.nbytes:
                self._part = next(self._left, memoryview(b""))
                if not self._part.nbytes:
                    return
            step = min(self._part.nbytes, data.nbytes)
            copy(self._part[:step], data[:step])
            self._part, data = self._part[step:], data[step:]


async def _copy(session: _Session, copy: Callable[[], None], nbytes: int) -> None:
    if nbytes < _COPY_IN_THREAD:
        copy()
    else:
        await in_thread(session.thread, copy)


def _give_back(
    free: "asyncio.Queue[int]", at: int, memory: mmap.mmap, done: "asyncio.Future[int]"
) -> None:
    """`memory` keeps the mapping alive until here."""
    free.put_nowait(at)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


async def _all(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Raise the first error after all have ended, even if cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]
