"""Time to first token of hand-overs, and of one engine.

A round has prompts of each share of reuse. "alone" and "prefill alone" are not cached. Then
"prefills next door": the decode engine alone while the prefill engine computes other prompts; and
"unstored next door": their KV is not stored.
"""

import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvhold_lab.bench.engines import OutputsDiffer
from kvhold_lab.bench.pd.faults import KVHOLD, NIXL, PdConditions, PdProtocol
from kvhold_lab.bench.pd.pair import PdPair
from kvhold_lab.bench.pd.requests import FOR_DECODER, TimedAnswer, post_prefill, time_answer
from kvhold_lab.bench.ratios import Cell, ratio, shared
from kvhold_lab.bench.second_host import SecondHost
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.prompts import make_prompt
from kvhold_lab.servers.proxy import ProxyProcess

ALONE, PREFILL_ALONE, LIMIT = "alone", "prefill alone", "limit"
NEXT_DOOR, UNSTORED = "prefills next door", "unstored next door"
KVHOLD_P2P = "kvhold, p2p"

_OUTPUT_TOKENS = 32
_HELD_PROMPTS = 8
_ANSWER_S = 600.0
_LEFT_ALONE = {"kvhold": {"store": False, "load": False}}
_numbers = count()


@dataclass(frozen=True)
class PdSpeedRow:
    """reuse:              share of the prompt seen before, in %
    itl_p50_s:          between tokens; null: one token only
    ratio_to_nixl:      of TTFT; null: not measured
    interval:           95 %
    ratio_to_limit:     of TTFT, to that of "prefill alone" plus one decode step
    itl_ratio_to_alone: of the time between tokens, with prefills next door; null: none
    itl_ratio_to_unstored: to the same with prefills whose KV is not stored; null: none
    later_s:            than the limit, median
    """

    system: str
    reuse: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float | None
    ratio_to_nixl: float | None = None
    interval: tuple[float, float] | None = None
    ratio_to_limit: float | None = None
    limit_interval: tuple[float, float] | None = None
    itl_ratio_to_alone: float | None = None
    itl_interval: tuple[float, float] | None = None
    itl_ratio_to_unstored: float | None = None
    unstored_interval: tuple[float, float] | None = None
    later_s: float | None = None
    requests: int = 0


@dataclass(frozen=True)
class PdSpeedWork:
    """rounds:      after one that does not count
    second_host: of the prefill engine
    """

    model: ModelInfo
    num_tokens: int
    rounds: int
    shares: Sequence[int]
    threads: int
    second_host: SecondHost | None = None


@dataclass
class PdTimes:
    """cells:  times to the first token
    steps:  medians of the times between tokens, of ALONE, NEXT_DOOR and UNSTORED
    gaps_s: between tokens, by share and system
    """

    cells: list[Cell] = field(default_factory=list)
    steps: list[Cell] = field(default_factory=list)
    gaps_s: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def add(self, reuse: int, num_tokens: int, answers: dict[str, TimedAnswer]) -> None:
        cell = Cell(reuse, num_tokens, burst=False)
        for system, answer in answers.items():
            cell.seconds[system] = answer.ttft_s
            self.gaps_s.setdefault((reuse, system), []).extend(answer.gaps_s)
        if PREFILL_ALONE in answers and ALONE in answers:
            step_s = median(answers[ALONE].gaps_s)
            cell.seconds[LIMIT] = answers[PREFILL_ALONE].ttft_s + step_s
        self.cells.append(cell)
        if NEXT_DOOR in answers:
            step = Cell(reuse, num_tokens, burst=False)
            for system in {ALONE, NEXT_DOOR, UNSTORED} & set(answers):
                step.seconds[system] = median(answers[system].gaps_s)
            self.steps.append(step)


def speed_rows(times: PdTimes) -> list[PdSpeedRow]:
    return [
        _row(times, reuse, system)
        for reuse in sorted({cell.reuse for cell in times.cells})
        for system in (KVHOLD, KVHOLD_P2P, NIXL, ALONE, PREFILL_ALONE, NEXT_DOOR, UNSTORED)
        if any(cell.reuse == reuse and system in cell.seconds for cell in times.cells)
    ]


def render(rows: Sequence[PdSpeedRow]) -> str:
    heading = (
        f"{'reuse':>5}  {'system':<18}  {'TTFT p50':>9}  {'p99':>9}  {'between tokens':>14}  "
        f"{'to alone':>21}  {'to unstored':>21}  {'to the limit':>21}  {'later':>8}  "
        f"{'to nixl':>21}"
    )
    lines = [heading]
    for row in rows:
        itl = f"{row.itl_p50_s:.4f} s" if row.itl_p50_s is not None else "-"
        later = f"{row.later_s:.3f} s" if row.later_s is not None else "-"
        lines.append(
            f"{row.reuse:>3} %  {row.system:<18}  {row.ttft_p50_s:7.3f} s  {row.ttft_p99_s:7.3f} s"
            f"  {itl:>14}  {_shown(row.itl_ratio_to_alone, row.itl_interval):>21}"
            f"  {_shown(row.itl_ratio_to_unstored, row.unstored_interval):>21}"
            f"  {_shown(row.ratio_to_limit, row.limit_interval):>21}  {later:>8}"
            f"  {_shown(row.ratio_to_nixl, row.interval):>21}"
        )
    return "\n".join(lines)


def measure(
    work: PdSpeedWork, systems: Sequence[str], times: PdTimes, say: Callable[[str], None]
) -> None:
    """Raises EngineFailed; OutputsDiffer."""
    host = work.second_host
    with tempfile.TemporaryDirectory(prefix="kvhold-pd-") as folder, ExitStack() as stack:
        asked: dict[str, _Ask] = {}
        beside: dict[str, _Ask] = {}
        pairs: dict[str, PdPair] = {}
        for system in systems:
            say(f"starting a prefill and a decode engine, {system} ...")
            pair = stack.enter_context(
                PdPair(
                    work.model,
                    Path(folder),
                    system,
                    PdConditions(two_nodes=host is not None),
                    threads=work.threads,
                    max_tokens=work.num_tokens + _OUTPUT_TOKENS,
                    held_prompts=_HELD_PROMPTS,
                    second_host=host,
                )
            )
            pairs[system] = pair
            asked[system] = _asking(stack.enter_context(_proxy(pair, "nixl")).url)
            if system == KVHOLD:
                asked[KVHOLD_P2P] = _asking(stack.enter_context(_proxy(pair, "p2p")).url)
                prefill = pair.url("prefill")
                asked[ALONE] = beside[ALONE] = _asking(pair.url("decode"), params=_LEFT_ALONE)
                asked[PREFILL_ALONE] = _asking(prefill, params=_LEFT_ALONE, max_tokens=1)
                for name, params in ((NEXT_DOOR, FOR_DECODER), (UNSTORED, _LEFT_ALONE)):
                    neighbour = partial(_prefilling, prefill, work, params)
                    beside[name] = _asking_beside(asked[ALONE], neighbour)
        _ask_in_turn(work, _undisturbed(asked, pairs), times, say)
        if beside:
            say("prefills next door")
            first_prompt = 1 + work.rounds
            _ask_in_turn(work, _undisturbed(beside, pairs), times, say, first_prompt=first_prompt)


_Ask = Callable[[list[int], str], TimedAnswer]


def _undisturbed(asked: Mapping[str, _Ask], pairs: Mapping[str, PdPair]) -> dict[str, _Ask]:
    """Other systems' engines are stopped meanwhile: idle ones, such as NIXL's, may spin."""

    def undisturbed(ask: _Ask, others: Sequence[PdPair]) -> _Ask:
        def ask_alone(prompt: list[int], salt: str) -> TimedAnswer:
            with ExitStack() as stopped:
                for pair in others:
                    stopped.enter_context(pair.paused("prefill"))
                    stopped.enter_context(pair.paused("decode"))
                return ask(prompt, salt)

        return ask_alone

    return {
        name: undisturbed(
            ask, [pair for of, pair in pairs.items() if (of == NIXL) != (name == NIXL)]
        )
        for name, ask in asked.items()
    }


def _ask_in_turn(
    work: PdSpeedWork,
    asked: dict[str, _Ask],
    times: PdTimes,
    say: Callable[[str], None],
    *,
    first_prompt: int = 0,
) -> None:
    chance = random.Random(0)
    for number in range(work.rounds + 1):
        for reuse, prompt in _prompts(work, first_prompt + number):
            answers = {
                system: asked[system](prompt, f"{system}, {reuse} %")
                for system in chance.sample(list(asked), len(asked))
            }
            _check_equal(answers, reuse)
            if number:
                times.add(reuse, work.num_tokens, answers)
        say(f"round {number} of {work.rounds}" if number else "warmed up")


def _proxy(pair: PdPair, protocol: PdProtocol) -> ProxyProcess:
    address = "?p2p=127.0.0.1:9" if protocol == "p2p" else ""
    return ProxyProcess(
        [pair.url("prefill") + address],
        [pair.url("decode")],
        KVHOLD_PROXY_PROTOCOL=protocol,
        KVHOLD_PROXY_PREFILL_TIMEOUT_S=str(_ANSWER_S),
    )


def _prompts(work: PdSpeedWork, number: int) -> Iterator[tuple[int, list[int]]]:
    for reuse in work.shares:
        prompt = make_prompt(
            work.model.path,
            work.num_tokens,
            seed=1_000 * number + reuse,
            num_shared_tokens=work.num_tokens * reuse // 100,
        )
        yield reuse, prompt


def _asking(
    url: str, *, params: dict[str, Any] | None = None, max_tokens: int = _OUTPUT_TOKENS
) -> _Ask:
    def ask(prompt: list[int], salt: str) -> TimedAnswer:
        return time_answer(
            url, prompt, salt, max_tokens=max_tokens, timeout_s=_ANSWER_S, params=params
        )

    return ask


def _asking_beside(ask: _Ask, neighbour: Callable[[], AbstractContextManager[None]]) -> _Ask:
    def ask_beside(prompt: list[int], salt: str) -> TimedAnswer:
        with neighbour():
            return ask(prompt, salt)

    return ask_beside


@contextmanager
def _prefilling(url: str, work: PdSpeedWork, params: dict[str, Any]) -> Iterator[None]:
    is_over, has_begun = threading.Event(), threading.Event()

    def prefill() -> None:
        try:
            while not is_over.is_set():
                number = next(_numbers)
                prompt = make_prompt(work.model.path, work.num_tokens, seed=1_000_000 + number)
                has_begun.set()
                post_prefill(url, prompt, NEXT_DOOR, params, timeout_s=_ANSWER_S)
        finally:
            has_begun.set()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(prefill)
        try:
            has_begun.wait()
            yield
        finally:
            is_over.set()
        running.result()


def _check_equal(answers: dict[str, TimedAnswer], reuse: int) -> None:
    right = answers[ALONE].tokens
    for system, answer in answers.items():
        if answer.tokens != right[: len(answer.tokens)]:
            raise OutputsDiffer(
                f"at {reuse} % reuse {system} answered {answer.tokens} where one engine alone "
                f"answered {right}: one of them is wrong"
            )


def _row(times: PdTimes, reuse: int, system: str) -> PdSpeedRow:
    cells = [cell for cell in times.cells if cell.reuse == reuse and system in cell.seconds]
    seconds = [cell.seconds[system] for cell in cells]
    gaps_s = times.gaps_s.get((reuse, system))
    to_nixl, nixl_interval = _ratio(cells, system, NIXL)
    to_limit, limit_interval = _ratio(cells, system, LIMIT)
    steps = [cell for cell in times.steps if cell.reuse == reuse]
    later = [cell.seconds[system] - cell.seconds[LIMIT] for cell in cells if LIMIT in cell.seconds]
    to_alone, itl_interval = _ratio(steps, system, ALONE)
    to_unstored, unstored_interval = _ratio(steps if system == NEXT_DOOR else [], system, UNSTORED)
    return PdSpeedRow(
        system,
        reuse,
        ttft_p50_s=median(seconds),
        ttft_p99_s=float(np.percentile(seconds, 99)),
        itl_p50_s=median(gaps_s) if gaps_s else None,
        ratio_to_nixl=to_nixl,
        interval=nixl_interval,
        ratio_to_limit=to_limit,
        limit_interval=limit_interval,
        itl_ratio_to_alone=to_alone,
        itl_interval=itl_interval,
        itl_ratio_to_unstored=to_unstored,
        unstored_interval=unstored_interval,
        later_s=median(later) if later else None,
        requests=len(seconds),
    )


def _ratio(
    cells: Sequence[Cell], system: str, other: str
) -> tuple[float | None, tuple[float, float] | None]:
    if system == other or not shared(cells, system, other):
        return None, None
    found = ratio(cells, system, other)
    return found.median, (found.low, found.high)


def _shown(value: float | None, interval: tuple[float, float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{value:.3f} ({interval[0]:.3f}-{interval[1]:.3f})"
