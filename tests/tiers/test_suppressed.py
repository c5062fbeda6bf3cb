"""What a tier holds and nobody is to see."""

from kvhold.testing.tier import make_key
from kvhold.tiers.suppressed import Suppressed


def test_what_is_owed_is_hidden_until_it_is_paid() -> None:
    suppressed = Suppressed()
    suppressed.add(b"n" * 16)
    assert suppressed.hides(make_key(1))
    assert not suppressed.hides(make_key(1, b"m" * 16))
    suppressed.add(b"")
    assert suppressed.pending == [b"n" * 16, b""]
    assert suppressed.hides(make_key(1, b"m" * 16))
    suppressed.settle(b"", suppressed.number(b""))
    suppressed.settle(b"n" * 16, suppressed.number(b"n" * 16))
    assert not suppressed.hides(make_key(1))
    assert suppressed.pending == []


def test_an_unreadable_value_is_suppressed_until_it_is_removed_or_the_tier_recovers() -> None:
    suppressed = Suppressed()
    suppressed.unreadable(make_key(1))
    suppressed.unreadable(make_key(2))
    assert [suppressed.hides(make_key(n)) for n in range(3)] == [False, True, True]
    suppressed.removed(make_key(1))
    assert not suppressed.hides(make_key(1))
    suppressed.mended()
    assert not suppressed.hides(make_key(2))


def test_what_cannot_be_read_is_tried_again_after_30_s() -> None:
    now_s = 0.0
    suppressed = Suppressed(lambda: now_s)
    suppressed.unreadable(make_key(1))
    now_s = 29.0
    suppressed.unreadable(make_key(2))
    assert [suppressed.hides(make_key(n)) for n in (1, 2)] == [True, True]
    now_s = 30.0
    assert [suppressed.hides(make_key(n)) for n in (1, 2)] == [False, True]
    suppressed.unreadable(make_key(1))
    now_s = 59.5
    assert [suppressed.hides(make_key(n)) for n in (1, 2)] == [True, False]


def test_what_cannot_be_read_takes_bounded_memory() -> None:
    suppressed = Suppressed()
    for n in range(10_001):
        suppressed.unreadable(n.to_bytes(40, "little"))
    assert not suppressed.hides((0).to_bytes(40, "little"))
    assert suppressed.hides((1).to_bytes(40, "little"))
