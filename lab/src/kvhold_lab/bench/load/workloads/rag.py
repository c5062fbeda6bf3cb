import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.work import Phase, Reply, Request, Session, Turn
from kvhold_lab.bench.load.workloads.dataset import Example

PRECOMPUTE, QUERY = "precompute", "query"


@dataclass(frozen=True)
class Rag:
    """Documents that fit into the cache, then questions with a few each.

    storage_tokens: prefill up to so many by the server's count; 0: none
    """

    qps: float = 1.0
    poisson: bool = False
    storage_tokens: int = 0
    requests: int = 100
    documents: int = 50
    documents_per_request: int = 2
    document_tokens: int = 1_000
    system_tokens: int = 64
    question_tokens: int = 32
    output_tokens: int = 32
    examples: Sequence[Example] = ()
    score: Callable[[str, Sequence[str]], float] | None = None
    seed: int = 0

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        if self.examples and prompts.kind != "text":
            raise ConfigError("a data set is text; add --prompts text")
        if self.documents_per_request > self.documents:
            raise ConfigError(
                f"{self.documents_per_request} documents a request are more than all "
                f"{self.documents}; ask for fewer"
            )
        questions = self._from_examples(prompts) if self.examples else self._made_up(prompts)
        if self.storage_tokens:
            yield Phase(PRECOMPUTE, [self._precompute(prompts)], 1)
        total = min(self.requests, len(self.examples)) if self.examples else self.requests
        yield Phase(QUERY, questions, None, total)

    def _precompute(self, prompts: Prompts) -> Session:
        system = Turn("system", prompts.piece("system", 0, self.system_tokens))
        used = 0
        for number, document in enumerate(self._documents(prompts)):
            reply: Reply = yield Request(
                PRECOMPUTE, (system, document), 1, labels={"document": number}
            )
            if reply.error is not None:
                continue
            if reply.input_tokens is None and self.examples:
                raise ConfigError(
                    "the server does not say how long prompts are, so what fits is not "
                    "known; leave --kv-storage out"
                )
            used += (
                self.document_tokens
                if reply.input_tokens is None
                else max(0, reply.input_tokens - self.system_tokens)
            )
            if used >= self.storage_tokens:
                return

    def _documents(self, prompts: Prompts) -> Iterator[Turn]:
        if self.examples:
            texts = dict.fromkeys(
                context for example in self.examples for context in example.contexts
            )
            return (Turn("user", f"\n\n{text}") for text in texts)
        return (
            Turn("user", prompts.piece("document", number, self.document_tokens))
            for number in range(self.documents)
        )

    def _made_up(self, prompts: Prompts) -> Iterator[Session]:
        chance = random.Random(self.seed)
        for number, at_s in zip(range(self.requests), self._arrivals(), strict=False):
            documents = chance.sample(range(self.documents), self.documents_per_request)
            turns = [Turn("system", prompts.piece("system", 0, self.system_tokens))]
            turns += [
                Turn("user", prompts.piece("document", document, self.document_tokens))
                for document in documents
            ]
            turns.append(Turn("user", prompts.piece("question", number, self.question_tokens)))
            yield self._query(number, at_s, turns, None)

    def _from_examples(self, prompts: Prompts) -> Iterator[Session]:
        for number, (example, at_s) in enumerate(
            zip(self.examples[: self.requests], self._arrivals(), strict=False)
        ):
            turns = [Turn("system", prompts.piece("system", 0, self.system_tokens))]
            turns += [Turn("user", f"\n\n{context}") for context in example.contexts]
            turns.append(
                Turn(
                    "user",
                    "\n\nAnswer from the texts above, in a few words.\nQuestion: "
                    f"{example.question}\nAnswer:",
                )
            )
            yield self._query(number, at_s, turns, self._scoring(example))

    def _query(
        self, number: int, at_s: float, turns: list[Turn], score: Callable[[str], float] | None
    ) -> Session:
        yield Request(
            QUERY,
            tuple(turns),
            self.output_tokens,
            at_s=at_s,
            labels={"request": number},
            score=score,
        )

    def _scoring(self, example: Example) -> Callable[[str], float] | None:
        score = self.score
        return None if score is None else lambda answer: score(answer, example.answers)

    def _arrivals(self) -> Iterator[float]:
        chance, at_s = random.Random(f"arrivals {self.seed}"), 0.0
        while True:
            yield at_s
            at_s += chance.expovariate(self.qps) if self.poisson else 1 / self.qps
