from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row")

_HALF_LIFE_S = 3600.0
_MOST_HALF_LIVES = 100.0


class Decay:
    """Uses an hour ago count half as much: those of now have a larger scale."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self.tables: list[Busiest[Any, Any]] = []

    def scale(self) -> float:
        half_lives = (self._clock() - self._began_s) / _HALF_LIFE_S
        if half_lives < _MOST_HALF_LIVES:
            return float(2.0**half_lives)
        self._began_s = self._clock()
        for table in self.tables:
            table.shrink(0.5**half_lives)
        return 1.0


class _Place(Generic[Row]):
    __slots__ = ("row", "weight")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.weight = 0.0


class Busiest(Generic[Key, Row]):
    """Rows of the keys used most of late: Space-Saving (Metwally 2005) with forward decay (Cormode
    2009).
    """

    def __init__(self, most: int, make_row: Callable[[], Row], decay: Decay) -> None:
        self._most = most
        self._make_row = make_row
        self._places: dict[Key, _Place[Row]] = {}
        # each weight is at most the present one
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = count()
        decay.tables.append(self)

    def __len__(self) -> int:
        return len(self._places)

    def use(self, key: Key, weight: float) -> Row:
        """Returns the key's row. weight: above 0, scaled by the decay"""
        place = self._places.get(key)
        if place is None:
            place = _Place(self._make_row())
            if len(self._places) >= self._most:
                place.weight = self._drop_least()
            self._places[key] = place
            heappush(self._heap, (place.weight + weight, next(self._numbers), key))
        place.weight += weight
        return place.row

    def rows(self) -> list[tuple[Key, Row]]:
        """The busiest first."""
        places = sorted(self._places.items(), key=lambda item: -item[1].weight)
        return [(key, place.row) for key, place in places]

    def shrink(self, factor: float) -> None:
        for place in self._places.values():
            place.weight *= factor
        self._heap = [(self._places[key].weight, number, key) for _, number, key in self._heap]
        heapify(self._heap)

    def _drop_least(self) -> float:
        while True:
            noted, number, key = self._heap[0]
            weight = self._places[key].weight
            if weight == noted:
                heappop(self._heap)
                del self._places[key]
                return weight
            heapreplace(self._heap, (weight, number, key))
