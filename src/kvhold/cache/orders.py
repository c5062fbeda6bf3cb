"""What the cache's state asks of the world below RAM: orders out, and the events that answer them.

The state takes calls and events and returns answers; what it wants done besides stands in its orders, which its driver hands to the mover.
The mover answers each with calls of the state's event methods, named here.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvhold.core.layout import Layout
from kvhold.core.terms import FREE, Terms
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import Place


@dataclass(frozen=True)
class ProbeOrder:
    """Where are these keys? -> `probed(search, places)`"""

    search: int
    keys: list[bytes]


@dataclass(frozen=True)
class Arrival:
    """One chunk to be read from its place into its entry, which is reserved for it."""

    entry: Entry
    layout: Layout
    place: Place
    tenant: str = ""


@dataclass(frozen=True)
class FetchOrder:
    """Read these, in this order as far as it matters. -> for each `fetched(entry, ok)`, or `given_up(entry)` and `let_go(entry)` later"""

    arrivals: list[Arrival]


@dataclass(frozen=True)
class WriteOrder:
    """Write this entry, which is held until then, to lower tiers. -> `written(number)`

    terms: on which it was stored
    above: only to the tiers above this one, where the chunk came from; None: to all
    """

    number: int
    entry: Entry
    layout: Layout
    terms: Terms = FREE
    above: int | None = None


@dataclass(frozen=True)
class ClearOrder:
    """Remove all keys with this prefix. -> `cleared(prefix)`"""

    prefix: bytes


Order: TypeAlias = ProbeOrder | FetchOrder | WriteOrder | ClearOrder
