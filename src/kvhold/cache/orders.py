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
    """Remove all keys with this prefix. -> `cleared(prefix)`

    learned: another host has cleared the tiers that it shares with this one
    """

    prefix: bytes
    learned: bool = False


@dataclass(frozen=True)
class Space:
    """What is known of a namespace that is to be recoded. terms: its budget, and whose it is; layout: None where the frames must say it."""

    layout: Layout | None
    terms: Terms


@dataclass(frozen=True)
class RecodeOrder:
    """Write what a tier holds anew. -> `recoded(number, recoded)`, now and then and at the end

    spaces:  of these namespaces, by digest
    layouts: all that are registered, by fingerprint
    keys:    these alone; None: all that are there
    """

    number: int
    tier: int
    codec: str
    spaces: dict[bytes, Space]
    layouts: dict[bytes, Layout]
    keys: list[bytes] | None = None


@dataclass(frozen=True)
class StopOrder:
    """Go no further with a recoding. -> `recoded(number, recoded)`"""

    number: int


Order: TypeAlias = ProbeOrder | FetchOrder | WriteOrder | ClearOrder | RecodeOrder | StopOrder
