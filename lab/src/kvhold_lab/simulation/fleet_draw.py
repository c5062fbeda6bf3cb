from dataclasses import dataclass
from random import Random

_MOST_IN_ONE_LIST = 24  # hosts that all follow each other
_SMALL = 8


@dataclass(frozen=True)
class FleetDraw:
    """directory: `static`, `dns` or `etcd`
    has_two_addresses: the list has each host twice
    pause_s: longest time between two calls, which makes a bus late
    """

    has_bus: bool
    directory: str
    has_two_addresses: bool
    is_skewed: bool
    pause_s: float
    clocks: Random


def draw_fleet(seed: int, num_hosts: int) -> FleetDraw:
    random = Random(f"fleet {seed}")
    directory = random.choice(("static", "static", "static", "dns", "etcd"))
    if directory == "etcd" and num_hosts > _MOST_IN_ONE_LIST:
        directory = "dns"
    has_two = random.random() < 0.3 and num_hosts <= _SMALL
    has_bus = random.random() < 0.5
    is_slow = has_bus and num_hosts <= _SMALL and random.random() < 0.5
    return FleetDraw(
        has_bus=has_bus,
        directory=directory,
        has_two_addresses=has_two and directory != "etcd",
        is_skewed=random.random() < 0.5,
        pause_s=4.0 if is_slow else 0.0,
        clocks=random,
    )
