"""A prompt that grows has the keys of all its tokens hashed at once, and an appended token costs
the same however long it is.
"""

import tracemalloc
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core import keys
from kvhold.core.keys import Insert, Namespace
from kvhold.core.layout import Group, Layout

GROUP = Group(layers=2, planes=2, heads=2, head_dim=8, dtype="float16")
SPACE = Namespace(model="llama", layout=Layout((GROUP,), tokens_per_chunk=4, tail_tokens=1))
BLOCKS = Namespace(
    model="llama", layout=Layout((GROUP,), tokens_per_chunk=16, tail_tokens=4), shards=2
)
NO_TAILS = Namespace(model="llama", layout=Layout((GROUP,), tokens_per_chunk=4, tail_tokens=0))

pieces = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=25), min_size=1, max_size=6)


@given(st.sampled_from([SPACE, BLOCKS, NO_TAILS]), pieces, st.data())
def test_its_keys_are_those_of_all_tokens_at_once(
    space: Namespace, texts: list[list[int]], data: st.DataObject
) -> None:
    inserts, first = [], texts[0]
    if first:
        start = data.draw(st.integers(0, len(first) - 1))
        inserts = data.draw(st.sampled_from([[], [Insert(start, len(first) - start, "image")]]))
    extras = data.draw(
        st.dictionaries(st.integers(0, 8), st.binary(min_size=1, max_size=4), max_size=3)
    )
    growing, tokens = space.prompt(first, extras, inserts=inserts).growing(), list(first)
    for piece in ([], *texts[1:]):
        growing.append(piece)
        tokens += piece
        whole = space.prompt(tokens, extras, inserts=inserts)
        assert (growing.num_tokens, growing.num_whole) == (len(tokens), whole.num_whole)
        assert growing.query() == whole.query()
        assert growing.tails == whole.tails
        assert (
            space.prompt(first, extras, inserts=inserts).followed_by(tokens[len(first) :]).query()
            == whole.query()
        )
        chunk = data.draw(st.integers(0, whole.num_whole))
        assert growing.chunks(chunk) == whole.chunks(chunk)
        assert growing.chunks(chunk, tail=False) == whole.chunks(chunk, tail=False)
        assert growing.chunks(0, last=chunk, tail=False) == whole.chunks(0, last=chunk, tail=False)
        if chunk < whole.num_whole:
            assert growing.chunk_key(chunk, 1, 1) == whole.chunk_key(chunk, 1, 1)


@given(st.integers(0, 40), st.data())
def test_a_cut_prompt_that_grows_is_whole_again(cut: int, data: st.DataObject) -> None:
    """What was cut off may hold an insert, or the rest of one."""
    tokens, inserts = list(range(40)), [Insert(7, 6, "cat"), Insert(18, 20, "dog")]
    whole = BLOCKS.prompt(tokens, inserts=inserts)
    growing = whole.until(cut).growing()
    while (at := growing.num_tokens) < 40:
        growing.append(tokens[at : data.draw(st.integers(at + 1, 40))])
    assert growing.query() == whole.query()


def test_the_prompt_stays_as_it_is_and_so_does_what_was_given_before() -> None:
    prompt = BLOCKS.prompt(range(20))
    before, growing = prompt.query(), prompt.growing()
    query, names = growing.query(), growing.chunks()
    kept = (query.hashes, query.tail_hashes, names.hashes)
    growing.append(range(20, 60))
    assert prompt.query() == before == query
    assert (query.hashes, query.tail_hashes, names.hashes) == kept
    assert growing.num_tokens == 60
    other = prompt.growing()
    other.append(range(100, 140))
    assert other.chain[:20] == growing.chain[:20]
    assert other.chain[20:] != growing.chain[20:]


@pytest.mark.parametrize("bad", [[1.5], ["1"], [2**31], [[1]], None, [True]])
def test_what_are_no_tokens_is_refused_and_changes_nothing(bad: Any) -> None:
    growing = BLOCKS.prompt(range(20)).growing()
    with pytest.raises(ValueError, match=r"tokens|token id"):
        growing.append(bad)
    growing.append(range(20, 40))
    assert growing.query() == BLOCKS.prompt(range(40)).query()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, ">i4"])
def test_tokens_may_be_of_any_kind(dtype: Any) -> None:
    growing = BLOCKS.prompt(range(20)).growing()
    growing.append(np.arange(20, 90, dtype=dtype))
    assert growing.query() == BLOCKS.prompt(range(90)).query()


class _Counting:
    """BLAKE2b that counts what it is given, and its digests."""

    def __init__(self) -> None:
        self.num_bytes = self.num_digests = 0

    def __call__(self, data: bytes = b"", **options: Any) -> Any:
        self.num_bytes += len(data)
        return self.counted(blake2b(data, **options))

    def counted(self, real: Any) -> Any:
        outer = self

        class Counted:
            def update(self, more: bytes) -> None:
                outer.num_bytes += len(more)
                real.update(more)

            def copy(self) -> Any:
                return outer.counted(real.copy())

            def digest(self) -> bytes:
                outer.num_digests += 1
                return bytes(real.digest())

        return Counted()


@pytest.mark.parametrize("num_tokens", [100, 100_000])
def test_each_token_is_hashed_once_and_copied_a_few_times_however_long_the_prompt_is(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = _Counting()
    monkeypatch.setattr(keys, "blake2b", counting)
    growing = BLOCKS.prompt(np.arange(num_tokens)).growing()
    # the list of hashes gets room for more, a part of its length each time
    growing.append(range(16))
    counting.num_bytes = counting.num_digests = 0
    first = growing.num_whole
    tracemalloc.start()
    for token in range(32):
        growing.append([token])
        growing.chunks(growing.num_whole, tail=False)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    chunks = growing.num_whole - first
    assert chunks == 2
    assert (counting.num_digests, counting.num_bytes) == (chunks, chunks * (20 + 4 + 16 * 4))
    assert most < 40_000, "nothing as long as the prompt's 400,000 bytes was made on the way"
