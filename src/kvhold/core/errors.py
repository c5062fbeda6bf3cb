"""kvhold's errors and their causes.

KVHoldError
 ├─ ConfigError          a setting is invalid; names the nearest valid one
 ├─ LayoutError          tensors do not match the layout
 ├─ CapacityError        the host lacks the memory
 ├─ TierError            a tier failed: .tier, .operation, .retryable
 │   ├─ TierUnavailable  dead, unreachable, breaker open
 │   ├─ TierIncomplete   it did only a part; other requests may succeed
 │   ├─ TierCannotList   this kind of tier cannot list its keys; all else works
 │   ├─ TierFull         no space and nothing to evict, or the value is too large
 │   └─ TierDenied       wrong credentials or rights
 ├─ FrameError           not a valid frame; .reason is the failed check
 ├─ DamagedChunks        memory changed after the commit; the reader computes
 ├─ DeviceError          a GPU or its driver failed; this process stops caching
 │   └─ DeviceRefused    no host memory is registered; copies are slower
 ├─ ProtocolError        a peer broke the protocol; its connection is closed
 ├─ NodeError            the node is missing, busy, another user's or another version
 │   ├─ NodeLost         the connection broke; the node may return
 │   └─ NodeRefused      the node refuses this client; do not try again
 └─ DeadlineExceeded     .deadline_s; the caller continues without the cache
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvhold.core.reasons import TIER_DOWN, Reason

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
FrameReason = Literal["magic", "version", "length", "checksum", "identity", "sealed", "lossy"]


class KVHoldError(Exception):
    """The root of the tree."""


class ConfigError(KVHoldError):
    pass


class LayoutError(KVHoldError):
    pass


class CapacityError(KVHoldError):
    pass


class TierError(KVHoldError):
    retryable = True
    reason = "error"
    miss: Reason = TIER_DOWN

    def __init__(self, tier: str, operation: str, detail: str) -> None:
        super().__init__(f"{tier}: {operation}: {detail}")
        self.tier = tier
        self.operation = operation


class TierUnavailable(TierError):
    reason = "unavailable"


class TierIncomplete(TierError):
    retryable = False
    reason = "incomplete"


class TierCannotList(TierError):
    retryable = False
    reason = "unlisted"


class TierFull(TierError):
    retryable = False
    reason = "full"


class TierDenied(TierError):
    retryable = False
    reason = "denied"


class FrameError(KVHoldError):
    def __init__(self, reason: FrameReason, detail: str) -> None:
        super().__init__(f"not a valid frame ({reason}): {detail}")
        self.reason: FrameReason = reason


class DamagedChunks(KVHoldError):
    """chunks: the numbers of damaged chunks among the read ones."""

    def __init__(self, chunks: Sequence[int]) -> None:
        super().__init__(
            f"the bytes of {len(chunks)} chunks in memory are not those that were stored; "
            "the chunks are removed"
        )
        self.chunks = tuple(chunks)


class DeviceError(KVHoldError):
    """Running copies may still use memory."""


class DeviceRefused(DeviceError):
    pass


class ProtocolError(KVHoldError):
    pass


class NodeError(KVHoldError):
    pass


class NodeLost(NodeError):
    pass


class NodeRefused(NodeError):
    pass


class DeadlineExceeded(KVHoldError):
    """No answer in time. The call holds nothing."""

    def __init__(self, operation: str, deadline_s: float) -> None:
        super().__init__(f"{operation}: no answer within {deadline_s:g} s")
        self.deadline_s = deadline_s
