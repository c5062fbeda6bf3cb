"""The busiest names of late are kept apart, in bounded memory."""

from collections import Counter
from random import Random
from typing import Any

from kvhold.cache.busiest import Busiest, Decay
from kvhold.cache.caller_shares import MOST_APART, CallerShares


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Kept(Busiest[str, list[int]]):
    def __init__(self, most: int, clock: Any = None) -> None:
        self.decay = Decay(clock or Clock())
        super().__init__(most, list, self.decay)

    def use(self, key: str, weight: float) -> list[int]:
        return super().use(key, weight * self.decay.scale())


def names(kept: Kept) -> list[str]:
    return [name for name, _ in kept.rows()]


def test_a_name_with_more_than_its_share_is_kept_whatever_else_comes() -> None:
    """Space-Saving's law: above 1 / n of all, a name is among n."""
    draw = Random(1)
    kept, amounts = Kept(10), Counter[str]()
    for _ in range(20_000):
        name = f"often {draw.randrange(4)}" if draw.random() < 0.6 else f"once {draw.random()}"
        amount = draw.randrange(1, 9)
        kept.use(name, amount)
        amounts[name] += amount
    assert len(kept) == len(kept._heap) == 10
    due = {name for name, amount in amounts.items() if amount > amounts.total() / 10}
    assert due == {f"often {number}" for number in range(4)} == set(names(kept)[:4])


def test_the_least_busy_name_makes_way_and_begins_anew() -> None:
    kept = Kept(2)
    kept.use("a", 5).append(1)
    kept.use("b", 1).append(2)
    kept.use("c", 1).append(3)
    assert dict(kept.rows()) == {"a": [1], "c": [3]}
    assert kept.use("b", 9) == []
    assert names(kept) == ["b", "a"], "it inherits the weight of what it replaced"


def test_what_was_busy_long_ago_makes_way() -> None:
    clock = Clock()
    kept = Kept(2, clock)
    kept.use("yesterday", 1000)
    kept.use("now and then", 600)
    clock.now_s += 24 * 3600
    for number in range(3):
        kept.use("now and then", 1)
        kept.use(f"today {number}", 1)
    assert "yesterday" not in names(kept)


def test_a_year_of_uses_stays_in_order() -> None:
    clock = Clock()
    kept = Kept(3, clock)
    for day in range(365):
        clock.now_s = day * 86400.0
        kept.use(f"day {day}", 1)
        kept.use("always", 2)
    assert names(kept) == ["always", "day 364", "day 363"]


def test_lookups_are_counted_by_tenant_client_and_session() -> None:
    shares = CallerShares(Decay(Clock()))
    for tenant, client, session, hit in (
        ("acme", "engine 1", "s", 10),
        ("acme", "engine 2", "", 0),
        ("", "engine 1", "s", 30),
    ):
        shares.count(tenant, client, session, 40, hit)
    rows = {(row.kind, row.tenant, row.name): row for row in shares.rows()}
    counted = {key: (row.lookups, row.asked_tokens, row.hit_tokens) for key, row in rows.items()}
    assert counted == {
        ("all", "", ""): (3, 120, 40),
        ("tenant", "acme", "acme"): (2, 80, 10),
        ("tenant", "", ""): (1, 40, 30),
        ("client", "", "engine 1"): (2, 80, 40),
        ("client", "", "engine 2"): (1, 40, 0),
        ("session", "acme", "s"): (1, 40, 10),
        ("session", "", "s"): (1, 40, 30),
    }


def test_a_million_names_take_the_memory_of_64() -> None:
    shares = CallerShares(Decay(Clock()))
    for number in range(10_000):
        shares.count(f"t{number}", f"c{number}", f"s{number}", 8, 0)
    rows = list(shares.rows())
    assert len(rows) == 1 + 3 * MOST_APART
    assert (rows[0].kind, rows[0].lookups, rows[0].asked_tokens) == ("all", 10_000, 80_000)
