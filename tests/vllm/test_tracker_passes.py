"""What the tracker names is what lies in the blocks: one request on a little engine with drafts,
passes under way, preemptions and ends.

The engine counts as vLLM's scheduler does, and its passes write, for each token they are given, a
number that depends on all tokens before
it: rejected drafts, too, until the right token overwrites them. Whatever the tracker takes is
compared with those numbers when the pass has run that it was planned with.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.core.keys import ChunkNames, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.tracker import RequestTracker

Taken = ChunkNames | None


@dataclass(frozen=True)
class Setting:
    """How an engine is set up, and the request."""

    block: int
    chunk: int
    prompt: int
    max_tokens: int
    drafts: int
    depth: int
    budget: int
    save_decode: bool = True
    store_tails: bool = True
    skip: int = 0
    tells_count: bool = True

    @property
    def namespace(self) -> Namespace:
        """Names of this engine's blocks."""
        group = Group(layers=1, planes=2, heads=1, head_dim=8, dtype="float32")
        return Namespace(
            "model", Layout((group,), tokens_per_chunk=self.chunk, tail_tokens=self.block)
        )


@dataclass
class Pass:
    """One step: tokens scheduled, of them drafts; the first of them, as the scheduler counts; what
    is to be gathered after it.
    """

    scheduled: int
    drafts: int
    first: int
    sampled: list[int] = field(default_factory=list)
    taken: Taken = None


class LittleEngine:
    """One request from its arrival to its end."""

    def __init__(self, setting: Setting, random: Random) -> None:
        self.setting, self.random = setting, random
        # vLLM: request.all_token_ids
        self.known = [random.randrange(2) for _ in range(setting.prompt)]
        self.computed = 0  # vLLM: request.num_computed_tokens
        self.placeholders = self.draft_tokens = 0
        self.stale = 0  # passes under way of a life that is over
        self.done = False
        self.real = list(self.known)  # what the device knows; ahead of `known`
        self.slots: dict[int, int] = {}
        self.passes: deque[Pass] = deque()
        self.returned: deque[Pass] = deque()
        self.waiting = True
        prompt = setting.namespace.prompt(self.known).until(max(0, setting.prompt - setting.skip))
        self.tracker = RequestTracker(
            prompt,
            save_decode=setting.save_decode,
            store_tails=setting.store_tails,
            skip_last_n_tokens=setting.skip,
        )
        self.stored: list[range] = []
        self.lives = 0

    def run(self, *, preempt: float = 0.0, abort: float = 0.0) -> None:
        """Until it has ended. preempt, abort: how likely before each step."""
        while not self.done:
            if self.random.random() < abort:
                self._end()
            elif self.random.random() < preempt and not self.waiting:
                self._preempt()
            elif len(self.passes) < self.setting.depth:
                if not self._schedule():
                    self._execute_and_update()
            else:
                self._execute_and_update()
        while self.passes:
            self._execute()

    def _schedule(self) -> bool:
        if self.waiting:
            if self.stale:
                return False
            self._start()
        before = self.computed
        scheduled = min(
            len(self.known) + self.draft_tokens + self.placeholders - before, self.setting.budget
        )
        if (
            self.placeholders
            and before + 2 - self.placeholders >= self.setting.prompt + self.setting.max_tokens
        ):
            return False
        if scheduled <= 0:
            return False
        drafts = (
            max(0, before + scheduled - len(self.known) - self.placeholders)
            if self.draft_tokens
            else 0
        )
        step = Pass(scheduled, drafts, before)
        self.computed += scheduled
        self.tracker.advance(
            scheduled,
            before if self.setting.tells_count and before != self.tracker.start_tokens else None,
        )
        step.taken = self.tracker.take(self.known)
        self.draft_tokens = 0
        # it samples something
        if self.setting.depth > 1 and self.computed >= len(self.known) + self.placeholders:
            self.placeholders += 1 + drafts
            self.draft_tokens = self.setting.drafts
        self.passes.append(step)
        return True

    def _start(self) -> None:
        """It gets blocks; some of its text may have come from elsewhere."""
        self.waiting, self.real, self.slots = False, list(self.known), {}
        hit = min(
            self.random.choice([0, len(self.known) // self.setting.block * self.setting.block]),
            len(self.known) - 1,
        )
        hit = hit if self.lives else 0
        self.lives += 1
        for at, number in enumerate(numbers(self.known[:hit])):
            self.slots[at] = number
        self.computed = hit
        self.tracker.start(hit)

    def _execute(self) -> None:
        """The device runs the oldest pass: it starts at the first real token without a number."""
        step = self.passes.popleft()
        real = self.real
        first = min(step.first, len(real) - 1)
        if first + step.scheduled < len(real):  # not the end of the prompt yet
            inputs = real[first : first + step.scheduled]
        else:
            truth = [self._next(real)]
            while len(truth) <= step.drafts:
                truth.append(self._next(real + truth))
            drafts = [
                token if self.random.random() < 0.7 else 1 - token for token in truth[: step.drafts]
            ]
            accepted = next(
                (i for i, (a, b) in enumerate(zip(drafts, truth, strict=False)) if a != b),
                len(drafts),
            )
            inputs = real[first:] + drafts
            step.sampled = truth[: accepted + 1]
            self.real = real + step.sampled
        for at, number in enumerate(numbers(real[:first] + inputs)):
            if at >= first:
                self.slots[at] = number
        self._gather(step.taken, real)
        self.returned.append(step)

    def _execute_and_update(self) -> None:
        self._execute()
        step = self.returned.popleft()
        if self.waiting:
            self.stale -= 1
        elif step.sampled:
            rejected = step.drafts - (len(step.sampled) - 1)
            self.computed -= rejected
            if self.setting.depth > 1:
                self.placeholders -= rejected + len(step.sampled)
            else:
                self.draft_tokens = self.setting.drafts
        left = self.setting.prompt + self.setting.max_tokens - len(self.known)
        self.known += step.sampled[:left]
        if len(self.known) >= self.setting.prompt + self.setting.max_tokens:
            self._end()

    def _preempt(self) -> None:
        self.waiting, self.computed, self.placeholders, self.draft_tokens = True, 0, 0, 0
        self.stale = len(self.passes)

    def _end(self) -> None:
        """What is taken now is gathered when the passes under way have run."""
        self.done = True
        blocks = 0 if self.waiting else -(-self.computed // self.setting.block)
        taken = self.tracker.finish(self.known, blocks)
        while self.passes:
            self._execute()
        self._gather(taken, self.known)

    def _gather(self, taken: Taken, text: Sequence[int]) -> None:
        """Compare names and numbers with the text's."""
        if taken is None:
            return
        start = taken.first_token
        end = start + int(taken.num_tokens(self.setting.namespace.layout).sum())
        true = self.setting.namespace.prompt(list(text)[:end]).chunks(start // self.setting.chunk)
        assert taken == true, "the names of another text"
        truth = numbers(text[:end])
        assert [self.slots.get(at) for at in range(start, end)] == truth[start:end], (
            "another text's KV"
        )
        self.stored.append(range(start, end))

    def _next(self, text: Sequence[int]) -> int:
        return (len(text) * 7 + sum(text[-3:])) % 5 % 2


def numbers(text: Sequence[int]) -> list[int]:
    """[n]: for each token a number that depends on it and all before it."""
    found, number = [], 1
    for token in text:
        number = (number * 1_000_003 + token + 1) % (1 << 61)
        found.append(number)
    return found


@st.composite
def engine_settings(draw: st.DrawFn) -> Setting:
    """Small blocks, so that a few tokens cross many borders."""
    block = draw(st.sampled_from([1, 2, 4]))
    return Setting(
        block=block,
        chunk=block * draw(st.integers(1, 4)),
        prompt=draw(st.integers(1, 30)),
        max_tokens=draw(st.integers(1, 40)),
        drafts=draw(st.integers(0, 4)),
        depth=draw(st.integers(1, 3)),
        budget=draw(st.integers(5, 40)),
        save_decode=draw(st.booleans()),
        store_tails=draw(st.booleans()),
        skip=draw(st.sampled_from([0, 0, 1, 3, 10])),
        tells_count=draw(st.booleans()),
    )


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=300)
@given(engine_settings(), seeds)
def test_what_is_taken_lies_in_the_blocks_and_nothing_whole_is_left_out_or_taken_twice(
    setting: Setting, seed: int
) -> None:
    engine = LittleEngine(setting, Random(seed))
    engine.run()
    assert len(engine.known) == setting.prompt + setting.max_tokens
    last = max(0, (len(engine.known) if setting.save_decode else setting.prompt) - setting.skip)
    if setting.save_decode:
        last = min(last, len(engine.known) - 1)
    whole = [
        at
        for taken in engine.stored
        for at in range(taken.start, taken.stop - taken.stop % setting.chunk)
    ]
    assert whole == list(range(last // setting.chunk * setting.chunk))
    tails = [taken.stop for taken in engine.stored if taken.stop % setting.chunk]
    ends = {max(0, setting.prompt - setting.skip), last} if setting.store_tails else set()
    assert tails == sorted(
        {
            end // setting.block * setting.block
            for end in ends
            if end // setting.block * setting.block % setting.chunk
        }
    )


@settings(max_examples=300)
@given(engine_settings(), seeds, st.sampled_from([0.0, 0.05, 0.2]), st.sampled_from([0.0, 0.02]))
def test_what_is_taken_lies_in_the_blocks_through_preemptions_and_aborts(
    setting: Setting, seed: int, preempt: float, abort: float
) -> None:
    engine = LittleEngine(setting, Random(seed))
    engine.run(preempt=preempt, abort=abort)
    if not setting.save_decode:
        assert all(taken.stop <= setting.prompt for taken in engine.stored)


def test_drafts_are_both_accepted_and_rejected_here_and_passes_do_run_ahead() -> None:
    """Else the tests above would show nothing."""
    engine = LittleEngine(
        Setting(
            block=2,
            chunk=4,
            prompt=8,
            max_tokens=200,
            drafts=3,
            depth=2,
            budget=40,
            tells_count=False,
        ),
        Random(1),
    )
    engine.run()
    assert engine.tracker.num_scheduled_tokens > len(engine.known) + 50, "drafts were rejected"
    assert engine.tracker.num_scheduled_tokens < 4 * 200, "and accepted"
    assert sum(len(taken) for taken in engine.stored) == 206
