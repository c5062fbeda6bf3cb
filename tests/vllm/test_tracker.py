"""What of a request is to be stored, and when: counted as vLLM's scheduler counts, without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


def take(tracker: RequestTracker, token_ids: Sequence[int] = ()) -> range | None:
    """Blocks of what is taken; checks that the names are those of what lies in them."""
    return checked(tracker, tracker.take(token_ids), token_ids)


def finish(tracker: RequestTracker, token_ids: Sequence[int], num_blocks: int) -> range | None:
    """The same of what is taken at the end."""
    return checked(tracker, tracker.finish(token_ids, num_blocks), token_ids)


def checked(
    tracker: RequestTracker, names: ChunkNames | None, token_ids: Sequence[int]
) -> range | None:
    """The blocks of what was taken, when its names are those of the text that lies in them."""
    if names is None:
        return None
    namespace = tracker.prompt.namespace
    layout = namespace.layout
    first, rest = divmod(names.first_token, layout.tokens_per_chunk)
    assert rest == 0, "begins with a chunk"
    end = names.first_token + int(names.num_tokens(layout).sum())
    assert end % layout.tail_tokens == 0, "ends with a block"
    assert names == namespace.prompt(list(token_ids) or tracker.prompt.tokens).until(end).chunks(
        first
    )
    return range(names.first_token // layout.tail_tokens, end // layout.tail_tokens)


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
    assert taken == [range(20), range(20, 50), range(50, 62), None, None], (
        "two chunks, three, one and the tail of two blocks"
    )


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
    [
        (15, None),
        (16, range(1)),
        (31, range(1)),
        (159, range(9)),
        (160, range(10)),
        (175, range(10)),
        (176, range(11)),
        (335, range(20)),
    ],
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
    assert take(tracker) == range(10, 20), (
        "its blocks are others now, and the first ones may not have been stored"
    )
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
def test_of_a_whole_hit_nothing_is_stored_although_the_last_token_is_computed_again(
    num_tokens: int,
) -> None:
    tracker = make_tracker(num_tokens)
    hit = num_tokens // 16 * 16
    tracker.found(hit)
    tracker.start(min(hit, num_tokens - 1))
    tracker.advance(num_tokens - min(hit, num_tokens - 1))
    assert take(tracker) is None
    tracker.advance(1)
    assert take(tracker) is None


class TestDecode:
    """With `save_decode`: what is generated is stored, when it is certain and computed."""

    @staticmethod
    def generating(num_prompt: int, **options: Any) -> RequestTracker:
        tracker = make_tracker(num_prompt, chunk=options.pop("chunk", 160))
        return RequestTracker(tracker.prompt, save_decode=True, **options)

    def test_the_sums_go_on_and_nothing_is_taken_before_a_chunk_is_whole(self) -> None:
        tracker = self.generating(1000)
        tracker.start(0)
        known = list(range(1000))
        sums, taken = [], []
        for scheduled in (400, 400, 200, 1, 1):
            tracker.advance(scheduled)
            sums.append(tracker.num_scheduled_tokens)
            taken.append(take(tracker, known))
            # each pass from the prompt's last on samples a token
            known += [7] * (tracker.num_scheduled_tokens >= 1000)
        assert sums == [400, 800, 1000, 1001, 1002]
        assert taken == [range(20), range(20, 50), range(50, 62), None, None]

    def test_hit_blocks_count_as_computed_up_to_the_bound_of_thirty(self) -> None:
        tracker = self.generating(480)
        tracker.found(20 * 16)
        tracker.start(20 * 16)
        tracker.advance(160)
        assert tracker.computed_tokens == 30 * 16
        assert take(tracker, range(480)) == range(20, 30)

    def test_a_chunk_completed_by_generated_tokens_is_taken_with_the_pass_of_its_last_token(
        self,
    ) -> None:
        tracker = self.generating(150)
        tracker.start(0)
        tracker.advance(150)
        assert take(tracker, range(150)) == range(9), "the prompt's tail"
        for known in range(151, 160):
            tracker.advance(1)
            assert take(tracker, range(known)) is None
        tracker.advance(1)
        assert take(tracker, range(160)) == range(10), (
            "the 160th token was sampled by the pass before, and is computed in this one"
        )
        tracker.advance(1)
        assert take(tracker, range(161)) is None, "once"

    def test_without_it_nothing_generated_is_taken(self) -> None:
        tracker = make_tracker(150)
        tracker.start(0)
        tracker.advance(150)
        assert take(tracker, range(150)) == range(9)
        for known in range(151, 400):
            tracker.advance(1)
            assert take(tracker, range(known)) is None
        assert tracker.finish(range(400), 25) is None

    def test_what_is_scheduled_but_not_known_is_not_taken(self) -> None:
        """Two passes at a time, or drafts: 170 tokens are scheduled, 159 are known."""
        tracker = self.generating(150, store_tails=False)
        tracker.start(0)
        tracker.advance(150)
        tracker.advance(20)
        assert take(tracker, range(159)) is None
        tracker.advance(1)
        assert take(tracker, range(160)) == range(10)

    def test_the_end_leaves_a_tail_of_whole_blocks_without_the_token_sampled_last(self) -> None:
        for num_tokens, blocks in [
            (176, None),
            (177, range(10, 11)),
            (192, range(10, 11)),
            (193, range(10, 12)),
            (321, range(10, 20)),
        ]:
            tracker = self.generating(165)
            tracker.start(0)
            tracker.advance(165)
            assert take(tracker, range(165)) == range(10)
            tracker.advance(num_tokens - 166)
            assert finish(tracker, range(num_tokens), 25) == blocks, f"{num_tokens} tokens"

    def test_the_end_takes_chunks_that_the_last_pass_has_made_certain(self) -> None:
        """The last pass accepted many drafts, or it was one of several under way."""
        tracker = self.generating(150)
        tracker.start(0)
        tracker.advance(150)
        assert take(tracker, range(150)) == range(9)
        tracker.advance(200)
        assert take(tracker, range(151)) is None
        assert finish(tracker, range(340), 25) == range(21), "two chunks and a tail of one block"

    def test_a_request_that_is_given_up_leaves_what_is_certain_to_be_computed(self) -> None:
        """Its last token was to be computed by a pass that may not run any more."""
        for num_tokens, blocks in [(160, None), (176, None), (177, range(10, 11))]:
            tracker = self.generating(150)
            tracker.start(0)
            tracker.advance(num_tokens)
            assert take(tracker, range(num_tokens)) == range(10)
            assert finish(tracker, range(num_tokens), 25) == blocks, f"{num_tokens} tokens"

    def test_the_prompts_tail_is_not_taken_twice(self) -> None:
        tracker = self.generating(176)
        tracker.start(0)
        tracker.advance(176)
        assert take(tracker, range(176)) == range(11)
        tracker.advance(10)
        assert tracker.finish(range(187), 25) is None, "its tail ends where the prompt's does"

    def test_a_request_that_ends_before_anything_generated_is_computed_leaves_nothing_new(
        self,
    ) -> None:
        for scheduled, known in [(100, 200), (200, 200), (200, 201)]:
            tracker = self.generating(200)
            tracker.start(0)
            tracker.advance(scheduled)
            take(tracker, range(200))
            assert tracker.finish(range(known), 25) is None

    def test_a_request_that_ends_without_blocks_leaves_nothing(self) -> None:
        """It was preempted, and nobody wants it any more."""
        tracker = self.generating(165)
        tracker.start(0)
        tracker.advance(165)
        take(tracker, range(165))
        tracker.advance(100)
        assert tracker.finish(range(260), 0) is None
        assert finish(tracker, range(260), 15) == range(10, 15), (
            "with only some of them, what lies in those"
        )

    def test_without_tails_only_whole_chunks_are_taken(self) -> None:
        tracker = self.generating(200, store_tails=False)
        tracker.start(0)
        tracker.advance(200)
        assert take(tracker, range(200)) == range(10)
        tracker.advance(100)
        assert tracker.finish(range(300), 25) is None
        tracker.advance(100)
        assert finish(tracker, range(400), 25) == range(10, 20)

    def test_after_a_preemption_what_was_generated_is_taken_again_as_it_is_computed_again(
        self,
    ) -> None:
        tracker = self.generating(150)
        tracker.start(0)
        tracker.advance(150)
        take(tracker, range(150))
        tracker.advance(180)
        assert take(tracker, range(330)) == range(20)
        tracker.start(0)
        tracker.advance(100)
        assert take(tracker, range(330)) is None
        tracker.advance(100)
        assert take(tracker, range(330)) == range(10)
        tracker.advance(131)
        assert take(tracker, range(331)) == range(10, 20)
        tracker.advance(30)
        assert finish(tracker, range(361), 25) == range(20, 22)

    def test_an_end_in_the_middle_of_computing_again_takes_what_is_computed_by_then(self) -> None:
        tracker = self.generating(150)
        tracker.start(0)
        tracker.advance(150)
        take(tracker, range(150))
        tracker.advance(180)
        assert take(tracker, range(330)) == range(20)
        tracker.start(0)
        tracker.advance(300)
        assert finish(tracker, range(330), 25) == range(10), (
            "and no tail: the text is named beyond it already"
        )

    def test_rejected_drafts_change_nothing(self) -> None:
        told, untold = self.generating(150), self.generating(150)
        for tracker in (told, untold):
            tracker.start(0)
            tracker.advance(150)
            take(tracker, range(150))
        known = 151
        for accepted in (0, 3, 1, 0, 2, 4, 4, 0, 1):
            told.advance(5, known - 1)
            untold.advance(5)
            assert take(told, range(known)) == take(untold, range(known))
            known += accepted + 1
        assert told.num_scheduled_tokens == untold.num_scheduled_tokens == 150 + 9 * 5
        assert told.next_chunk == 1
        told.start(0)
        told.advance(48)
        assert told.computed_tokens == 48

    def test_a_load_that_failed_beside_a_pass_voids_what_was_taken_from_there_on(self) -> None:
        tracker = make_tracker(1000)
        tracker.found(320)
        tracker.start(320)
        tracker.advance(320)
        assert take(tracker) == range(20, 40)
        tracker.advance(400, 176)
        assert tracker.computed_tokens == 576
        assert take(tracker) == range(10, 30)


class TestSkippedEnd:
    """`skip_last_n_tokens`: the prompt is cut, and what is generated is stored up to so many tokens
    before its end.
    """

    @staticmethod
    def cut(num_prompt: int, skip: int, **options: Any) -> RequestTracker:
        prompt = make_tracker(num_prompt).prompt
        return RequestTracker(
            prompt.until(max(0, num_prompt - skip)), skip_last_n_tokens=skip, **options
        )

    @pytest.mark.parametrize(
        ("skip", "blocks"),
        [(0, range(12)), (1, range(12)), (8, range(12)), (9, range(11)), (40, range(10))],
    )
    def test_the_last_tokens_of_the_prompt_are_not_stored(self, skip: int, blocks: range) -> None:
        for save_decode in (False, True):
            tracker = self.cut(200, skip, save_decode=save_decode)
            tracker.start(0)
            tracker.advance(200)
            assert take(tracker, range(200)) == blocks

    @pytest.mark.parametrize("skip", [185, 200, 300])
    def test_a_prompt_of_which_no_block_is_left_stores_nothing(self, skip: int) -> None:
        tracker = self.cut(200, skip)
        tracker.start(0)
        tracker.advance(200)
        assert take(tracker, range(200)) is None

    def test_with_what_is_generated_the_end_moves_on(self) -> None:
        tracker = self.cut(165, 20, save_decode=True)
        tracker.start(0)
        tracker.advance(165)
        assert take(tracker, range(165)) == range(9), "up to token 145"
        for known in range(166, 180):
            tracker.advance(1)
            assert take(tracker, range(known)) is None
        tracker.advance(1)
        assert take(tracker, range(180)) == range(10), "the first 160 of 180"
        tracker.advance(20)
        assert finish(tracker, range(196), 25) == range(10, 11), "the first 176 of 196"

    def test_more_computed_at_the_start_than_may_be_stored_is_no_trouble(self) -> None:
        tracker = self.cut(200, 50, save_decode=True)
        tracker.found(320)
        tracker.start(199)
        tracker.advance(1)
        assert take(tracker, range(200)) is None


@dataclass
class _Life:
    """From one start to the next: what the cache held at its beginning, where it began, and the
    steps after that.
    """

    hit_blocks: int
    start_tokens: int
    steps: list[int] = field(default_factory=list)


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, int, int, list[_Life]]:
    """A prompt, a block, a chunk, and lives.

    Each starts at a block's end or one token before the prompt's; the last ends the prompt.
    """
    block = draw(st.sampled_from([1, 2, 16]))
    chunk = block * draw(st.integers(1, 5))
    num_tokens = draw(st.integers(1, 12 * block))
    lives = []
    for _ in range(draw(st.integers(1, 4))):
        hit = draw(
            st.one_of(
                st.just(num_tokens // block),
                st.integers(0, num_tokens // chunk).map(lambda n: n * chunk // block),
            )
        )
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
def test_everything_whole_is_taken_once_and_never_before_it_is_computed(
    story: tuple[int, int, int, list[_Life]],
) -> None:
    """Whatever the steps and restarts: what the last life did not find in the cache, or lost, is
    taken in it exactly once.
    """
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
def test_without_a_new_lookup_a_restart_takes_again_only_what_it_lost(
    story: tuple[int, int, int, list[_Life]],
) -> None:
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


def test_names_are_those_of_whole_chunks_and_of_the_tail() -> None:
    tracker = make_tracker(200)
    tracker.start(0)
    tracker.advance(200)
    names = tracker.take()
    assert isinstance(names, ChunkNames)
    assert (len(names), names.tail_tokens, names.first_token) == (2, 32, 0)
    assert names.hashes[:HASH_BYTES] == tracker.prompt.hash_at(0)
