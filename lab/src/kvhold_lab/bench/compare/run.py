"""The rounds: every system gets the same prompts, in an order that changes from cell to cell.

Times are compared within a cell, so that noise falls on all. Systems without tiers are asked once
for all tiers. A system that fails, or answers differently from "recompute", is dropped.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvhold_lab.bench.compare.systems import (
    KVHOLD,
    LEFT_AGAIN,
    LEFT_ALONE,
    OUTPUT_TOKENS,
    RECOMPUTE,
    RunningSystem,
    key,
    settle,
)
from kvhold_lab.bench.compare.visits import (
    REUSE_PERCENT,
    Visit,
    VisitTexts,
    VisitWorkload,
    seconds_left,
    visits,
)
from kvhold_lab.bench.compare_engines.child import drop_pages
from kvhold_lab.bench.engines import Served
from kvhold_lab.bench.ratios import Cell
from kvhold_lab.engines.process import EngineFailed

_WITHIN = (key(KVHOLD, "ram"), LEFT_ALONE, LEFT_AGAIN)

Work = tuple[str, int]


@dataclass
class CompareMeasurement:
    """Values of the rounds. sources: tokens that the node found, by tier."""

    cells: dict[Work, list[Cell]] = field(default_factory=dict)
    sources: dict[tuple[Work, str], dict[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def measure(
    running: RunningSystem,
    texts: VisitTexts,
    workloads: Sequence[VisitWorkload],
    measured: CompareMeasurement,
    *,
    rounds: int,
    page_cache: bool,
    say: Callable[[str], None],
) -> None:
    """Do all visits, into `measured`. Raises EngineFailed if "recompute" fails.

    page_cache: leave lower tiers' files in the kernel's page cache
    """
    measured.errors = running.errors
    chance = random.Random(rounds)
    planned = [
        (workload, visit) for workload in workloads for visit in visits(workload, rounds=rounds)
    ]
    done: list[tuple[Visit, float]] = []
    for workload in workloads:
        of_workload = [visit for planned_for, visit in planned if planned_for == workload]
        for first in (True, False):
            for reuse in (100,) if first else REUSE_PERCENT:
                began, before = (
                    time.monotonic(),
                    {
                        name: running.hit_tokens(name)
                        for name in running.sockets
                        if name in running.systems
                    },
                )
                for visit in [
                    visit
                    for visit in of_workload
                    if (not visit.counts) == first and visit.reuse == reuse
                ]:
                    at = time.monotonic()
                    cell = _visit(
                        running,
                        texts.prompts(workload, visit),
                        visit,
                        chance,
                        page_cache=page_cache,
                    )
                    done.append((visit, time.monotonic() - at))
                    if visit.counts:
                        measured.cells.setdefault((workload.title, reuse), []).append(cell)
                took, left_s = (
                    time.monotonic() - began,
                    seconds_left(done, [visit for _, visit in planned[len(done) :]]),
                )
                what = "first visits" if first else f"{reuse} % reuse"
                say(f"{workload.title}, {what}: {took:.0f} s; about {left_s / 60:.0f} min left")
                if not first:
                    for name in before.keys() & running.systems.keys():
                        measured.sources[(workload.title, reuse), name] = _more(
                            running.hit_tokens(name), before[name]
                        )


def _visit(
    running: RunningSystem,
    prompts: list[list[int]],
    visit: Visit,
    chance: random.Random,
    *,
    page_cache: bool,
) -> Cell:
    if not page_cache:
        for folder in running.folders:
            drop_pages(folder)
    names = _asked(running, visit)
    served: dict[str, Served] = {}
    for name in chance.sample(names, len(names)):
        system = running.systems[name]
        try:
            if visit.within:
                system.engine.reset_prefix_cache()
            served[name] = system.serve(prompts, max_tokens=OUTPUT_TOKENS)
        except EngineFailed as error:
            if name == RECOMPUTE:
                raise
            running.drop(name, str(error))
            continue
        settle(system)
    for name, why in differing({name: one.token_ids for name, one in served.items()}).items():
        running.drop(name, why)
        del served[name]
    cell = Cell(visit.reuse, sum(len(prompt) + OUTPUT_TOKENS for prompt in prompts), visit.is_burst)
    for name, one in served.items():
        cell.seconds[name], cell.cpu_s[name], cell.cached_tokens[name] = (
            one.seconds,
            one.cpu_s,
            one.cached_tokens,
        )
    return cell


def _asked(running: RunningSystem, visit: Visit) -> list[str]:
    if visit.within:
        return [name for name in _WITHIN if name in running.systems]
    return [name for name in running.systems if name not in (LEFT_ALONE, LEFT_AGAIN)]


def differing(answers: Mapping[str, list[list[int]]]) -> dict[str, str]:
    """Return the systems whose answer differs from that of "recompute", or of the first system, and
    why.
    """
    if not answers:
        return {}
    right = RECOMPUTE if RECOMPUTE in answers else next(iter(answers))
    return {
        name: f"answered {answer} where {right} answered {answers[right]}: one of them is wrong"
        for name, answer in answers.items()
        if answer != answers[right]
    }


def _more(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    grown = {name: value - before.get(name, 0) for name, value in now.items()}
    return {name: value for name, value in grown.items() if value}
