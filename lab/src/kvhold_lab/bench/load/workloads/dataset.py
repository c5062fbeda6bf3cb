"""Data sets as JSON lists, and scores of answers.

{"question": ..., "ctxs": [...], "answers": [...]}  # contexts: texts or {"text", "title"}
{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}  # ShareGPT
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvhold.core.errors import UNDECODABLE, ConfigError

_LARGEST_BYTES = 1 << 30
_USERS, _MODELS = ("human", "user"), ("gpt", "chatgpt", "assistant")

_Entries = TypeVar("_Entries")


class _Context(msgspec.Struct, frozen=True):
    text: str
    title: str = ""


class _Entry(msgspec.Struct, frozen=True):
    question: str
    ctxs: list[str | _Context]
    answers: list[str] = []


class Example(msgspec.Struct, frozen=True):
    question: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]


class _Message(msgspec.Struct, frozen=True, rename={"speaker": "from"}):
    speaker: str
    value: str


class _Recorded(msgspec.Struct, frozen=True):
    conversations: list[_Message]


class ChatExchange(msgspec.Struct, frozen=True):
    question: str
    answer: str


def read_dataset(path: Path) -> list[Example]:
    """Read at most 1 GiB. Raises ConfigError."""
    entries = _read(path, list[_Entry], '{"question": ..., "ctxs": [...], "answers": [...]}')
    if not entries:
        raise ConfigError(f"{path}: there is no question in it")
    return [
        Example(entry.question, tuple(map(_text, entry.ctxs)), tuple(entry.answers))
        for entry in entries
    ]


def read_conversations(path: Path, *, rounds: int) -> list[list[ChatExchange]]:
    recorded = _read(
        path,
        list[_Recorded],
        '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}',
    )
    found = [
        exchanges[:rounds]
        for one in recorded
        if len(exchanges := _exchanges(one.conversations)) >= rounds
    ]
    if not found:
        raise ConfigError(
            f"{path}: none of its {len(recorded)} conversations has {rounds} questions; "
            "ask for fewer rounds"
        )
    return found


def f1(answer: str, answers: Sequence[str]) -> float:
    """Best F1 of words, 0 to 1 (SQuAD; Rajpurkar et al., 2016)."""
    return _best(lambda own, right: sum((Counter(own) & Counter(right)).values()), answer, answers)


def rouge_l(answer: str, answers: Sequence[str]) -> float:
    """Best F-measure of the longest common subsequence of words, 0 to 1 (ROUGE-L; Lin, 2004)."""
    return _best(_longest_common, answer, answers)


SCORES: dict[str, Callable[[str, Sequence[str]], float]] = {"f1": f1, "rouge-l": rouge_l}


def _best(
    shared: Callable[[list[str], list[str]], int], answer: str, answers: Sequence[str]
) -> float:
    own = _words(answer)
    rights = [_words(right) for right in answers]
    return max(
        (2 * shared(own, right) / max(1, len(own) + len(right)) for right in rights), default=0.0
    )


def _longest_common(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        above = row
        row = [0]
        for place, match in enumerate(other):
            row.append(above[place] + 1 if word == match else max(row[place], above[place + 1]))
    return row[-1]


def _words(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _read(path: Path, kind: type[_Entries], form: str) -> _Entries:
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ConfigError(f"{path}: larger than {_LARGEST_BYTES >> 30} GiB; cut the data set")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a data set's file") from None
    except UNDECODABLE as error:
        raise ConfigError(f"{path}: {error}; it must be a JSON list of {form}") from None


def _exchanges(messages: Sequence[_Message]) -> list[ChatExchange]:
    exchanges: list[ChatExchange] = []
    for message in messages:
        if message.speaker in _USERS and message.value:
            exchanges.append(ChatExchange(message.value, ""))
        elif message.speaker in _MODELS and exchanges:
            exchanges[-1] = ChatExchange(
                exchanges[-1].question, exchanges[-1].answer + message.value
            )
    return exchanges


def _text(context: "str | _Context") -> str:
    if isinstance(context, str):
        return context
    return f"{context.title}\n{context.text}" if context.title else context.text
