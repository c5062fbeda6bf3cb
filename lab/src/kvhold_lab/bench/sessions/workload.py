"""Agents at a 1/48 scale: 43 turns to some 3,000 tokens, with subagents.

Outputs are reasoning and an answer; a new message leaves out earlier reasoning. A subagent begins
with its parent's prompt.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SYSTEM, MESSAGE, RESULT, REASONING, ANSWER = 416, 24, 60, 8, 6  # tokens
OUTPUT = REASONING + ANSWER
VOCAB = 200
_LOOP = 8
_SUB_EVERY, _SUB_TURNS = 8, 8
_WITH_SUBAGENTS = 0.44
_ACTS = 0.75

Tokens = list[int]


@dataclass
class _Piece:
    tokens: Tokens
    loop: int | None = None


@dataclass(frozen=True)
class AgentTurn:
    """possible: the prompt's first tokens that an earlier request of the agent, or of its parent,
    had as prompt or output
    """

    name: str
    session: str
    prompt: Tokens
    possible: int
    is_last: bool


@dataclass
class SimulatedAgent:
    name: str
    turns: int
    rng: random.Random
    pieces: list[_Piece]
    has_subagents: bool = False
    done: int = 0
    loop: int = 0
    seen: list[npt.NDArray[np.int16]] = field(default_factory=list)
    subagent: "SimulatedAgent | None" = None

    @property
    def is_over(self) -> bool:
        return self.done == self.turns

    def next_turn(self) -> AgentTurn:
        prompt = self.prompt()
        possible = min(len(prompt) - 1, max([_shared(one, prompt) for one in self.seen], default=0))
        return AgentTurn(
            f"{self.name}-{self.done}", self.name, prompt, possible, self.done == self.turns - 1
        )

    def prompt(self) -> Tokens:
        return [
            token
            for piece in self.pieces
            if piece.loop in (None, self.loop)
            for token in piece.tokens
        ]

    def answered(self, turn: AgentTurn, output: Tokens) -> None:
        # the last token has no KV
        self.seen.append(np.array(turn.prompt + output[:-1], np.int16))
        self.done += 1
        self.pieces += [
            _Piece(output[:REASONING], self.loop),
            _Piece(output[REASONING:]),
        ]
        if self.done % _LOOP == 0:
            self.loop += 1
            self.pieces.append(_Piece(_text(self.rng, MESSAGE)))
        elif self.has_subagents and self.done % _SUB_EVERY == _SUB_EVERY // 2 and not self.is_over:
            self.subagent = self._fork()
        else:
            self.pieces.append(_Piece(_text(self.rng, RESULT)))

    def end_subagent(self) -> None:
        self.subagent = None
        self.pieces.append(_Piece(_text(self.rng, RESULT)))

    def _fork(self) -> "SimulatedAgent":
        return SimulatedAgent(
            f"{self.name}.{self.done}",
            _SUB_TURNS,
            self.rng,
            [*self.pieces, _Piece(_text(self.rng, MESSAGE))],
            loop=self.loop,
            seen=list(self.seen),
        )


class Agents:
    """They act in rounds, each by chance; a parent waits for its subagent."""

    def __init__(self, count: int, turns: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        system = _text(self._rng, SYSTEM)
        self._agents = [
            SimulatedAgent(
                f"agent-{number}",
                turns,
                random.Random(f"{seed} {number}"),
                [_Piece(system), _Piece(_text(self._rng, MESSAGE))],
                has_subagents=round((number + 1) * _WITH_SUBAGENTS)
                > round(number * _WITH_SUBAGENTS),
            )
            for number in range(count)
        ]

    @property
    def are_over(self) -> bool:
        return all(agent.is_over for agent in self._agents)

    def acting(self) -> list[tuple[SimulatedAgent, AgentTurn]]:
        chosen = []
        for agent in self._agents:
            acts = self._rng.random() < _ACTS
            if agent.subagent is not None and agent.subagent.is_over:
                agent.end_subagent()
            if not agent.is_over and acts:
                actor = agent.subagent or agent
                chosen.append((actor, actor.next_turn()))
        return chosen


def _shared(seen: npt.NDArray[np.int16], prompt: Tokens) -> int:
    length = min(len(seen), len(prompt))
    differ = np.flatnonzero(seen[:length] != np.array(prompt[:length], np.int16))
    return int(differ[0]) if differ.size else length


def _text(rng: random.Random, length: int) -> Tokens:
    return [rng.randrange(VOCAB) for _ in range(length)]
