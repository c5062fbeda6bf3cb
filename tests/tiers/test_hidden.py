"""What a tier holds and nobody is to see."""

from kvhold.testing.tier import make_key
from kvhold.tiers.hidden import Hidden


def test_what_is_owed_is_hidden_until_it_is_paid() -> None:
    hidden = Hidden()
    hidden.owe(b"n" * 16)
    assert hidden.hides(make_key(1))
    assert not hidden.hides(make_key(1, b"m" * 16))
    hidden.owe(b"")
    assert hidden.owed == [b"n" * 16, b""]
    assert hidden.hides(make_key(1, b"m" * 16))
    hidden.paid(b"", hidden.debt(b""))
    hidden.paid(b"n" * 16, hidden.debt(b"n" * 16))
    assert not hidden.hides(make_key(1))
    assert hidden.owed == []


def test_what_cannot_be_read_is_hidden_until_it_is_removed_or_the_tier_was_away() -> None:
    hidden = Hidden()
    hidden.unreadable(make_key(1))
    hidden.unreadable(make_key(2))
    assert [hidden.hides(make_key(n)) for n in range(3)] == [False, True, True]
    hidden.removed(make_key(1))
    assert not hidden.hides(make_key(1))
    hidden.mended()
    assert not hidden.hides(make_key(2))


def test_what_cannot_be_read_takes_bounded_memory() -> None:
    hidden = Hidden()
    for n in range(10_001):
        hidden.unreadable(n.to_bytes(40, "little"))
    assert not hidden.hides((0).to_bytes(40, "little"))
    assert hidden.hides((1).to_bytes(40, "little"))
