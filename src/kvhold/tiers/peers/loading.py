"""A prompt that a peer loads from here. One event loop."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvhold.core.cleanup import on_error
from kvhold.core.errors import ProtocolError, TierError
from kvhold.net import peers as p
from kvhold.net.login import quoted
from kvhold.net.stream import Stream
from kvhold.net.wire import Decoder, encode
from kvhold.tiers.exchanges import read_body
from kvhold.tiers.peers.peer import Peer

_CONNECT_S = 5.0
_ANSWER_S = 10.0  # a peer answers within a second
_MOST_FAULT = 300
_FAULTS = (OSError, EOFError, ProtocolError, TierError)
_holds: Decoder[p.PeerHolds] = Decoder(p.PeerHolds)


class PeerHeld(NamedTuple):
    """See `PeerHolds`."""

    are_here: list[bool]
    num_tokens: int | None
    fault: str


class PeerLoading:
    def __init__(self, peer: Peer, stream: Stream) -> None:
        self._peer = peer
        self._stream = stream

    @classmethod
    async def begin(cls, peer: Peer, request: p.PeerLoad) -> "PeerLoading":
        """Raises TierError."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                stream = await peer.open()
                with on_error(stream.close):
                    await stream.send([encode(request)])
        except _FAULTS as error:
            raise peer.fault_of("load", error) from None
        return cls(peer, stream)

    async def holds(self, keys: Sequence[bytes]) -> PeerHeld:
        """Wait until it holds all of them, or its load is over. Raises TierError."""
        try:
            while True:
                async with asyncio.timeout(_ANSWER_S):
                    await self._stream.send([encode(p.PeerHas(b"".join(keys)))])
                    held = _holds.decode(await read_body(self._stream))
                if len(held.are_here) != len(keys):
                    raise ProtocolError(f"{len(held.are_here)} answers for {len(keys)} keys")
                if held.num_tokens is not None or (keys and all(held.are_here)):
                    are_here = [bool(one) for one in held.are_here]
                    return PeerHeld(are_here, held.num_tokens, quoted(held.fault, _MOST_FAULT))
        except _FAULTS as error:
            raise self._peer.fault_of("load", error) from None

    def close(self) -> None:
        self._stream.close()
