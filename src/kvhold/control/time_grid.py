from dataclasses import dataclass
from functools import cached_property

FINE, COARSE = 0, 1
FINE_S = 6 * 3600
COARSE_STEP_S, COARSE_S = 300, 30 * 86400
LEVELS = {FINE: FINE_S, COARSE: COARSE_S}

_MOST_POINTS = 300


@dataclass(frozen=True)
class TimeGrid:
    since_s: int
    now_s: int

    @property
    def level(self) -> int:
        return FINE if self.since_s <= FINE_S else COARSE

    @cached_property
    def step_s(self) -> int:
        least = 1 if self.level == FINE else COARSE_STEP_S
        step = max(least, -(-self.since_s // _MOST_POINTS))
        return -(-step // least) * least

    @property
    def first_s(self) -> int:
        return (self.now_s - self.since_s) // self.step_s * self.step_s

    @cached_property
    def columns(self) -> list[int]:
        return list(range(self.first_s, self.now_s + 1, self.step_s))
