"""Generates traces. Two blocks are equal if all text up to their ends is equal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from kvhold_lab.simulate.requests import BLOCK_TOKENS, TimedRequest

_Piece = tuple[int, int]


@dataclass(frozen=True)
class _Turn:
    at_s: float
    prompt: tuple[_Piece, ...]
    answer: _Piece


@dataclass
class _Texts:
    chance: np.random.Generator
    numbers: Iterator[int] = field(default_factory=count)

    def piece(self, median: float, sigma: float = 0.8, most: int = 100_000) -> _Piece:
        return next(self.numbers), int(np.clip(self.around(median, sigma), 16, most))

    def around(self, median: float, sigma: float) -> float:
        return float(median * np.exp(sigma * self.chance.standard_normal()))

    def some_of(self, pieces: list[_Piece], num: int) -> list[_Piece]:
        return [pieces[i] for i in self.chance.integers(len(pieces), size=num)]

    def turns(self, mean: float) -> int:
        return int(self.chance.geometric(1.0 / mean))


_Traffic = Callable[[_Texts, float], Iterator[Iterator[_Turn]]]


def generate(name: str, *, seed: int = 1, minutes: float = 60.0) -> Iterator[TimedRequest]:
    """Yield requests in order of time. Raises KeyError."""
    texts, end_s = _Texts(np.random.default_rng(seed)), minutes * 60.0
    blocks = _Blocks()
    for turn in _by_time(GENERATORS[name](texts, end_s)):
        if turn.at_s >= end_s:
            return
        num_tokens = sum(tokens for _, tokens in turn.prompt)
        yield TimedRequest(
            input_length=num_tokens,
            hash_ids=blocks.ids(turn.prompt),
            timestamp=round(turn.at_s * 1000.0),
            output_length=turn.answer[1],
        )


def _multi_turn(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    systems = [texts.piece(1500) for _ in range(4)]
    for at_s in _arrivals(texts, end_s, a_second=1.0):
        system = systems[int(texts.chance.choice(4, p=(0.5, 0.25, 0.15, 0.1)))]
        yield _chat(texts, at_s, (system, texts.piece(1200, 1.2)), 4.0, think_s=60.0)


def _documents(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    system = texts.piece(800)
    documents = [texts.piece(8000, 0.9) for _ in range(3000)]
    popularity = _zipf(len(documents), 0.9)
    for at_s in _arrivals(texts, end_s, a_second=1.0):
        document = documents[int(texts.chance.choice(len(documents), p=popularity))]
        yield _chat(texts, at_s, (system, document, texts.piece(100)), 2.5, think_s=90.0)


def _agents(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    systems = [texts.piece(6000, 0.3) for _ in range(3)]
    helpers = [texts.piece(3000, 0.3) for _ in range(4)]
    for at_s in _arrivals(texts, end_s, a_second=0.05):
        system = systems[int(texts.chance.integers(3))]
        yield _agent(texts, at_s, (system, texts.piece(2000)), helpers)


def _shifting(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    prompts = [texts.piece(6000, 0.7) for _ in range(4000)]
    popularity = _zipf(len(prompts), 1.0)
    every_s, order, shifted_s = 600.0, np.arange(len(prompts)), 0.0
    for at_s in _arrivals(texts, end_s, a_second=4.0):
        if at_s >= shifted_s + every_s:
            shifted_s += every_s
            order = texts.chance.permutation(order)
        if texts.chance.random() < 1 / 3:
            prompt = texts.piece(6000, 0.7)
        else:
            prompt = prompts[order[int(texts.chance.choice(len(prompts), p=popularity))]]
        yield _asked(texts, at_s, prompt)


def _scan(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    prompts = [texts.piece(6000, 0.7) for _ in range(300)]
    popularity, every_s, scanned_s = _zipf(len(prompts), 0.9), 300.0, 0.0
    for at_s in _arrivals(texts, end_s, a_second=1.0):
        if at_s >= scanned_s + every_s:
            scanned_s += every_s
            for _ in range(500):
                yield _asked(texts, at_s, texts.piece(6000, 0.7))
        yield _asked(texts, at_s, prompts[int(texts.chance.choice(len(prompts), p=popularity))])


def _loop(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    prompts = [(next(texts.numbers), 16 * BLOCK_TOKENS) for _ in range(68)]
    for number, at_s in enumerate(_arrivals(texts, end_s, a_second=1.0)):
        yield iter([_Turn(at_s, (prompts[number % len(prompts)],), texts.piece(200))])


def _turnover(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    before, after = ([texts.piece(6000, 0.7) for _ in range(1000)] for _ in range(2))
    popularity = _zipf(len(before), 1.0)
    for at_s in _arrivals(texts, end_s, a_second=2.0):
        prompts = before if at_s < end_s / 2 else after
        yield _asked(texts, at_s, prompts[int(texts.chance.choice(len(prompts), p=popularity))])


def _new(texts: _Texts, end_s: float) -> Iterator[Iterator[_Turn]]:
    for at_s in _arrivals(texts, end_s, a_second=1.0):
        yield _asked(texts, at_s, texts.piece(6000, 0.7))


GENERATORS: dict[str, _Traffic] = {
    "multi-turn": _multi_turn,
    "documents": _documents,
    "agents": _agents,
    "shifting": _shifting,
    "scan": _scan,
    "loop": _loop,
    "turnover": _turnover,
    "new": _new,
}


def _asked(texts: _Texts, at_s: float, prompt: _Piece) -> Iterator[_Turn]:
    return iter([_Turn(at_s, (prompt, texts.piece(100)), texts.piece(200))])


def _chat(
    texts: _Texts, at_s: float, prompt: tuple[_Piece, ...], mean: float, *, think_s: float
) -> Iterator[_Turn]:
    for _ in range(texts.turns(mean)):
        answer = texts.piece(300)
        yield _Turn(at_s, prompt, answer)
        prompt = (*prompt, answer, texts.piece(150, 1.0))
        at_s += answer[1] * 0.02 + texts.around(think_s, 1.0)


def _agent(
    texts: _Texts, at_s: float, prompt: tuple[_Piece, ...], helpers: list[_Piece]
) -> Iterator[_Turn]:
    for task in range(texts.turns(1.5)):
        if task:
            at_s += texts.around(600.0, 0.7)
            prompt = (*prompt, texts.piece(300))
        for _ in range(texts.turns(15.0)):
            answer = texts.piece(200)
            yield _Turn(at_s, prompt, answer)
            at_s += answer[1] * 0.02
            if texts.chance.random() < 0.12:
                subagents = [
                    list(_steps(texts, at_s, (helper, texts.piece(500)), 6.0))
                    for helper in texts.some_of(helpers, 1 + texts.turns(1.5))
                ]
                yield from _by_time(map(iter, subagents))
                at_s = max(turns[-1].at_s for turns in subagents) + 3.0
                prompt = (*prompt, answer, texts.piece(800))
            else:
                at_s += texts.around(5.0, 1.2)
                prompt = (*prompt, answer, texts.piece(700, 1.0))


def _steps(texts: _Texts, at_s: float, prompt: tuple[_Piece, ...], mean: float) -> Iterator[_Turn]:
    for _ in range(texts.turns(mean)):
        answer = texts.piece(200)
        yield _Turn(at_s, prompt, answer)
        at_s += answer[1] * 0.02 + texts.around(5.0, 1.2)
        prompt = (*prompt, answer, texts.piece(700, 1.0))


def _arrivals(texts: _Texts, end_s: float, *, a_second: float) -> Iterator[float]:
    at_s = 0.0
    while (at_s := at_s + texts.chance.exponential(1.0 / a_second)) < end_s:
        yield at_s


def _zipf(num: int, exponent: float) -> npt.NDArray[np.float64]:
    weights = np.array([rank**-exponent for rank in range(1, num + 1)])
    return weights / float(weights.sum())


def _by_time(sources: Iterator[Iterator[_Turn]]) -> Iterator[_Turn]:
    waiting: list[tuple[float, int, _Turn, Iterator[_Turn]]] = []
    numbers, coming = count(), next(((turn, s) for s in sources if (turn := next(s, None))), None)
    while waiting or coming:
        while coming and (not waiting or coming[0].at_s <= waiting[0][0]):
            heappush(waiting, (coming[0].at_s, next(numbers), *coming))
            coming = next(((turn, s) for s in sources if (turn := next(s, None))), None)
        _, _, turn, source = heappop(waiting)
        yield turn
        if (later := next(source, None)) is not None:
            heappush(waiting, (later.at_s, next(numbers), later, source))


class _Blocks:
    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[_Piece, ...]], int] = {}

    def ids(self, prompt: tuple[_Piece, ...]) -> list[int]:
        ids: list[int] = []
        before, inside, room = -1, list[_Piece](), BLOCK_TOKENS
        for number, tokens in prompt:
            begin = 0
            while tokens - begin >= room:
                begin += room
                inside.append((number, begin))
                before = self._ids.setdefault((before, tuple(inside)), len(self._ids))
                ids.append(before)
                inside, room = [], BLOCK_TOKENS
            if tokens > begin:
                inside.append((number, tokens))
                room -= tokens - begin
        if inside:
            ids.append(self._ids.setdefault((before, tuple(inside)), len(self._ids)))
        return ids
