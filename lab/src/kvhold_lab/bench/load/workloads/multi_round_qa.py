from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.prompts import Content, Prompts
from kvhold_lab.bench.load.work import Phase, Request, Session, Turn
from kvhold_lab.bench.load.workloads.dataset import ChatExchange


@dataclass(frozen=True)
class MultiRoundQA:
    """`users` users, who together ask `qps` questions a second, with the whole history.

    ramp_up_s: until all first users are present; None: users / qps
    staggered: the first users begin at different rounds
    duration_s: new users follow until then. None: only the first users
    """

    users: int = 10
    rounds: int = 5
    qps: float = 1.0
    system_tokens: int = 1_000
    history_tokens: int = 2_000
    question_tokens: int = 32
    answer_tokens: int = 100
    ramp_up_s: float | None = None
    staggered: bool = True
    duration_s: float | None = None
    first_user: int = 0
    recorded: Sequence[Sequence[ChatExchange]] = ()

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        if self.recorded and prompts.kind != "text":
            raise ConfigError("recorded conversations are text; add --prompts text")
        total = (
            None
            if self.duration_s is not None
            else sum(self.rounds - self._first_round(place) for place in range(self.users))
        )
        sessions = (self._place(prompts, place) for place in range(self.users))
        yield Phase("conversations", sessions, None, total)

    def _first_round(self, place: int) -> int:
        return place * self.rounds // self.users if self.staggered else 0

    def _place(self, prompts: Prompts, place: int) -> Session:
        gap_s = self.users / self.qps
        at_s = place / self.users * (gap_s if self.ramp_up_s is None else self.ramp_up_s)
        user, first = self.first_user + place, self._first_round(place)
        while self.duration_s is None or at_s < self.duration_s:
            rounds = self.rounds - first
            yield from self._conversation(prompts, user, first, at_s, gap_s)
            if self.duration_s is None:
                return
            user, first, at_s = user + self.users, 0, at_s + rounds * gap_s

    def _conversation(
        self, prompts: Prompts, user: int, first: int, at_s: float, gap_s: float
    ) -> Session:
        turns = [
            Turn("system", prompts.piece("system", 0, self.system_tokens)),
            Turn("user", prompts.piece("history", user, self.history_tokens)),
        ]
        for number in range(self.rounds):
            at_round_s = at_s + (number - first) * gap_s
            if self.duration_s is not None and number >= first and at_round_s >= self.duration_s:
                return
            question, answer = self._exchange(prompts, user, number)
            turns.append(Turn("user", question))
            if number < first:
                turns.append(Turn("assistant", answer))
                continue
            labels = {"user": user, "round": number + 1}
            reply = yield Request(
                f"round {number + 1}",
                tuple(turns),
                self.answer_tokens,
                at_s=at_round_s,
                labels=labels,
                needs_content=number + 1 < self.rounds,
            )
            if reply.error is not None:
                return
            turns.append(Turn("assistant", reply.content))

    def _exchange(self, prompts: Prompts, user: int, number: int) -> tuple[Content, Content]:
        if self.recorded:
            exchange = self.recorded[user % len(self.recorded)][number]
            return f"\n\n{exchange.question}", f"\n\n{exchange.answer}"
        at = user * self.rounds + number
        return prompts.piece("question", at, self.question_tokens), prompts.piece(
            "answer", at, self.answer_tokens
        )
