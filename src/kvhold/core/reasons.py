"""Why a hit ends where it ends: one word of a closed set, the same in `Hit.reason`, in metrics and
on the wire.

A caller names the reasons that the cache cannot see: an unregistered namespace, a lost node, a
rule.
"""

WHOLE = "whole"
NEVER_STORED = "never_stored"
INCOMPLETE = "incomplete"
BEING_WRITTEN = "being_written"
EVICTED = "evicted"
EXPIRED = "expired"
CLEARED = "cleared"
NO_ROOM = "no_room"
DEADLINE = "deadline"
TIER_DOWN = "tier_down"
BAD_FRAME = "bad_frame"
DAMAGED = "damaged"
SLOWER = "slower"
NOT_NEEDED = "not_needed"

REASONS = {
    WHOLE: "nothing is missing",
    NEVER_STORED: "the next chunk was not stored, or so long ago that nobody remembers how it went",
    INCOMPLETE: "of the next chunk, or of one that the window looks back at, some groups or shards are "
    "there and others were never stored",
    BEING_WRITTEN: "the next chunk is reserved and not committed yet",
    EVICTED: "the next chunk was here and was evicted; no tier below has it, or it went from there, "
    "too",
    EXPIRED: "the next chunk was here and has outlived its time",
    CLEARED: "the next chunk was here and was cleared, or its namespace is being cleared",
    NO_ROOM: "there was no memory to store the next chunk, or to bring it up: the rest is pinned or "
    "being written",
    DEADLINE: "the next chunk was on its way, or was being looked for, when the time for it was over",
    TIER_DOWN: "a tier that may have the next chunk did not answer, or failed to give it",
    BAD_FRAME: "a tier had the next chunk, but its bytes failed a check",
    DAMAGED: "the next chunk was in memory, but its bytes were no longer those that were stored, so "
    "it was removed",
    SLOWER: "loading the next chunk, or looking for it, would have taken longer than computing it",
    NOT_NEEDED: "a tier has the next chunk, but no tier has anything that whoever asked does not have "
    "already",
}
"""The reasons and their meanings. The next chunk is the first chunk whose absence ends the hit."""
