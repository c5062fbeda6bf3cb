"""Orders of the cache's state to the mover, and the events that answer them.

The state takes calls and events and returns answers. It has no I/O: its driver takes its orders and
gives them to the mover. The mover answers each by the event methods of the state that are named
here.
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvhold.core.layout import Layout
from kvhold.core.terms import FREE, Terms
from kvhold.tiers.ram import Entry
from kvhold.tiers.stack import Place


@dataclass(frozen=True)
class ProbeOrder:
    """Find these keys in the tiers. -> `probed(search, places)`"""

    search: int
    keys: list[bytes]


@dataclass(frozen=True)
class Arrival:
    """One chunk to be read from its place into its reserved entry."""

    entry: Entry
    layout: Layout
    place: Place
    tenant: str = ""


@dataclass(frozen=True)
class FetchOrder:
    """Read these chunks, roughly in this order.

    -> for each `fetched(entry, ok)`; or `given_up(entry)`, and `let_go(entry)` later
    """

    arrivals: list[Arrival]


@dataclass(frozen=True)
class WriteOrder:
    """Write this entry to lower tiers; it is held until then. -> `written(number)`

    terms: of its store
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
    """A namespace that is to be re-encoded.

    layout: None if the frames must say it
    terms:  its budget and tenant
    """

    layout: Layout | None
    terms: Terms


@dataclass(frozen=True)
class RecodeOrder:
    """Re-encode the chunks of a tier. -> `recoded(number, recoded)`, repeatedly and at the end

    spaces:  of these namespaces, by digest
    layouts: all registered ones, by fingerprint
    keys:    only these; None: all that are there
    """

    number: int
    tier: int
    codec: str
    spaces: dict[bytes, Space]
    layouts: dict[bytes, Layout]
    keys: list[bytes] | None = None


@dataclass(frozen=True)
class StopOrder:
    """Stop a recoding. -> `recoded(number, recoded)`"""

    number: int


Order: TypeAlias = ProbeOrder | FetchOrder | WriteOrder | ClearOrder | RecodeOrder | StopOrder
