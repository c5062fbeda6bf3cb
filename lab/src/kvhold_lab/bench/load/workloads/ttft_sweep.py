from collections.abc import Iterator
from dataclasses import dataclass

from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.work import COLD, WARM, Phase, Request, Session, Turn

FILLER = "filler"
LENGTHS = (64, 256, 1_024, 4_096, 16_384, 32_768)


@dataclass(frozen=True)
class TtftSweep:
    """For each length, a new text, then the same `following` times; all `runs` times.

    flush_tokens: other text before each warm request
    """

    lengths: tuple[int, ...] = LENGTHS
    following: int = 1
    runs: int = 1
    question_tokens: int = 16
    output_tokens: int = 1
    flush_tokens: int = 0
    pause_s: float = 0.0

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        total = len(self.lengths) * self.runs * (1 + self.following * (1 + len(self._fillers())))
        sessions = (
            self._session(prompts, number, run, length)
            for number, (run, length) in enumerate(
                (run, length) for run in range(self.runs) for length in self.lengths
            )
        )
        yield Phase("sweep", sessions, 1, total, self.pause_s)

    def _fillers(self) -> list[int]:
        longest = max(self.lengths)
        whole, rest = divmod(self.flush_tokens, longest)
        return [longest] * whole + [rest] * bool(rest)

    def _session(self, prompts: Prompts, number: int, run: int, length: int) -> Session:
        context = Turn("system", prompts.piece("context", number, length))
        for repeat in range(1 + self.following):
            exchange = number * (1 + self.following) + repeat
            for filler, num_tokens in enumerate(self._fillers() if repeat else []):
                text = prompts.piece("filler", exchange * len(self._fillers()) + filler, num_tokens)
                yield Request(FILLER, (Turn("user", text),), 1)
            question = Turn("user", prompts.piece("question", exchange, self.question_tokens))
            labels = {"run_index": run, "context_tokens": length, "repeat": repeat}
            yield Request(
                WARM if repeat else COLD, (context, question), self.output_tokens, labels=labels
            )
