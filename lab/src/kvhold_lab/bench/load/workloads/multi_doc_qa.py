import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import Content, Prompts
from kvhold_lab.bench.load.work import COLD, WARM, Phase, Request, Session, Turn, single

Sampling = Literal["random", "zipf"]


@dataclass(frozen=True)
class MultiDocQA:
    """Single documents cold, then several random ones in a prompt, warm.

    sampling: without repeats; "zipf": the n-th has weight 1 / n
    separator: around documents; text or token ids
    """

    separator: Content
    documents: int = 100
    documents_per_request: int = 5
    requests: int = 100
    document_tokens: int = 1_000
    system_tokens: int = 64
    question_tokens: int = 32
    output_tokens: int = 10
    sampling: Sampling = "random"
    seed: int = 0
    max_in_flight: int = 20
    pause_s: float = 0.0

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        if self.documents_per_request > self.documents:
            raise ConfigError(
                f"{self.documents_per_request} documents a request are more than all "
                f"{self.documents}; ask for fewer"
            )
        alone = (self._session(prompts, COLD, number, [number]) for number in range(self.documents))
        yield Phase(COLD, alone, self.max_in_flight, self.documents)
        chance = random.Random(self.seed)
        drawn = (
            self._session(prompts, WARM, self.documents + number, self._draw(chance))
            for number in range(self.requests)
        )
        yield Phase(WARM, drawn, self.max_in_flight, self.requests, self.pause_s)

    def _draw(self, chance: random.Random) -> list[int]:
        if self.sampling == "random":
            return chance.sample(range(self.documents), self.documents_per_request)
        # Efraimidis and Spirakis, 2006.
        keys = {number: chance.random() ** (number + 1) for number in range(self.documents)}
        return sorted(keys, key=keys.__getitem__, reverse=True)[: self.documents_per_request]

    def _session(self, prompts: Prompts, group: str, number: int, documents: list[int]) -> Session:
        turns = [
            Turn("system", prompts.piece("system", 0, self.system_tokens)),
            Turn("user", self.separator),
        ]
        for document in documents:
            turns += [
                Turn("user", prompts.piece("document", document, self.document_tokens)),
                Turn("user", self.separator),
            ]
        turns.append(Turn("user", prompts.piece("question", number, self.question_tokens)))
        labels = {"documents": " ".join(map(str, documents))}
        return single(Request(group, tuple(turns), self.output_tokens, labels=labels))
