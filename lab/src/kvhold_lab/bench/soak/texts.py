import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 8
_NEW, _AGAIN, _GO_ON, _BRANCH = "new", "again", "go on", "branch"
_KINDS, _OF_TEN = (_NEW, _AGAIN, _GO_ON, _BRANCH), (2, 2, 2, 4)


@dataclass(frozen=True)
class TextShape:
    block: int
    chunk: int
    limit: int


class Texts:
    def __init__(self, chance: random.Random, vocabulary: Sequence[int], shape: TextShape) -> None:
        self._chance = chance
        self._vocabulary = vocabulary
        self._shape = shape
        self._prompts: deque[list[int]] = deque(maxlen=_REMEMBERED)
        self._answered: deque[list[int]] = deque(maxlen=_REMEMBERED)

    def prompt(self) -> list[int]:
        kind = self._chance.choices(_KINDS, _OF_TEN)[0]
        if kind == _AGAIN and self._prompts:
            return self._chance.choice(self._prompts)
        begun: list[int] = []
        if kind == _GO_ON and self._answered:
            begun = self._chance.choice(self._answered)
        if kind == _BRANCH and self._prompts:
            trunk = self._chance.choice(self._prompts)
            begun = trunk[: self._length(len(trunk))]
        begun = begun[: self._shape.limit - 1]
        prompt = begun + self._words(self._length(self._shape.limit - len(begun)))
        self._prompts.append(prompt)
        return prompt

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        self._answered.append(prompt + answer)

    def _words(self, count: int) -> list[int]:
        return self._chance.choices(self._vocabulary, k=count)

    def _length(self, most: int) -> int:
        edge = self._chance.choice((self._shape.block, self._shape.chunk))
        if most < edge or self._chance.random() < 0.5:
            return self._chance.randint(1, most)
        return min(
            most, self._chance.randint(1, most // edge) * edge + self._chance.choice((-1, 0, 0, 1))
        )


class DocumentTexts(Texts):
    """Most prompts are documents in any order, and a question. spans: by their tokens"""

    def __init__(self, chance: random.Random, vocabulary: Sequence[int], shape: TextShape) -> None:
        super().__init__(chance, vocabulary, shape)
        self._documents = [self._words(shape.block + self._length(96)) for _ in range(8)]
        self.spans: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def prompt(self) -> list[int]:
        kind = self._chance.random()
        if kind < 0.2:
            return super().prompt()
        if kind < 0.5 and self._prompts:
            return self._chance.choice(self._prompts)
        prompt: list[int] = []
        spans = []
        for document in self._chance.sample(self._documents, 3):
            start = len(prompt)
            prompt += document[: self._shape.limit - 20 - start]
            if start < len(prompt):
                spans.append((start, len(prompt)))
        prompt += self._words(self._chance.randint(1, 20))
        self.spans[tuple(prompt)] = spans
        self._prompts.append(prompt)
        return prompt
