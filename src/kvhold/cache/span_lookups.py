from collections.abc import Callable, Sequence

from kvhold.cache.chores import Turns
from kvhold.cache.leases import Owner
from kvhold.cache.lookup import Lookups
from kvhold.cache.transfer.commands import Command, ProbeCommand
from kvhold.cache.transfer.probes import joined
from kvhold.core.api import Found
from kvhold.core.keys import Query

_SPAN_UNITS = 50  # per span, beside its lookup


def lookups_of_spans(
    lookups: Lookups,
    owner: Owner,
    queries: Sequence[Query],
    give_command: Callable[[Command], None],
    release: Callable[[Owner, int], None],
) -> Turns[list[Found]]:
    """Each with a ticket of its own. A tier is asked once for all."""
    found: list[Found] = []
    probes: list[ProbeCommand] = []
    try:
        for query in queries:
            found.append((yield from lookups.lookup_turns(owner, query, probes=probes)))
            yield _SPAN_UNITS
    except BaseException:  # the client may disconnect between steps
        for one in found:
            release(owner, one.ticket)
        raise
    for probe in joined(probes):
        give_command(probe)
    return found
