"""Prompts, from JSON lines or made here.

{"documents": ["...", "..."], "question": "...", "answers": ["..."], "before": "..."}

Texts or token ids: `before`, documents, question, with nothing between.
"""

import string
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold_lab.bench.blend.arms import f1
from kvhold_lab.retrieval.language import (
    NUM_DOCUMENTS,
    QUESTION_TOKENS,
    VOCAB_SIZE,
    Shape,
    draw,
)
from kvhold_lab.verify.blend.stories import stories

_Text = str | list[int]
_SEED = 2_000_003
_PUNCTUATION = str.maketrans(string.punctuation, " " * len(string.punctuation))


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    documents: list[_Text]
    question: _Text
    answers: list[_Text] = []
    before: _Text = ""


@dataclass(frozen=True)
class BlendQuestion:
    """Token ids; answers are words if `is_text`."""

    before: list[int]
    documents: list[list[int]]
    question: list[int]
    answers: list[list[Any]]
    is_text: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.before, *(token for part in self.documents for token in part), *self.question]


@dataclass(frozen=True)
class Score:
    f1: float
    is_exact: bool


class Speech:
    """A tokenizer, or only token ids."""

    def __init__(self, tokenizer: Any, config: Any, ends: Sequence[int], *, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.vocabulary = int(config.vocab_size)
        self._ends = frozenset(ends)
        longest = getattr(config, "max_position_embeddings", None)
        self.longest = int(longest) if longest else None

    def read(self, line: _Line, where: str) -> BlendQuestion:
        """Raises ConfigError."""
        if not line.documents:
            raise ConfigError(f"{where}: documents is empty; give one or more")
        documents = [
            self._ids(part, f"{where}: documents[{number}]", least=2)
            for number, part in enumerate(line.documents)
        ]
        question = self._ids(line.question, f"{where}: question", least=1)
        before = [*self._begin(line), *self._ids(line.before, f"{where}: before", least=0)]
        kinds = {isinstance(part, str) for part in line.answers}
        if len(kinds) > 1 or (kinds == {True} and self.tokenizer is None):
            raise ConfigError(f"{where}: answers must be token ids, or all be texts of a tokenizer")
        answers = [words_of(part) if isinstance(part, str) else part for part in line.answers]
        found = BlendQuestion(before, documents, question, answers, is_text=kinds == {True})
        count = len(found.tokens) + self.limit
        if self.longest is not None and count > self.longest:
            raise ConfigError(
                f"{where}: with its answer, the prompt has {count} tokens; the model takes "
                f"{self.longest}"
            )
        return found

    def ends(self, question: BlendQuestion) -> Any:
        """Texts end with a line."""

        def ends(tokens: list[int]) -> bool:
            if tokens[-1] in self._ends:
                return True
            return question.is_text and "\n" in self._text(tokens).lstrip()

        return ends

    def score(self, found: list[int], question: BlendQuestion, full: list[int]) -> Score:
        """By the best answer; without answers, by `full`."""
        said: Sequence[Hashable] = found
        answers: list[list[Any]] = question.answers or [full]
        if question.is_text:
            said = words_of(self._text(found).strip())
        return Score(
            max(f1(said, answer) for answer in answers),
            any(list(said) == answer for answer in answers),
        )

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _begin(self, line: _Line) -> list[int]:
        if self.tokenizer is None or not isinstance(line.before, str):
            return []
        first = self.tokenizer.bos_token_id
        return [first] if first is not None and self.tokenizer("a").input_ids[0] == first else []

    def _ids(self, text: _Text, where: str, *, least: int) -> list[int]:
        if isinstance(text, str):
            if self.tokenizer is None:
                if not text and not least:
                    return []
                raise ConfigError(
                    f"{where} is text, and the model has no tokenizer; give token ids"
                )
            ids = [int(token) for token in self.tokenizer(text, add_special_tokens=False).input_ids]
        else:
            ids = text
        if len(ids) < least:
            raise ConfigError(f"{where} has {len(ids)} tokens; it needs {least} or more")
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise ConfigError(
                    f"{where}: token {token} is not in the model's vocabulary of {self.vocabulary}"
                )
        return ids


def words_of(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION).split()


def read_questions(path: Path, speech: Speech, most: int | None) -> list[BlendQuestion]:
    """Raises ConfigError with line and field."""
    return [speech.read(line, where) for line, where in islice(_lines(path), most)] or _none_in(
        path
    )


def made_questions(
    speech: Speech, count: int, *, num_tokens: int
) -> tuple[str, list[BlendQuestion]]:
    """The set's name, and prompts; `num_tokens` of the retrieval language. Raises ConfigError."""
    rng = np.random.default_rng(_SEED)
    if speech.tokenizer is not None:
        lines = (_Line(**story) for story in islice(stories(rng), count))
        return "kvhold's texts", [speech.read(line, "kvhold's texts") for line in lines]
    if speech.vocabulary != VOCAB_SIZE:
        raise ConfigError("the model has no tokenizer; give --data FILE with token ids")
    shape = Shape.of((num_tokens - QUESTION_TOKENS) // NUM_DOCUMENTS)
    questions = []
    for _ in range(count):
        exercise = draw(rng, shape, 1)
        asked = exercise.questions[0].tolist()
        questions.append(
            BlendQuestion(
                [],
                exercise.documents.tolist(),
                asked[:QUESTION_TOKENS],
                [asked[QUESTION_TOKENS:-1]],
            )
        )
    return "kvhold's retrieval language", questions


def _lines(path: Path) -> Iterator[tuple[_Line, str]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}, line {number}"
                if not raw.strip():
                    continue
                try:
                    yield msgspec.json.decode(raw, type=_Line), where
                except UNDECODABLE as error:
                    raise ConfigError(f"{where}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--data {path}: {error.strerror}") from None


def _none_in(path: Path) -> list[BlendQuestion]:
    raise ConfigError(f"--data {path} has no lines")
