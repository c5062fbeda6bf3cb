"""Change a string only if it is unchanged since it was read: WATCH, then MULTI ... EXEC.

Two round trips, alone on its connection.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from kvhold.core.errors import TierError
from kvhold.net.stream import Bytes, Stream
from kvhold.tiers.redis.resp import ErrorReply, RedisCall, Reply, command, no_answer, read_reply
from kvhold.tiers.redis.router import Router, fault_in
from kvhold.tiers.redis.split import HEAD_BYTES

_ROUNDS = 3


class Transaction(RedisCall):
    """The reply is that of the first command, None if there is nothing to change, or an error.

    is_changed: another client has changed the string; nothing was done
    """

    def __init__(self, name: bytes, *looks: bytes, value_bytes: int = 0) -> None:
        """looks: further commands that read, such as PTTL."""
        request = (command("WATCH", name), command("GETRANGE", name, 0, HEAD_BYTES), *looks)
        super().__init__(name, request=request, value_bytes=value_bytes)
        self.is_changed = False

    @abstractmethod
    def commands(self, seen: bytes, looked: Sequence[Reply]) -> list[Sequence[Bytes]]:
        """The changes to make, if any.

        seen:   the first bytes of the string, one more than a head has
        looked: the replies of the further commands
        """

    async def take(self, stream: Stream) -> None:
        await self._take(stream, asking=())

    def asking_request(self) -> Sequence[Bytes]:
        return [piece for look in self.request for piece in (command("ASKING"), look)]

    async def take_asked(self, stream: Stream) -> None:
        await self._take(stream, asking=(command("ASKING"),))

    async def _take(self, stream: Stream, asking: Sequence[bytes]) -> None:
        self.is_changed = False
        looked: list[Reply] = []
        for _ in self.request:
            for _ in asking:
                await read_reply(stream)
            looked.append(await read_reply(stream))
        watched, seen, *others = looked
        self.reply, commands = _first_error(looked), list[Sequence[Bytes]]()
        if self.reply is None and watched == b"OK" and isinstance(seen, bytes):
            commands = self.commands(seen, others)
        elif self.reply is None:
            self.reply = no_answer(looked)
        if not commands:
            await stream.send([command("UNWATCH")])
            await read_reply(stream)
            return
        begin = [*asking, command("MULTI")]
        await stream.send(
            [*begin, *(piece for pieces in commands for piece in pieces), command("EXEC")]
        )
        queued = [await read_reply(stream) for _ in range(len(begin) + len(commands))]
        done = await read_reply(stream)
        refused = _first_error(queued)
        if refused is not None and refused.code == "ASK":
            refused = ErrorReply(f"TRYAGAIN the slot is moving: {refused.text}")
        if refused is None and isinstance(done, list) and len(done) == len(commands):
            self.reply = _first_error(done) or done[0]
        elif refused is None and done is None:
            self.is_changed = True
        else:
            self.reply = refused or no_answer(done)


async def transact(
    router: Router, operation: str, make: Callable[[], Transaction], *, bulk: bool
) -> Reply | TierError:
    for _ in range(_ROUNDS):
        call = make()
        await router.run(operation, [call], bulk=bulk)
        if (fault := fault_in(call, operation)) is not None:
            return fault
        if not call.is_changed:
            return call.reply
    return TierError("redis", operation, "the stored value changes again and again")


def _first_error(replies: Sequence[Reply]) -> ErrorReply | None:
    return next((reply for reply in replies if isinstance(reply, ErrorReply)), None)
