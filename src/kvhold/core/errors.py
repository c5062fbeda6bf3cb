"""What can go wrong, and whose fault it is.

KVHoldError
 ├─ ConfigError          the user's settings; names the key, the value and the nearest valid one
 ├─ LayoutError          an engine's tensors do not match what was registered; refused, never guessed
 ├─ CapacityError        the host cannot give the memory asked for; names what it can give
 ├─ TierError            a place failed: .tier, .operation, .retryable
 │   ├─ TierUnavailable  dead, unreachable, breaker open
 │   ├─ TierFull
 │   └─ TierDenied       wrong credentials or rights
 ├─ FrameError           bytes that are not a frame of ours: .reason in {magic, version, length, checksum, identity}
 ├─ DamagedChunks        chunks in memory are not as they were committed; the reader computes them
 ├─ ProtocolError        a peer speaks wrongly; its connection is closed
 ├─ NodeError            this host's node cannot be reached, started or agreed with; says which socket
 │   ├─ NodeLost         it was there and is gone; it may be back in a moment
 │   └─ NodeRefused      it is there and does not serve this client, which says why
 └─ DeadlineExceeded     .deadline_s; the caller goes on without us

A miss is not an error: it is `None`, or a shorter hit.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises for outside data: a wrong form, text that is not UTF-8, and what is nested too deeply."""

FrameReason = Literal["magic", "version", "length", "checksum", "identity", "sealed"]


class KVHoldError(Exception):
    """The root of all that kvhold raises on purpose."""


class ConfigError(KVHoldError):
    """A setting is unknown or out of range. The message names the key and what would be accepted."""


class LayoutError(KVHoldError):
    """Tensors and layout disagree."""


class CapacityError(KVHoldError):
    """The memory that was asked for is not to be had on this host."""


class TierError(KVHoldError):
    """A tier could not do what it was asked. `reason` is how it is counted."""

    retryable = True
    reason = "error"

    def __init__(self, tier: str, operation: str, detail: str) -> None:
        super().__init__(f"{tier}: {operation}: {detail}")
        self.tier = tier
        self.operation = operation


class TierUnavailable(TierError):
    """Dead, unreachable, or its breaker is open."""

    reason = "unavailable"


class TierFull(TierError):
    """No room, and nothing that may be evicted; or more than it takes at all."""

    retryable = False
    reason = "full"


class TierDenied(TierError):
    """Wrong credentials or rights."""

    retryable = False
    reason = "denied"


class FrameError(KVHoldError):
    """Bytes that claim to be a frame and are not. `reason` says which check they failed."""

    def __init__(self, reason: FrameReason, detail: str) -> None:
        super().__init__(f"not a valid frame ({reason}): {detail}")
        self.reason: FrameReason = reason


class DamagedChunks(KVHoldError):
    """Chunks in memory are not the bytes that were committed. They were reported, and are a miss from now on.

    chunks: the number of each, among those that were read
    """

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(f"the bytes of {len(chunks)} chunks in memory are not those that were stored; they are removed")
        self.chunks = tuple(chunks)


class ProtocolError(KVHoldError):
    """A peer sent what the protocol does not allow."""


class NodeError(KVHoldError):
    """The node of this host is missing, busy, foreign or of another version."""


class NodeLost(NodeError):
    """The node was there and is gone; it may be back in a moment."""


class NodeRefused(NodeError):
    """The node is there and refuses this client; trying again does not help."""


class DeadlineExceeded(KVHoldError):
    """No answer within the deadline; whatever was held for the call is given back."""

    def __init__(self, operation: str, deadline_s: float) -> None:
        super().__init__(f"{operation}: no answer within {deadline_s:g} s")
        self.deadline_s = deadline_s
