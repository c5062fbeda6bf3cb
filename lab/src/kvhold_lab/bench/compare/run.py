"""Every system gets the same prompts, in a changing order.

A system that fails or answers differently is dropped, or ends a strict run.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvhold_lab.bench.compare.names import COPIES, LIMIT, RECOMPUTE
from kvhold_lab.bench.compare.systems import RunningSystem, settle
from kvhold_lab.bench.compare.visits import ComparePlan, Visit, VisitTexts, seconds_left
from kvhold_lab.bench.compare_engines.child import drop_pages
from kvhold_lab.bench.engines import OutputsDiffer, Served
from kvhold_lab.bench.ratios import Cell
from kvhold_lab.engines.process import EngineFailed

Work = tuple[str, int]  # workload, reuse in %


@dataclass
class CompareMeasurement:
    cells: dict[Work, list[Cell]] = field(default_factory=dict)
    sources: dict[tuple[Work, str], dict[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def measure(
    running: RunningSystem,
    texts: VisitTexts,
    plan: ComparePlan,
    measured: CompareMeasurement,
    *,
    say: Callable[[str], None],
) -> None:
    measured.errors = running.errors
    chance = random.Random(len(plan.stages))
    planned = [visit for stage in plan.stages for visit in stage.visits]
    done: list[tuple[Visit, float]] = []
    for stage in plan.stages:
        began = time.monotonic()
        before = {
            name: running.hit_tokens(name) for name in running.sockets if name in running.systems
        }
        for visit in stage.visits:
            at = time.monotonic()
            cell = _visit(running, texts.prompts(stage.workload, visit), visit, chance, plan)
            done.append((visit, time.monotonic() - at))
            if visit.counts:
                measured.cells.setdefault((stage.workload, visit.reuse), []).append(cell)
        left_s = seconds_left(done, planned[len(done) :])
        say(
            f"{stage.workload}, {stage.what}: {time.monotonic() - began:.0f} s; "
            f"about {left_s / 60:.0f} min left"
        )
        for reuse in {visit.reuse for visit in stage.visits if visit.counts}:
            for name in before.keys() & running.systems.keys():
                found = measured.sources.setdefault(((stage.workload, reuse), name), {})
                for source, tokens in running.hit_tokens(name).items():
                    if more := tokens - before[name].get(source, 0):
                        found[source] = found.get(source, 0) + more


def _visit(
    running: RunningSystem,
    prompts: list[list[int]],
    visit: Visit,
    chance: random.Random,
    plan: ComparePlan,
) -> Cell:
    if not plan.page_cache:
        for folder in running.folders:
            drop_pages(folder)
    names = _systems_of(running, visit)
    served: dict[str, Served] = {}
    for name in chance.sample(names, len(names)):
        system = running.systems[name]
        try:
            if visit.forgets and name != LIMIT:
                system.engine.reset_prefix_cache()
            served[name] = system.serve(prompts, max_tokens=plan.output_tokens)
        except EngineFailed as error:
            if plan.strict or name == RECOMPUTE:
                raise
            running.drop(name, str(error))
            continue
        if plan.settles:
            settle(system)
    for name, why in differing({name: one.token_ids for name, one in served.items()}).items():
        if plan.strict:
            raise OutputsDiffer(f"at {visit.reuse} % reuse {name} {why}")
        running.drop(name, why)
        del served[name]
    num_tokens = sum(len(prompt) + plan.output_tokens for prompt in prompts)
    cell = Cell(visit.reuse, num_tokens, visit.is_burst)
    for name, one in served.items():
        cell.seconds[name], cell.cpu_s[name], cell.cached_tokens[name] = (
            one.seconds,
            one.cpu_s,
            one.cached_tokens,
        )
    return cell


def _systems_of(running: RunningSystem, visit: Visit) -> list[str]:
    if visit.asked:
        return [name for name in visit.asked if name in running.systems]
    return [name for name in running.systems if name not in COPIES]


def differing(answers: Mapping[str, list[list[int]]]) -> dict[str, str]:
    if not answers:
        return {}
    right = RECOMPUTE if RECOMPUTE in answers else next(iter(answers))
    return {
        name: f"answered {answer} where {right} answered {answers[right]}: one of them is wrong"
        for name, answer in answers.items()
        if answer != answers[right]
    }
