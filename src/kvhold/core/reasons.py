from enum import StrEnum


class Reason(StrEnum):
    WHOLE = "whole"
    NEVER_STORED = "never_stored"
    INCOMPLETE = "incomplete"
    BEING_WRITTEN = "being_written"
    BEING_COMPUTED = "being_computed"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CLEARED = "cleared"
    NO_ROOM = "no_room"
    DECLINED = "declined"
    DEADLINE = "deadline"
    TIER_DOWN = "tier_down"
    PEER_GONE = "peer_gone"
    PEER_EVICTED = "peer_evicted"
    PEER_SLOW = "peer_slow"
    PEER_DENIED = "peer_denied"
    BAD_FRAME = "bad_frame"
    DAMAGED = "damaged"
    SLOWER = "slower"
    NOT_NEEDED = "not_needed"
    HOST_AWAY = "host_away"


WHOLE = Reason.WHOLE
NEVER_STORED = Reason.NEVER_STORED
INCOMPLETE = Reason.INCOMPLETE
BEING_WRITTEN = Reason.BEING_WRITTEN
BEING_COMPUTED = Reason.BEING_COMPUTED
EVICTED = Reason.EVICTED
EXPIRED = Reason.EXPIRED
CLEARED = Reason.CLEARED
NO_ROOM = Reason.NO_ROOM
DECLINED = Reason.DECLINED
DEADLINE = Reason.DEADLINE
TIER_DOWN = Reason.TIER_DOWN
PEER_GONE = Reason.PEER_GONE
PEER_EVICTED = Reason.PEER_EVICTED
PEER_SLOW = Reason.PEER_SLOW
PEER_DENIED = Reason.PEER_DENIED
BAD_FRAME = Reason.BAD_FRAME
DAMAGED = Reason.DAMAGED
SLOWER = Reason.SLOWER
NOT_NEEDED = Reason.NOT_NEEDED
HOST_AWAY = Reason.HOST_AWAY

REASONS = {
    WHOLE: "nothing is missing",
    NEVER_STORED: "the next chunk was never stored, or so long ago that the record of it is gone",
    INCOMPLETE: (
        "the next chunk, or one inside the window, lacks groups or shards that were never stored"
    ),
    BEING_WRITTEN: "the next chunk is reserved and not committed yet",
    BEING_COMPUTED: (
        "another engine was computing the next chunk, and the lookup did not wait for it, or not "
        "long enough"
    ),
    EVICTED: "the next chunk was evicted from memory, and no lower tier has it",
    EXPIRED: "the next chunk has outlived its time to live",
    CLEARED: "the next chunk was cleared, or its namespace is being cleared",
    NO_ROOM: (
        "no memory was free to store the next chunk or to load it from a tier: the rest is pinned "
        "or being written"
    ),
    DECLINED: (
        "the next chunk was not worth its room: the eviction policy kept other chunks instead"
    ),
    DEADLINE: "the next chunk did not arrive, or was not found, before the deadline",
    TIER_DOWN: "a tier that may have the next chunk did not answer, or its read failed",
    PEER_GONE: "a peer had the next chunk, and cannot be reached or was restarted",
    PEER_EVICTED: "a peer had the next chunk, and has evicted it",
    PEER_SLOW: "a peer has the next chunk, but does not answer in time, and is left alone for now",
    PEER_DENIED: (
        "a peer has the next chunk, but refuses this node, or this node refuses its certificate"
    ),
    BAD_FRAME: "a tier had the next chunk, but its bytes failed a check",
    DAMAGED: "the next chunk was in memory, but its bytes had changed since, so it was removed",
    SLOWER: "loading or finding the next chunk would have taken longer than computing it",
    NOT_NEEDED: "a tier has the next chunk, but no tier has more than the engine already has",
    HOST_AWAY: (
        "the engine's workers are on several hosts, and one of them could not be asked: its node, "
        "or the way to it, was away"
    ),
}
"""With their meanings. The next chunk is the first whose absence ends the hit."""

PASSING = frozenset({TIER_DOWN, PEER_GONE, PEER_SLOW, PEER_DENIED})
"""They say nothing about the chunk itself: it may be found later."""
