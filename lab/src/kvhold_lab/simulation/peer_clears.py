"""The rule "no read after a clear" for peers.

A clear binds a lookup on each host that knows it, but not for chunks stored since an earlier one of
another host has *overtaken* it: its clock differs, and its number is not smaller.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvhold_lab.simulation.clears import SimClear, SimOrigin
from kvhold_lab.simulation.world import World


@dataclass
class FleetClears:
    world: World
    clears: list[SimClear] = field(default_factory=list)
    stored: dict[bytes, int] = field(default_factory=dict)
    lent: dict[bytes, int] = field(default_factory=dict)


class PeerClears:
    def __init__(self, shared: FleetClears, host: int) -> None:
        self.stored = shared.stored
        self.shared = shared
        self._host = host
        # prefix -> (number of a clear, since when lookups must respect it)
        self._heard: dict[bytes, list[tuple[int, int]]] = {}
        self._begun: set[int] = set()

    def node_began(self, numbers: Mapping[bytes, int]) -> None:
        """numbers: of the clears in the node's journal"""
        began = self.shared.world.number()
        self._heard = {prefix: [(number, began)] for prefix, number in numbers.items()}

    def hears(self, prefix: bytes, number: int) -> None:
        self._heard.setdefault(prefix, []).append((number, self.shared.world.number()))

    def begins(self, prefix: bytes) -> None:
        """This host's oldest clear."""
        for clear in self._own(prefix):
            if clear.began not in self._begun:
                self._begun.add(clear.began)
                return

    def numbered(self, prefix: bytes, number: int) -> None:
        for clear in self._own(prefix):
            if clear.began in self._begun and not clear.number:
                clear.number = number

    def lends(self, key: bytes, born: int) -> None:
        self.shared.lent[key] = max(born, self.shared.lent.get(key, 0))

    def asked_to_clear(self, prefix: bytes, began: int) -> None:
        self.shared.clears.append(SimClear(self._host, prefix, began))

    def cleared(self, prefix: bytes, began: int, done: int) -> None:
        for clear in self.shared.clears:
            if clear.host == self._host and clear.began == began:
                clear.done = done

    def node_died(self, *, clears_done: bool) -> None:
        self._heard = {}
        if not clears_done:
            clears = self.shared.clears
            clears[:] = [clear for clear in clears if clear.host != self._host or clear.number]
            for clear in clears:
                if clear.host == self._host:
                    clear.done = 0

    def born(self, key: bytes, origin: SimOrigin | None, allocation: int) -> int:
        if origin is None:
            return allocation
        return self.shared.lent.get(key, 0) if origin.shared else self.stored.get(key, 0)

    def binding(
        self, key: bytes, origin: SimOrigin | None, asked: int, asked_s: float
    ) -> Iterator[tuple[int, str]]:
        for clear in self.shared.clears:
            if not key.startswith(clear.prefix):
                continue
            if clear.host == self._host:
                if 0 < clear.done < asked:
                    yield self._since(clear), "a clear"
            elif clear.number and any(
                number >= clear.number and since < asked
                for number, since in self._heard.get(clear.prefix, ())
            ):
                why = f"a clear of host {clear.host}, which this host knows of"
                yield self._since(clear), why

    def _since(self, clear: SimClear) -> int:
        """The beginning of a clear, or of the earliest that has overtaken it."""
        return min(
            (
                other.began
                for other in self.shared.clears
                if other.host != clear.host
                and other.prefix == clear.prefix
                and 0 < clear.number <= other.number
                and other.began < clear.began
            ),
            default=clear.began,
        )

    def _own(self, prefix: bytes) -> list[SimClear]:
        return [
            clear
            for clear in self.shared.clears
            if clear.host == self._host and clear.prefix == prefix
        ]
