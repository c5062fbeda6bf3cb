from collections.abc import Callable, Mapping
from heapq import nlargest

from kvhold.cache.chores import Turns
from kvhold.core.usage import AGES_S, HeldAges
from kvhold.tiers.bytes_by_age import SLOT_S, BytesByAge

_SLOTS_A_STEP = 250
_MOST_ROWS = 1000


def ages_turns(
    places: Mapping[str, list[BytesByAge]], tenant_of: Callable[[bytes], str | None], now_slot: int
) -> Turns[list[HeldAges]]:
    rows: dict[tuple[str, str], list[int]] = {}
    for place, parts in places.items():
        for held in parts:
            for number, ((namespace, slot), nbytes) in enumerate(held.by_slot().items(), 1):
                by_age = rows.setdefault(
                    (tenant_of(namespace) or "", place), [0] * (len(AGES_S) + 1)
                )
                by_age[_bucket(SLOT_S * (now_slot - slot))] += nbytes
                if number % _SLOTS_A_STEP == 0:
                    yield _SLOTS_A_STEP
    largest = nlargest(_MOST_ROWS, rows.items(), key=lambda row: sum(row[1]))
    return [HeldAges(tenant, place, by_age) for (tenant, place), by_age in largest]


def _bucket(age_s: int) -> int:
    return sum(age_s >= end_s for end_s in AGES_S)
