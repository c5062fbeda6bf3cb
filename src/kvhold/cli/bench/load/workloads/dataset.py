"""Data sets of questions with documents and right answers: a JSON list of `{"question": ..., "ctxs": [...], "answers": [...]}`.

A context is a text, or an object with `text` and perhaps a `title`, as data sets for retrieval have them. And how an answer is scored.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvhold.core.errors import ConfigError

_LARGEST_BYTES = 1 << 30


class _Context(msgspec.Struct, frozen=True):
    text: str
    title: str = ""


class _Entry(msgspec.Struct, frozen=True):
    question: str
    ctxs: list[str | _Context]
    answers: list[str] = []


class Example(msgspec.Struct, frozen=True):
    """A question, the documents found for it, and its right answers (perhaps none)."""

    question: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]


def read_dataset(path: Path) -> list[Example]:
    """All examples of a file of at most 1 GiB. Raises ConfigError that says what is wrong with it, and where."""
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ConfigError(f"{path}: larger than {_LARGEST_BYTES >> 30} GiB; cut the data set")
        entries = msgspec.json.decode(path.read_bytes(), type=list[_Entry])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a data set's file") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f'{path}: {error}; it must be a JSON list of {{"question": ..., "ctxs": [...], "answers": [...]}}') from None
    if not entries:
        raise ConfigError(f"{path}: there is no question in it")
    return [Example(entry.question, tuple(map(_text, entry.ctxs)), tuple(entry.answers)) for entry in entries]


def f1(answer: str, answers: Sequence[str]) -> float:
    """The best F1 of words between an answer and a right one, 0 to 1: of question answering (SQuAD; Rajpurkar et al., 2016)."""
    return _best(lambda own, right: sum((Counter(own) & Counter(right)).values()), answer, answers)


def rouge_l(answer: str, answers: Sequence[str]) -> float:
    """The best F-measure of the longest common subsequence of words, 0 to 1: of summaries (ROUGE-L; Lin, 2004)."""
    return _best(_longest_common, answer, answers)


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {"f1": f1, "rouge-l": rouge_l}


def _best(shared: Callable[[list[str], list[str]], int], answer: str, answers: Sequence[str]) -> float:
    own = _words(answer)
    rights = [_words(right) for right in answers]
    return max((2 * shared(own, right) / max(1, len(own) + len(right)) for right in rights), default=0.0)


def _longest_common(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        above = row
        row = [0]
        for place, match in enumerate(other):
            row.append(above[place] + 1 if word == match else max(row[place], above[place + 1]))
    return row[-1]


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _text(context: "str | _Context") -> str:
    if isinstance(context, str):
        return context
    return f"{context.title}\n{context.text}" if context.title else context.text
