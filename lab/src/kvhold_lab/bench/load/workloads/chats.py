from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.work import Phase, Request, Session, Turn

FIRST, LATER = "first", "later"
_FEWEST_TOKENS = 16
_TAG = 0xC4A7
_QUESTIONS_OF_A_USER = 1 << 20


@dataclass(frozen=True)
class _Question:
    at_s: float
    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class _Chat:
    user: int
    beginning_tokens: int
    questions: tuple[_Question, ...]


@dataclass(frozen=True)
class Chats:
    """The number of questions is geometric; lengths and think times are log-normal.

    think_s: median time between two questions
    questions: mean number of a chat
    history_tokens, question_tokens, answer_tokens: medians
    most_tokens: a chat ends before a longer prompt
    """

    seed: int = 0
    chats_s: float = 0.2
    think_s: float = 30.0
    think_sigma: float = 1.0
    questions: float = 5.0
    system_tokens: int = 256
    history_tokens: int = 800
    question_tokens: int = 100
    answer_tokens: int = 200
    output_tokens: int = 8
    most_tokens: int = 4_000
    duration_s: float = 360.0

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        chats = self._chats()
        total = sum(len(chat.questions) for chat in chats)
        yield Phase("chats", (self._session(prompts, chat) for chat in chats), None, total)

    def _chats(self) -> list[_Chat]:
        arrivals = np.random.default_rng([_TAG, self.seed, 0])
        chats: list[_Chat] = []
        at_s = 0.0
        while (at_s := at_s + arrivals.exponential(1.0 / self.chats_s)) < self.duration_s:
            chats.append(self._chat(len(chats), at_s))
        return chats

    def _chat(self, user: int, at_s: float) -> _Chat:
        chance = np.random.default_rng([_TAG, self.seed, 1 + user])

        def around(median: float, sigma: float) -> float:
            return float(median * np.exp(sigma * chance.standard_normal()))

        def length(median: int, sigma: float = 0.8) -> int:
            return max(_FEWEST_TOKENS, round(around(median, sigma)))

        most = self.most_tokens - self.system_tokens - self.output_tokens
        if most <= self.question_tokens:
            raise ConfigError(
                f"prompts of at most {self.most_tokens} tokens have no room for a chat; let them "
                "be longer with --most-tokens"
            )
        tokens = beginning = min(length(self.history_tokens, 1.0), most - self.question_tokens)
        questions: list[_Question] = []
        for _ in range(int(chance.geometric(1.0 / self.questions))):
            asked, answer = length(self.question_tokens), length(self.answer_tokens)
            if not questions:
                asked = min(asked, most - tokens)
            if tokens + asked > most or at_s >= self.duration_s:
                break
            questions.append(_Question(at_s, asked, answer))
            tokens += asked + answer
            at_s += around(self.think_s, self.think_sigma)
        return _Chat(user, beginning, tuple(questions))

    def _session(self, prompts: Prompts, chat: _Chat) -> Session:
        turns = [
            Turn("system", prompts.piece("system", 0, self.system_tokens)),
            Turn("user", prompts.piece("history", chat.user, chat.beginning_tokens)),
        ]
        for number, question in enumerate(chat.questions):
            at = chat.user * _QUESTIONS_OF_A_USER + number
            turns.append(Turn("user", prompts.piece("question", at, question.tokens)))
            yield Request(
                LATER if number else FIRST,
                tuple(turns),
                self.output_tokens,
                at_s=question.at_s,
                labels={"user": chat.user, "question": number + 1},
            )
            turns.append(Turn("assistant", prompts.piece("answer", at, question.answer_tokens)))
