"""The reason of a hit's end in words, for `kvhold explain`."""

from typing import NamedTuple

from kvhold.core.keys import NAME_BYTES
from kvhold.core.reasons import DECLINED, EVICTED, REASONS, WHOLE, Reason

_VERBS = {EVICTED: "was evicted", DECLINED: "was not worth its room"}


class ExpectedChunk(NamedTuple):
    """See `Policy.expected_back_s`."""

    key: bytes
    expected_back_s: float


def describe(
    reason: Reason, key: bytes, ago_s: float | None, expected: ExpectedChunk | None
) -> str:
    if reason == WHOLE:
        return ""
    if reason not in _VERBS or ago_s is None:
        return REASONS[reason]
    text = f"the next chunk {_VERBS[reason]} {_duration(ago_s)} ago"
    if expected is None or expected.key[:NAME_BYTES] != key[:NAME_BYTES]:
        return text
    return f"{text}; it was expected back {_duration(expected.expected_back_s)} after that"


def _duration(seconds: float) -> str:
    for unit, unit_s, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
