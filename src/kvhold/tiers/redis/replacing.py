"""Replaces a string in one transaction. The new parts live one hour longer than the value. The old
ones expire after a minute, for readers of the old head.
"""

from collections.abc import Sequence

from kvhold.core.errors import TierError
from kvhold.net.stream import Bytes
from kvhold.tiers.base import Parts, size_of
from kvhold.tiers.redis.resp import Reply, command, fault_of, set_pieces
from kvhold.tiers.redis.router import Router
from kvhold.tiers.redis.split import Head
from kvhold.tiers.redis.transaction import Transaction, transact

_LATE_READERS_MS = 60_000
_SPARE_MS = 3600_000


async def replace_string(
    router: Router, name: bytes, value: Parts, *, parts: Sequence[bytes] = ()
) -> bool | TierError:
    """True: there was a string.

    parts: names of the value's written parts, if `value` is a head
    """
    reply = await transact(router, "replace", lambda: _Replace(name, value, parts), bulk=True)
    if isinstance(reply, TierError):
        return reply
    if reply is None:
        return False
    return True if reply == b"OK" else fault_of(reply, "replace")


class _Replace(Transaction):
    def __init__(self, name: bytes, value: Parts, parts: Sequence[bytes]) -> None:
        super().__init__(name, command("PTTL", name), value_bytes=size_of(value))
        self._value = value
        self._parts = parts

    def commands(self, seen: bytes, looked: Sequence[Reply]) -> list[Sequence[Bytes]]:
        if not seen:
            return []
        left_ms = looked[0] if isinstance(looked[0], int) else -1
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
        # this may run twice after a lost connection: keep the new parts
        commands += [
            [command("PEXPIRE", part, _LATE_READERS_MS)]
            for part in leaving
            if part not in self._parts
        ]
        return commands
