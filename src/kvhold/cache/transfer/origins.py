from dataclasses import dataclass, field

from kvhold.core.planning import LoadedChunks
from kvhold.tiers.base import Origin

_MOST_RUNS = 16


@dataclass
class _Place:
    began_s: float
    ended_s: float
    runs: list[list[int]] = field(default_factory=list)

    def add(self, chunk: int) -> None:
        run = self.runs[-1] if self.runs else None
        if run is not None and run[0] - 1 <= chunk <= run[1] + 1:
            run[0], run[1] = min(run[0], chunk), max(run[1], chunk)
        elif len(self.runs) < _MOST_RUNS:
            self.runs.append([chunk, chunk])
        else:  # the last run stands for all later chunks
            self.runs[-1][0] = min(self.runs[-1][0], chunk)
            self.runs[-1][1] = max(self.runs[-1][1], chunk)


class Origins:
    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def add(self, origin: Origin, chunk: int) -> None:
        place = self._places.get(origin.place)
        if place is None:
            place = self._places[origin.place] = _Place(origin.began_s, origin.ended_s)
        place.began_s = min(place.began_s, origin.began_s)
        place.ended_s = max(place.ended_s, origin.ended_s)
        place.add(chunk)

    def loaded(self) -> list[LoadedChunks]:
        return [
            LoadedChunks(name, _joined(place.runs), place.ended_s - place.began_s)
            for name, place in self._places.items()
        ]


def _joined(runs: list[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
