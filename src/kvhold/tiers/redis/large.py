"""Values that are stored in parts, in the format of `split.py`.

A put without a time to live has three steps:
1. Upload the parts, which expire after hours.
2. Write the head, which makes the value visible and expires after one hour.
3. Remove the expiry of the parts, and of the head last.

So remains of an interrupted put expire, and a head never outlives its parts, unless the server
evicts one. Such a value is a miss, and its reader removes the head. With a time to live, the parts
expire two hours after the head.

A delete lets the parts expire after a minute before it removes the head. So remains of an
interrupted delete expire too.
"""

from collections.abc import Sequence
from contextlib import suppress

from kvhold.core.errors import TierError
from kvhold.net.stream import Stream
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.redis.replacing import replace_string
from kvhold.tiers.redis.resp import ErrorReply, RedisCall, command, fault_of, read_reply, set_pieces
from kvhold.tiers.redis.router import Router, fault_in, outage
from kvhold.tiers.redis.split import HEAD_BYTES, Head, cut, looks_like_head
from kvhold.tiers.redis.values import ReadRange

_UNFINISHED_MS = 3600_000
_LEAVING_MS = 60_000


class LargeValues:
    def __init__(self, router: Router, part_bytes: int) -> None:
        self._router = router
        self._part_bytes = part_bytes

    async def sizes(self, names: Sequence[bytes]) -> list[int | TierError | None]:
        """None if a part is missing or the string has changed; a fault if a server failed."""
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
        for span in head.spans(begin, nbytes):
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
        """Return true if stored, false if the name has a string, or the fault."""
        head = Head.new(size_of(value), self._part_bytes)
        try:
            return await self._put(name, head, value, ttl_ms)
        except TierError as error:
            with suppress(TierError):  # else they expire
                await self.remove_parts([(name, head)])
            return error

    async def replace(self, name: bytes, value: Parts) -> bool | TierError:
        """Return whether there was a value, or the fault."""
        head = Head.new(size_of(value), self._part_bytes)
        names = head.part_names(name)
        try:
            await self._upload(names, head, value)
            done = await replace_string(self._router, name, [memoryview(head.pack())], parts=names)
            if done is False:
                await self.remove_parts([(name, head)])
        except TierError as error:  # keep the parts: they may be in use
            return error
        return done

    async def mend(self, name: bytes, head: Head) -> None:
        """Remove a head that lacks parts, and its parts. A later value stays."""
        await self._let_parts_expire([(name, head)])
        await self._router.run("delete", [_RemoveHead(name, head)], bulk=False)
        await self.remove_parts([(name, head)])

    async def begin_delete(self, names: Sequence[bytes]) -> None:
        """Let the parts of values expire soon, before their heads are removed."""
        peeks = [peek(name) for name in names]
        await self._router.run("delete", peeks, bulk=False)
        _raise_fault(peeks, "delete")
        found = [
            (call.name, Head.parse(call.reply)) for call in peeks if isinstance(call.reply, bytes)
        ]
        await self._let_parts_expire([(name, head) for name, head in found if head is not None])

    async def remove_parts(self, heads: Sequence[tuple[bytes, Head]]) -> None:
        """Remove the parts of values whose heads, given with their names, are removed."""
        await self._router.run(
            "delete",
            [
                RedisCall(part, "UNLINK", part)
                for name, head in heads
                for part in head.part_names(name)
            ],
            bulk=False,
        )

    async def _let_parts_expire(self, heads: Sequence[tuple[bytes, Head]]) -> None:
        calls = [
            RedisCall(part, "PEXPIRE", part, _LEAVING_MS)
            for name, head in heads
            for part in head.part_names(name)
        ]
        await self._router.run("delete", calls, bulk=False)
        _raise_fault(calls, "delete")

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
            await self.remove_parts([(name, head)])
            return False
        if written.fault is not None or written.reply != b"OK":
            raise written.fault or fault_of(written.reply, "put")
        if ttl_ms is None:
            with suppress(TierError):
                await self._all([RedisCall(part, "PERSIST", part) for part in names], 1)
                await self._all([RedisCall(name, "PERSIST", name)], 1)
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
        whole = [span.nbytes for span in head.spans(0, head.nbytes)] == [
            call.reply for call in calls
        ]
        return head.nbytes if whole else None


def peek(name: bytes) -> RedisCall:
    """Reads one byte more than HEAD_BYTES: a longer string is no head."""
    return RedisCall(name, "GETRANGE", name, 0, HEAD_BYTES)


def _raise_fault(calls: Sequence[RedisCall], operation: str) -> None:
    for call in calls:
        if (fault := fault_in(call, operation)) is not None:
            raise fault


class _RemoveHead(RedisCall):
    """Remove a head if it is unchanged, alone on its connection."""

    def __init__(self, name: bytes, head: Head) -> None:
        self._head = head.pack()
        super().__init__(
            name, request=(command("WATCH", name) + command("GETRANGE", name, 0, HEAD_BYTES),)
        )

    async def take(self, stream: Stream) -> None:
        watched, seen = await read_reply(stream), await read_reply(stream)
        again = (
            [("MULTI",), ("UNLINK", self.name), ("EXEC",)]
            if watched == b"OK" and seen == self._head
            else [("UNWATCH",)]
        )
        await stream.send([command(*words) for words in again])
        for _ in again:
            self.reply = await read_reply(stream)
        if isinstance(watched, ErrorReply):
            self.reply = watched
