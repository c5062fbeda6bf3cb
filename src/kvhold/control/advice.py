from typing import TypedDict

from kvhold.core.reasons import REASONS, Reason

ACTIONS = {
    Reason.WHOLE: "none",
    Reason.NEVER_STORED: "none for new text; else see Troubleshooting in docs/vllm.md",
    Reason.INCOMPLETE: "a worker's stores fail or are late: see its log",
    Reason.BEING_WRITTEN: "none",
    Reason.BEING_COMPUTED: "rules.wait_for_computing, if it is off",
    Reason.EVICTED: "more ram_bytes, or a tier",
    Reason.EXPIRED: "rules.ttl_s, if that is too short",
    Reason.CLEARED: "none",
    Reason.NO_ROOM: "more ram_bytes; fewer requests at a time",
    Reason.DECLINED: "none; kvhold simulate shows the effect of more ram_bytes",
    Reason.DEADLINE: "client.arrival_timeout_s; kvhold bench tiers measures the tier",
    Reason.TIER_DOWN: "kvhold status and kvhold doctor name the tier and its fault",
    Reason.PEER_GONE: "kvhold peers shows the fault",
    Reason.PEER_EVICTED: "more memory or disk at the peer",
    Reason.PEER_SLOW: "kvhold peers there and here; answer_timeout_s",
    Reason.PEER_DENIED: "kvhold doctor says what to do",
    Reason.BAD_FRAME: "kvhold_tier_bad_frames names the check",
    Reason.DAMAGED: "a stray write, or faulty memory: see the node's log",
    Reason.SLOWER: "none. kvhold explain shows the decision",
    Reason.NOT_NEEDED: "none",
    Reason.HOST_AWAY: "start the node there; the engine's log names the host",
}


class ReasonRow(TypedDict):
    """action: what to do"""

    reason: str
    meaning: str
    action: str


def reason_rows() -> list[ReasonRow]:
    return [
        {"reason": str(reason), "meaning": meaning, "action": ACTIONS[reason]}
        for reason, meaning in REASONS.items()
    ]
