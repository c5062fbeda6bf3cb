"""What of a request's prompt is to be stored, and when: counted as vLLM's scheduler counts, without vLLM."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace
from kvhold.core.layout import Group, Layout
from kvhold.integrations.vllm.tracker import RequestTracker


def make_tracker(num_tokens: int, *, block: int = 16, chunk: int = 160) -> RequestTracker:
    group = Group(layers=2, planes=2, heads=1, head_dim=8, dtype="float32")
    layout = Layout((group,), tokens_per_chunk=chunk, tail_tokens=block)
    return RequestTracker(Namespace("model", layout).prompt(np.arange(num_tokens, dtype=np.int32)))


def take(tracker: RequestTracker) -> range | None:
    """Blocks of what is taken; checks that the names are those of what lies in them."""
    taken = tracker.take()
    if taken is None:
        return None
    names, blocks = taken
    layout = tracker.prompt.namespace.layout
    per_chunk = layout.tokens_per_chunk // layout.tail_tokens
    first, rest = divmod(blocks.start, per_chunk)
    assert rest == 0, "begins with a chunk"
    assert len(blocks) * layout.tail_tokens == names.num_tokens(layout).sum()
    assert names == tracker.prompt.chunks(first, last=first + len(names) - bool(names.tail_tokens), tail=bool(names.tail_tokens))
    assert names.first_token == blocks.start * layout.tail_tokens
    return blocks


def test_the_scheduled_tokens_of_a_chunked_prompt_and_of_the_decoding_after_it_add_up() -> None:
    tracker = make_tracker(1000)
    tracker.start(0)
    sums, bounds, taken = [], [], []
    for scheduled in (400, 400, 200, 1, 1):
        tracker.advance(scheduled)
        sums.append(tracker.num_scheduled_tokens)
        bounds.append(tracker.computed_tokens)
        taken.append(take(tracker))
    assert sums == [400, 800, 1000, 1001, 1002]
    assert bounds == [400, 800, 1000, 1000, 1000], "of the prompt alone"
    assert taken == [range(20), range(20, 50), range(50, 62), None, None], "two chunks, three, one and the tail of two blocks"


def test_hit_blocks_count_as_computed_and_are_not_stored_again() -> None:
    tracker = make_tracker(1000)
    tracker.found(20 * 16)
    tracker.start(20 * 16)
    tracker.advance(160)
    assert tracker.computed_tokens == 30 * 16
    assert take(tracker) == range(20, 30)


def test_what_only_the_engine_had_is_stored_too() -> None:
    """Its own prefix cache held more than ours."""
    tracker = make_tracker(1000)
    tracker.found(160)
    tracker.start(480)
    tracker.advance(16)
    assert take(tracker) == range(10, 30)


def test_a_step_in_which_nothing_becomes_whole_takes_nothing() -> None:
    tracker = make_tracker(1000)
    tracker.start(0)
    tracker.advance(159)
    assert take(tracker) is None
    tracker.advance(1)
    assert take(tracker) == range(10)
    assert take(tracker) is None, "once"


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(15, None), (16, range(1)), (31, range(1)), (159, range(9)), (160, range(10)), (175, range(10)), (176, range(11)), (335, range(20))],
)
def test_the_tail_reaches_to_the_last_whole_block(num_tokens: int, blocks: range | None) -> None:
    tracker = make_tracker(num_tokens)
    tracker.start(0)
    tracker.advance(num_tokens)
    assert take(tracker) == blocks


def test_the_tail_waits_for_the_end_of_the_prompt() -> None:
    tracker = make_tracker(200)
    tracker.start(0)
    tracker.advance(199)
    assert take(tracker) == range(10)
    tracker.advance(1)
    assert take(tracker) == range(10, 12)


def test_tokens_beyond_the_prompt_are_never_stored() -> None:
    tracker = make_tracker(150)
    tracker.start(0)
    for scheduled in (150, 1, 20, 500):
        tracker.advance(scheduled)
        assert tracker.computed_tokens == 150
    assert take(tracker) == range(9)
    assert take(tracker) is None


def test_after_a_preemption_it_counts_from_what_is_computed_then() -> None:
    tracker = make_tracker(1000)
    tracker.start(0)
    tracker.advance(400)
    assert take(tracker) == range(20)
    tracker.start(160)
    assert (tracker.computed_tokens, tracker.num_scheduled_tokens) == (160, 0)
    tracker.advance(160)
    assert take(tracker) == range(10, 20), "its blocks are others now, and the first ones may not have been stored"
    tracker.advance(680)
    assert take(tracker) == range(20, 62)


def test_a_broken_promise_is_void_from_there_on() -> None:
    tracker = make_tracker(1000)
    tracker.found(800)
    tracker.start(160)
    tracker.advance(840)
    assert take(tracker) == range(10, 62)


def test_a_broken_promise_of_the_tail_alone_is_void_too() -> None:
    tracker = make_tracker(1000)
    tracker.found(992)
    tracker.start(960)
    tracker.advance(40)
    assert take(tracker) == range(60, 62)


@pytest.mark.parametrize("num_tokens", [160, 176, 320, 992, 1000])
def test_of_a_whole_hit_nothing_is_stored_although_the_last_token_is_computed_again(num_tokens: int) -> None:
    tracker = make_tracker(num_tokens)
    hit = num_tokens // 16 * 16
    tracker.found(hit)
    tracker.start(min(hit, num_tokens - 1))
    tracker.advance(num_tokens - min(hit, num_tokens - 1))
    assert take(tracker) is None
    tracker.advance(1)
    assert take(tracker) is None


@dataclass
class _Life:
    """From one start to the next: what the cache held at its beginning, where it began, and the steps after that."""

    hit_blocks: int
    start_tokens: int
    steps: list[int] = field(default_factory=list)


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, int, int, list[_Life]]:
    """A prompt, a block, a chunk, and lives. Each starts at a block's end or one token before the prompt's; the last ends the prompt."""
    block = draw(st.sampled_from([1, 2, 16]))
    chunk = block * draw(st.integers(1, 5))
    num_tokens = draw(st.integers(1, 12 * block))
    lives = []
    for _ in range(draw(st.integers(1, 4))):
        hit = draw(st.one_of(st.just(num_tokens // block), st.integers(0, num_tokens // chunk).map(lambda n: n * chunk // block)))
        kept = draw(st.one_of(st.just(hit), st.integers(0, num_tokens // block)))
        life = _Life(hit, min(kept * block, num_tokens - 1))
        at = life.start_tokens
        while at < num_tokens and draw(st.booleans()):
            life.steps.append(draw(st.integers(1, num_tokens - at)))
            at += life.steps[-1]
        lives.append(life)
    lives[-1].steps.append(num_tokens - lives[-1].start_tokens - sum(lives[-1].steps))
    lives[-1].steps += [1] * draw(st.integers(0, 2))  # decoding
    return num_tokens, block, chunk, lives


@given(stories())
def test_everything_whole_is_taken_once_and_never_before_it_is_computed(story: tuple[int, int, int, list[_Life]]) -> None:
    """Whatever the steps and restarts: what the last life did not find in the cache, or lost, is taken in it exactly once."""
    num_tokens, block, chunk, lives = story
    first = make_tracker(num_tokens, block=block, chunk=chunk)
    taken_at: list[int] = []
    for life in lives:
        tracker = RequestTracker(first.prompt)  # a restart looks the prompt up anew
        tracker.found(life.hit_blocks * block)
        tracker.start(life.start_tokens)
        computed, taken_at = life.start_tokens, []
        for step in life.steps:
            tracker.advance(step)
            computed += step
            for at in take(tracker) or ():
                assert (at + 1) * block <= computed, "taken before it was computed"
                taken_at.append(at)
    whole = num_tokens // block
    last = lives[-1]
    kept = min(last.hit_blocks, (last.start_tokens + 1) // block)
    kept = whole if kept == whole else kept * block // chunk * chunk // block
    assert taken_at == list(range(kept, whole))


@given(stories())
def test_without_a_new_lookup_a_restart_takes_again_only_what_it_lost(story: tuple[int, int, int, list[_Life]]) -> None:
    num_tokens, block, chunk, lives = story
    tracker = make_tracker(num_tokens, block=block, chunk=chunk)
    known = lives[0].hit_blocks  # blocks from the first on that the cache was told, or said to hold
    tracker.found(known * block)
    for life in lives:
        tracker.start(life.start_tokens)
        if (life.start_tokens + 1) // block < known:
            known = (life.start_tokens + 1) // block * block // chunk * chunk // block
        for step in life.steps:
            tracker.advance(step)
            blocks = take(tracker)
            if blocks is not None:
                assert blocks.start == known, "nothing twice, nothing left out"
                known = blocks.stop
    assert known == num_tokens // block


def test_names_and_blocks_agree_for_whole_chunks_and_tail() -> None:
    tracker = make_tracker(200)
    tracker.start(0)
    tracker.advance(200)
    taken = tracker.take()
    assert taken is not None
    names, blocks = taken
    assert isinstance(names, ChunkNames)
    assert (len(names), names.tail_tokens, names.first_token, blocks) == (2, 32, 0, range(12))
    assert names.hashes[:HASH_BYTES] == tracker.prompt.hash_at(0)
