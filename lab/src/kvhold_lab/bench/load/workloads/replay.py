"""A recorded trace, with made-up text.

A block's hash id determines its `BLOCK_TOKENS` tokens; different ids differ within the first five.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvhold_lab.bench.load.prompts import Prompts
from kvhold_lab.bench.load.work import Phase, Request, Session, Turn, single
from kvhold_lab.simulate.requests import BLOCK_TOKENS, TimedRequest, read_requests


@dataclass(frozen=True)
class Replay:
    """time_scale: 2 is twice as fast; infinity: all at once, bounded by max_in_flight"""

    trace: Path
    time_scale: float = 1.0
    max_requests: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    max_in_flight: int | None = None

    def phases(self, prompts: Prompts) -> Iterator[Phase]:
        total = sum(1 for _ in self._requests())
        sessions = (
            self._session(prompts, number, request)
            for number, request in enumerate(self._requests())
        )
        yield Phase("replay", sessions, self.max_in_flight, total)

    def _requests(self) -> Iterator[TimedRequest]:
        return islice(read_requests(self.trace, TimedRequest), self.max_requests)

    def _session(self, prompts: Prompts, number: int, request: TimedRequest) -> Session:
        num_tokens = _at_most(request.input_length, self.max_input_tokens)
        lengths = [
            min(BLOCK_TOKENS, num_tokens - start) for start in range(0, num_tokens, BLOCK_TOKENS)
        ]
        blocks = zip(request.hash_ids, lengths, strict=False)
        turns = tuple(
            Turn("user", prompts.piece("block", hash_id, length)) for hash_id, length in blocks
        )
        return single(
            Request(
                "replay",
                turns,
                max(1, _at_most(request.output_length, self.max_output_tokens)),
                at_s=request.timestamp / 1_000 / self.time_scale,
                labels={"request": number, "trace_input_tokens": request.input_length},
            )
        )


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
