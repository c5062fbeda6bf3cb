import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.work import COLD, WARM, Phase, Request, Session, Turn, single

Command = Literal["random", "tile", "interleave"]


@dataclass(frozen=True)
class LongDocQA:
    """Each document cold, then each warm `repeats` times.

    order: "tile": all documents, then all again; "interleave": a document's repeats together
    """

    documents: int = 8
    document_tokens: int = 20_000
    question_tokens: int = 32
    output_tokens: int = 100
    repeats: int = 2
    order: Command = "random"
    seed: int = 0
    max_in_flight: int = 20
    pause_s: float = 0.0

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        every = range(self.documents)
        rounds = {COLD: [(document, 0) for document in every], WARM: self._again()}
        for group, asked in rounds.items():
            sessions = (
                self._session(prompts, group, document, repeat) for document, repeat in asked
            )
            yield Phase(
                group,
                sessions,
                self.max_in_flight,
                len(asked),
                self.pause_s if group == WARM else 0.0,
            )

    def _again(self) -> list[tuple[int, int]]:
        documents, repeats = range(self.documents), range(1, self.repeats + 1)
        if self.order == "interleave":
            return [(document, repeat) for document in documents for repeat in repeats]
        tiled = [(document, repeat) for repeat in repeats for document in documents]
        if self.order == "random":
            random.Random(self.seed).shuffle(tiled)
        return tiled

    def _session(self, prompts: Prompts, group: str, document: int, repeat: int) -> Session:
        text = prompts.piece("document", document, self.document_tokens)
        question = prompts.piece(
            "question", document * (self.repeats + 1) + repeat, self.question_tokens
        )
        turns = (
            (Turn("system", text), Turn("user", question))
            if self.question_tokens
            else (Turn("user", text),)
        )
        return single(
            Request(
                group, turns, self.output_tokens, labels={"document": document, "repeat": repeat}
            )
        )
