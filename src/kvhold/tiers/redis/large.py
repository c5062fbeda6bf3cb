"""Values in parts, in the format of `split.py`.

A put uploads the parts, writes the head, which makes the value visible, and removes their expiry in
one transaction, if the head is still there: an interrupted put expires. With a time to live, the
parts expire two hours after the head. A delete removes the head that it saw and its parts in one
transaction; a small string without one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvhold.core.errors import TierError
from kvhold.net.stream import Bytes, Stream
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.redis.replacing import replace_string
from kvhold.tiers.redis.resp import (
    ErrorReply,
    RedisCall,
    Reply,
    command,
    fault_of,
    no_answer,
    read_reply,
    set_pieces,
)
from kvhold.tiers.redis.router import Router, fault_in, outage
from kvhold.tiers.redis.split import HEAD_BYTES, Head, cut, looks_like_head
from kvhold.tiers.redis.transaction import Transaction, transact
from kvhold.tiers.redis.values import ReadRange

_UNFINISHED_MS = 3600_000


class LargeValues:
    def __init__(self, router: Router, part_bytes: int) -> None:
        self._router = router
        self._part_bytes = part_bytes

    async def sizes(self, names: Sequence[bytes]) -> list[int | TierError | None]:
        """None: a part is missing, or the string has changed."""
        peeks = [peek(name) for name in names]
        await self._router.run("probe", peeks, bulk=False)
        return [
            await self._size(call.name, call.reply)
            if isinstance(call.reply, bytes)
            else outage(call, "probe")
            for call in peeks
        ]

    async def read(
        self, name: bytes, head: Head | None, start: int | None, parts: Parts
    ) -> int | TierError | None:
        if head is None:
            return None
        wanted = size_of(parts)
        if (start is None and head.nbytes > wanted) or (
            start is not None and start + wanted > head.nbytes
        ):
            return None
        begin, nbytes = (0, head.nbytes) if start is None else (start, wanted)
        reads: list[ReadRange] = []
        part_names, at = head.part_names(name), 0
        for span in head.part_ranges(begin, nbytes):
            reads.append(ReadRange(part_names[span.part], span.start, cut(parts, at, span.nbytes)))
            at += span.nbytes
        try:
            await self._router.run("get", reads, bulk=True)
        except TierError as error:
            return error
        for call in reads:
            if (fault := fault_in(call, "get")) is not None:
                return fault
        if any(call.reply is None for call in reads):
            with suppress(TierError):
                await self.mend(name, head)
            return None
        return nbytes

    async def put(self, name: bytes, value: Parts, ttl_ms: int | None) -> bool | TierError:
        """True if stored, false if the name has a string, or the fault."""
        head = Head.new(size_of(value), self._part_bytes)
        try:
            return await self._put(name, head, value, ttl_ms)
        except TierError as error:
            with suppress(TierError):
                await self.mend(name, head)
            return error

    async def replace(self, name: bytes, value: Parts) -> bool | TierError:
        head = Head.new(size_of(value), self._part_bytes)
        names = head.part_names(name)
        try:
            await self._upload(names, head, value)
            done = await replace_string(self._router, name, [memoryview(head.pack())], parts=names)
            if done is False:
                with suppress(TierError):
                    await self.remove_parts([(name, head)])
        except TierError as error:
            return error
        return done

    async def mend(self, name: bytes, head: Head) -> None:
        await self._transact("delete", lambda: _Remove(name, head))
        await self.remove_parts([(name, head)])

    async def delete(self, name: bytes) -> bool:
        return await self._transact("delete", lambda: _Remove(name)) not in (0, None)

    async def remove_parts(self, heads: Sequence[tuple[bytes, Head]]) -> None:
        calls = [
            RedisCall(part, "UNLINK", part)
            for name, head in heads
            for part in head.part_names(name)
        ]
        await self._router.run("delete", calls, bulk=False)
        for call in calls:
            if (fault := fault_in(call, "delete")) is not None:
                raise fault

    async def _transact(self, operation: str, make: Callable[[], Transaction]) -> Reply:
        reply = await transact(self._router, operation, make, bulk=False)
        if isinstance(reply, TierError):
            raise reply
        return reply

    async def _put(self, name: bytes, head: Head, value: Parts, ttl_ms: int | None) -> bool:
        names = head.part_names(name)
        await self._upload(names, head, value)
        lasting = 2 * _UNFINISHED_MS + (ttl_ms or 0)
        await self._all([RedisCall(part, "PEXPIRE", part, lasting) for part in names], 1)
        written = RedisCall(
            name,
            request=set_pieces(
                name, [memoryview(head.pack())], "PX", ttl_ms or _UNFINISHED_MS, "NX"
            ),
        )
        await self._router.run("put", [written], bulk=False)
        if written.reply is None and written.fault is None:
            with suppress(TierError):
                await self.remove_parts([(name, head)])
            return False
        if written.fault is not None or written.reply != b"OK":
            raise written.fault or fault_of(written.reply, "put")
        if ttl_ms is None:
            await self._transact("put", lambda: _Persist(name, head))
        return True

    async def _upload(self, names: Sequence[bytes], head: Head, value: Parts) -> None:
        uploads = []
        for i, part in enumerate(names):
            pieces = cut(value, i * head.part_bytes, head.part_bytes)
            request = set_pieces(part, pieces, "PX", _UNFINISHED_MS)
            uploads.append(RedisCall(part, request=request, value_bytes=size_of(pieces)))
        await self._all(uploads, b"OK", bulk=True)

    async def _all(
        self, calls: Sequence[RedisCall], expected: object, *, bulk: bool = False
    ) -> None:
        await self._router.run("put", calls, bulk=bulk)
        for call in calls:
            if call.fault is not None or call.reply != expected:
                raise call.fault or fault_of(call.reply, "put")

    async def _size(self, name: bytes, data: bytes) -> int | TierError | None:
        if (head := Head.parse(data)) is None:
            return len(data) if len(data) == HEAD_BYTES and not looks_like_head(data) else None
        calls = [RedisCall(part, "STRLEN", part) for part in head.part_names(name)]
        try:
            await self._router.run("probe", calls, bulk=False)
        except TierError as error:
            return error
        for call in calls:
            if (fault := outage(call, "probe")) is not None:
                return fault
        whole = [span.nbytes for span in head.part_ranges(0, head.nbytes)] == [
            call.reply for call in calls
        ]
        return head.nbytes if whole else None


def peek(name: bytes) -> RedisCall:
    """One byte more than HEAD_BYTES: a longer string is not a head."""
    return RedisCall(name, "GETRANGE", name, 0, HEAD_BYTES)


class RemoveString(RedisCall):
    """The reply is the number of removed strings.

    seen: the string's first bytes, one more than a head has
    """

    def __init__(self, name: bytes) -> None:
        self.seen = b""
        words: list[tuple[bytes | str | int, ...]] = [
            ("MULTI",),
            ("GETRANGE", name, 0, HEAD_BYTES),
            ("UNLINK", name),
            ("EXEC",),
        ]
        super().__init__(name, request=[command(*each) for each in words])

    async def take(self, stream: Stream) -> None:
        replies = [await read_reply(stream) for _ in self.request]
        refused = next((reply for reply in replies if isinstance(reply, ErrorReply)), None)
        match replies[-1]:
            case [seen, int(removed)]:
                self.seen = seen if isinstance(seen, bytes) else b""
                self.reply = removed
            case other:
                self.reply = refused or no_answer(other)


class _Remove(Transaction):
    def __init__(self, name: bytes, only: Head | None = None) -> None:
        super().__init__(name)
        self._only = only

    def commands(self, seen: bytes, looked: Sequence[Reply]) -> list[Sequence[Bytes]]:
        if not seen or (self._only is not None and seen != self._only.pack()):
            return []
        head = Head.parse(seen)
        names = [self.name, *(head.part_names(self.name) if head is not None else [])]
        return [[command("UNLINK", name)] for name in names]


class _Persist(Transaction):
    def __init__(self, name: bytes, head: Head) -> None:
        super().__init__(name)
        self._head = head

    def commands(self, seen: bytes, looked: Sequence[Reply]) -> list[Sequence[Bytes]]:
        if seen != self._head.pack():
            return []
        return [
            [command("PERSIST", name)] for name in (self.name, *self._head.part_names(self.name))
        ]
