"""The errors that kvhold raises, and their causes.

KVHoldError
 ├─ ConfigError          invalid settings; names the key, the value and the nearest valid one
 ├─ LayoutError          tensors do not match the registered layout; refused, never guessed
 ├─ CapacityError        the host cannot give the requested memory; names the possible amount
 ├─ TierError            a tier failed: .tier, .operation, .retryable
 │   ├─ TierUnavailable  dead, unreachable, breaker open
 │   ├─ TierIncomplete   it answered, and did only a part
 │   ├─ TierFull
 │   └─ TierDenied       wrong credentials or rights
 ├─ FrameError           bytes that are not a frame of ours: .reason is a FrameReason
 ├─ DamagedChunks        chunks in memory differ from the committed bytes; the reader computes them
 ├─ DeviceError          a GPU or its driver failed; from then on this process caches nothing
 │   └─ DeviceRefused    the device does not register host memory; copies are slower
 ├─ ProtocolError        a peer broke the protocol; its connection is closed
 ├─ NodeError            the node is unreachable, does not start or does not match; names the socket
 │   ├─ NodeLost         the node was there and is lost; it may return in a moment
 │   └─ NodeRefused      the node is there and refuses this client, with the reason
 └─ DeadlineExceeded     .deadline_s; the caller continues without the cache

A miss is not an error: it is `None`, or a shorter hit.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for outside data: a wrong form, text that is not UTF-8, too deep nesting."""

FrameReason = Literal["magic", "version", "length", "checksum", "identity", "sealed"]


class KVHoldError(Exception):
    """The root of every error that kvhold raises on purpose."""


class ConfigError(KVHoldError):
    """A setting is unknown or out of range. The message names the key and the accepted values."""


class LayoutError(KVHoldError):
    """Tensors do not match the layout."""


class CapacityError(KVHoldError):
    """The host does not have the requested memory."""


class TierError(KVHoldError):
    """A tier failed an operation. `reason` is the label under which the fault is counted."""

    retryable = True
    reason = "error"

    def __init__(self, tier: str, operation: str, detail: str) -> None:
        super().__init__(f"{tier}: {operation}: {detail}")
        self.tier = tier
        self.operation = operation


class TierUnavailable(TierError):
    """The tier is dead or unreachable, or its breaker is open."""

    reason = "unavailable"


class TierIncomplete(TierError):
    """The tier did only a part of the request. Other requests can still use the tier."""

    retryable = False
    reason = "incomplete"


class TierFull(TierError):
    """The tier has no space and nothing to evict, or the value is larger than it accepts."""

    retryable = False
    reason = "full"


class TierDenied(TierError):
    """The tier refused the credentials, or they lack rights."""

    retryable = False
    reason = "denied"


class FrameError(KVHoldError):
    """Bytes are not a valid frame. `reason` is the check that failed."""

    def __init__(self, reason: FrameReason, detail: str) -> None:
        super().__init__(f"not a valid frame ({reason}): {detail}")
        self.reason: FrameReason = reason


class DamagedChunks(KVHoldError):
    """Chunks in memory differ from the committed bytes.

    They were reported, and are a miss from now on.

    chunks: their numbers among the chunks that were read
    """

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(
            f"the bytes of {len(chunks)} chunks in memory are not those that were stored; "
            "they are removed"
        )
        self.chunks = tuple(chunks)


class DeviceError(KVHoldError):
    """A device or its driver failed. Copies that were running may still read and write memory."""


class DeviceRefused(DeviceError):
    """The device does not register host memory. Copies still work."""


class ProtocolError(KVHoldError):
    """A peer sent a message that the protocol does not allow."""


class NodeError(KVHoldError):
    """The node of this host is missing, busy, another user's or of another version."""


class NodeLost(NodeError):
    """The node was there and is lost; it may return in a moment."""


class NodeRefused(NodeError):
    """The node is there and refuses this client; trying again does not help."""


class DeadlineExceeded(KVHoldError):
    """No answer within the deadline. Everything held for the call is released."""

    def __init__(self, operation: str, deadline_s: float) -> None:
        super().__init__(f"{operation}: no answer within {deadline_s:g} s")
        self.deadline_s = deadline_s
