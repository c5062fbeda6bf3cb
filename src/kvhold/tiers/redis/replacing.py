"""Replace an existing string by another, in one transaction.

    done = await replace_string(router, name, [head], parts=part_names)    # the parts are written

The new parts live one hour longer than the value. The old ones expire after a minute, for readers
of the old head.
"""

from collections.abc import Sequence

from kvhold.core.errors import TierError
from kvhold.net.stream import Bytes, Stream
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.redis.resp import (
    ErrorReply,
    RedisCall,
    Reply,
    command,
    fault_of,
    read_reply,
    set_pieces,
)
from kvhold.tiers.redis.router import Router, fault_in
from kvhold.tiers.redis.split import HEAD_BYTES, Head

_ROUNDS = 3
_LATE_READERS_MS = 60_000
_SPARE_MS = 3600_000
_CHANGED = 0


async def replace_string(
    router: Router, name: bytes, value: Parts, *, parts: Sequence[bytes] = ()
) -> bool | TierError:
    """Replace the string at `name`. Returns whether there was one, or the fault.

    parts: names of the value's parts, if `value` is a head
    """
    for _ in range(_ROUNDS):
        call = _Replace(name, value, parts)
        await router.run("replace", [call], bulk=True)
        if (fault := fault_in(call, "replace")) is not None:
            return fault
        if call.reply is None:
            return False
        if call.reply == b"OK":
            return True
        if call.reply != _CHANGED:
            return fault_of(call.reply, "replace")
    return TierError("redis", "replace", "what is there changes again and again")


class _Replace(RedisCall):
    """WATCH and read, then MULTI ... EXEC, alone on its connection.

    The reply is OK, None if there was no string, _CHANGED, or an error.
    """

    def __init__(self, name: bytes, value: Parts, parts: Sequence[bytes]) -> None:
        look = (
            command("WATCH", name)
            + command("GETRANGE", name, 0, HEAD_BYTES)
            + command("PTTL", name)
        )
        super().__init__(name, request=(look,), value_bytes=size_of(value))
        self._value = value
        self._parts = parts

    async def take(self, stream: Stream) -> None:
        watched, seen, left_ms = [await read_reply(stream) for _ in range(3)]
        refused = next(
            (reply for reply in (watched, seen, left_ms) if isinstance(reply, ErrorReply)), None
        )
        if refused is not None or not seen or not isinstance(seen, bytes):
            await stream.send([command("UNWATCH")])
            await read_reply(stream)
            self.reply = refused
            return
        commands = self._commands(seen, left_ms if isinstance(left_ms, int) else -1)
        await stream.send(
            [command("MULTI"), *(piece for pieces in commands for piece in pieces), command("EXEC")]
        )
        queued = [await read_reply(stream) for _ in range(1 + len(commands))]
        self.reply = _outcome(queued, await read_reply(stream))

    def _commands(self, seen: bytes, left_ms: int) -> list[Sequence[Bytes]]:
        commands: list[Sequence[Bytes]] = [set_pieces(self.name, self._value, "XX", "KEEPTTL")]
        commands += [
            [
                command("PERSIST", part)
                if left_ms < 0
                else command("PEXPIRE", part, left_ms + _SPARE_MS)
            ]
            for part in self._parts
        ]
        old = Head.parse(seen)
        leaving = old.part_names(self.name) if old is not None else []
        # after a lost connection it may run twice: keep the new parts
        commands += [
            [command("PEXPIRE", part, _LATE_READERS_MS)]
            for part in leaving
            if part not in self._parts
        ]
        return commands


def _outcome(queued: Sequence[Reply], done: Reply) -> Reply:
    refused = next((reply for reply in queued if isinstance(reply, ErrorReply)), None)
    if refused is not None or isinstance(done, ErrorReply):
        return refused or done
    if done is None:
        return _CHANGED
    return done[0] if isinstance(done, list) and done else _CHANGED
