"""Our errors: one tree, drawn as it is, and each carries what its reader needs."""

import re

import pytest

from kvhold.core import errors
from kvhold.core.errors import (
    DeadlineExceeded,
    FrameError,
    KVHoldError,
    TierCannotList,
    TierDenied,
    TierError,
    TierFull,
    TierIncomplete,
    TierUnavailable,
)


def test_the_tree_that_is_drawn_is_the_tree_there_is() -> None:
    drawn = {"KVHoldError": "Exception"}
    path = ["KVHoldError"]
    for indent, name in re.findall(r"^([ │]*)[├└]─ (\w+)", errors.__doc__ or "", re.MULTILINE):
        depth = len(indent) // 4 + 1
        drawn[name] = path[depth - 1]
        path[depth:] = [name]
    defined = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    ]
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in defined if kind.__base__}


@pytest.mark.parametrize(
    ("kind", "retryable"),
    [
        (TierError, True),
        (TierUnavailable, True),
        (TierIncomplete, False),
        (TierCannotList, False),
        (TierFull, False),
        (TierDenied, False),
    ],
)
def test_a_tiers_fault_says_which_tier_what_and_whether_to_try_again(
    kind: type[TierError], retryable: bool
) -> None:
    error = kind("redis", "get", "connection refused")
    assert (error.tier, error.operation, error.retryable) == ("redis", "get", retryable)
    assert str(error) == "redis: get: connection refused"


def test_a_frames_fault_says_which_check_it_failed() -> None:
    error = FrameError("checksum", "header")
    assert error.reason == "checksum"
    assert str(error) == "not a valid frame (checksum): header"


def test_a_missed_deadline_says_how_long_it_was() -> None:
    error = DeadlineExceeded("lookup", 0.25)
    assert error.deadline_s == 0.25
    assert str(error) == "lookup: no answer within 0.25 s"


def test_one_except_catches_them_all() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 10
    assert all(issubclass(kind, KVHoldError) for kind in kinds)
