from dataclasses import dataclass
from random import Random

_STEPS_S = (-100.0, -2.0, 2.0, 100.0)


@dataclass
class HostClock:
    """drift:   seconds that it gains in a second
    up_s:    the host's running time before the start
    """

    ahead_s: float = 0.0
    drift: float = 0.0
    up_s: float = 0.0

    def wall_ahead_s(self, now: float) -> float:
        return self.ahead_s + self.drift * now

    def monotonic_s(self, now: float) -> float:
        return self.up_s + now * (1 + self.drift)

    def step(self, random: Random) -> None:
        self.ahead_s += random.choice(_STEPS_S)


def draw_clock(random: Random, *, is_skewed: bool) -> HostClock:
    up_s = random.random() * 1e6
    if not is_skewed:
        return HostClock(up_s=up_s)
    return HostClock(
        ahead_s=random.choice((0.0, 0.05, 2.0, 100.0, 5_000.0)) * random.uniform(-1, 1),
        drift=random.choice((0.0, 1e-5, 1e-3)) * random.uniform(-1, 1),
        up_s=up_s,
    )
