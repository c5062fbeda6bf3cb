"""Requests, with the answers of one engine alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvhold_lab.bench.pd.requests import PdRequest, answer_alone
from kvhold_lab.bench.soak.texts import Texts, TextShape
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import VOCAB_SIZE

LeaveStage = Literal["queued", "prefill", "between", "decode"]
LEAVE_STAGES: tuple[LeaveStage, ...] = ("queued", "prefill", "between", "decode")

LONGEST_PROMPT, LONGEST_ANSWER = 1_000, 16
BLOCK_TOKENS, CHUNK_TOKENS = 32, 64
ASKED_AT_ONCE = 8
_LEAVE_SHARE = 0.3
_SHARED_SALTS = ("a", "b")
_SHARED = 0.5


@dataclass(frozen=True)
class HandoverRequest(PdRequest):
    """leaves:      at this stage
    leave_share: of the stage
    """

    salt: str = ""
    leaves: LeaveStage | None = None
    leave_share: float = 0.0

    @property
    def leave_after(self) -> int:
        """Tokens; 0: never."""
        if self.leaves != "decode":
            return 0
        return 1 + int(self.leave_share * (len(self.expected) - 1))


class HandoverRequests:
    def __init__(self, server: OpenAIServer, seed: int) -> None:
        self._server = server
        self._chance = random.Random(seed)
        shape = TextShape(BLOCK_TOKENS, CHUNK_TOKENS, LONGEST_PROMPT)
        self._texts = Texts(self._chance, range(1, VOCAB_SIZE), shape)
        self._made = 0

    def draw(self, count: int) -> Iterator[HandoverRequest]:
        """Raises EngineFailed."""
        ask = partial(answer_alone, self._server, max_tokens=LONGEST_ANSWER)
        until = self._made + count
        with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
            while self._made < until:
                num = min(ASKED_AT_ONCE, until - self._made)
                prompts = [self._texts.prompt() for _ in range(num)]
                for prompt, (tokens, num_sure) in zip(
                    prompts, list(threads.map(ask, prompts)), strict=True
                ):
                    if not num_sure:
                        continue
                    self._texts.answered(prompt, tokens[:num_sure])
                    yield self._request(prompt, tokens[:num_sure])

    def _request(self, prompt: list[int], sure: list[int]) -> HandoverRequest:
        chance, number = self._chance, self._made
        self._made += 1
        most = chance.choice((1, 2, chance.randint(3, LONGEST_ANSWER), LONGEST_ANSWER))
        leaves = chance.choice(LEAVE_STAGES) if chance.random() < _LEAVE_SHARE else None
        salt = chance.choice(_SHARED_SALTS) if chance.random() < _SHARED else f"{number}"
        return HandoverRequest(
            number, prompt, sure[:most], salt, leaves, leave_share=chance.random()
        )
