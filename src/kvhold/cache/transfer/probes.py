"""Probes for several spans of a request, in the same calls of the tiers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from kvhold.cache.transfer.commands import MOST_READS, Command, FetchCommand, ProbeCommand
from kvhold.core.reasons import Reason
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.stack import TierPlace

_MOST_KEYS = 250

Value = TypeVar("Value")


@dataclass(frozen=True)
class ProbeAnswer:
    search: int
    places: dict[bytes, TierPlace]
    silent: Reason | None
    unknown: dict[bytes, Reason]


class _Probing(Protocol):
    def probed(
        self,
        number: int,
        places: dict[bytes, TierPlace],
        *,
        silent: Reason | None = None,
        unknown: dict[bytes, Reason] | None = None,
    ) -> None: ...


def joined(probes: Iterable[ProbeCommand]) -> list[ProbeCommand]:
    """One for each `tier`."""
    by_tier: dict[str, list[ProbeCommand]] = {}
    for probe in probes:
        by_tier.setdefault(probe.tier, []).append(probe)
    return [replace(first, others=tuple(others)) for first, *others in by_tier.values()]


def answers_of(
    command: ProbeCommand, places: Mapping[bytes, TierPlace], unknown: Unknown
) -> Iterator[list[ProbeAnswer]]:
    """In parts, each for one step."""
    part, num_keys = list[ProbeAnswer](), 0
    for probe in (command, *command.others):
        if part and num_keys + len(probe.keys) > _MOST_KEYS:
            yield part
            part, num_keys = [], 0
        num_keys += len(probe.keys)
        found, why = _of(probe.keys, places), _of(probe.keys, unknown.keys)
        part.append(ProbeAnswer(probe.search, found, unknown.why, why))
    yield part


def answer_all(state: _Probing, answers: Sequence[ProbeAnswer]) -> None:
    for one in answers:
        state.probed(one.search, one.places, silent=one.silent, unknown=one.unknown)


def _of(keys: Iterable[bytes], values: Mapping[bytes, Value]) -> dict[bytes, Value]:
    return {key: values[key] for key in keys if key in values}


def append(commands: list[Command], command: Command) -> None:
    """Reads of several spans become one command."""
    last = commands[-1] if commands else None
    if (
        isinstance(command, FetchCommand)
        and isinstance(last, FetchCommand)
        and len(last.pending_reads) + len(command.pending_reads) <= MOST_READS
    ):
        last.pending_reads.extend(command.pending_reads)
    else:
        commands.append(command)
