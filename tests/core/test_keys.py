"""Keys are the same bytes everywhere, and differ whenever anything differs that KV depends on."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvhold.core.encoding import canonical
from kvhold.core.keys import (
    HASH_BYTES,
    KEY_BYTES,
    NAMESPACE_BYTES,
    ChunkNames,
    KeyParts,
    Namespace,
    Prompt,
    make_key,
    split_key,
)
from kvhold.core.layout import Group, Layout
from kvhold.core.naming import Facts
from kvhold.core.token_ids import as_tokens

GROUP = Group(layers=2, planes=2, heads=2, head_dim=8, dtype="float16")
LAYOUT = Layout((GROUP,), tokens_per_chunk=4, tail_tokens=1)
SPACE = Namespace(model="llama", layout=LAYOUT)
BLOCKS = Namespace(model="llama", layout=Layout((GROUP,), tokens_per_chunk=16, tail_tokens=4))
NO_TAILS = Namespace(model="llama", layout=Layout((GROUP,), tokens_per_chunk=4, tail_tokens=0))

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)


def hashes(prompt: Prompt) -> list[bytes]:
    return [prompt.hash_at(i) for i in range(prompt.num_whole)]


def tail_hashes(prompt: Prompt) -> list[bytes]:
    return [prompt.tails[i : i + HASH_BYTES] for i in range(0, len(prompt.tails), HASH_BYTES)]


class TestSameEverywhere:
    PROGRAM = """
import json, sys
import numpy as np
from kvhold.core.encoding import canonical
from kvhold.core.keys import Namespace
from kvhold.core.layout import Group, Layout
group = Group(layers=2, planes=2, heads=2, head_dim=8, dtype="float16", rotary="theta=1e4")
layout = Layout((group,), tokens_per_chunk=4)
tags = (("b", "2"), ("a", "1"))
space = Namespace(model="llama", layout=layout, lora="größe", tags=tags, cache_salt="salt")
prompt = space.prompt(np.arange(11), extras={0: canonical(["image", b"123", None, 1.5])})
key = prompt.chunk_key(1, group=3, shard=5)
print(layout.fingerprint.hex(), space.digest.hex(), key.hex(), prompt.tails.hex())
"""

    def keys_with(self, seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", self.PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def test_processes_with_different_hash_seeds_give_the_same_keys(self) -> None:
        first, second = self.keys_with("0"), self.keys_with("12345")
        assert first == second
        assert len(first.split()[2]) == 2 * KEY_BYTES


class TestNamespace:
    OTHER: dict[str, Any] = {  # noqa: RUF012
        "model": "llama2",
        "layout": replace(LAYOUT, tail_tokens=2),
        "revision": "main",
        "dtype": "float16",
        "quantization": "fp8",
        "shards": 2,
        "lora": "adapter",
        "cache_salt": "salt",
        "tags": (("name", "value"),),
        "hashing": "engine-1",
        "facts": Facts.of({"engine.seed": "7"}),
        "is_of_spans": True,
    }

    def test_every_field_is_covered_here(self) -> None:
        assert set(self.OTHER) | {"title"} == {f.name for f in fields(Namespace)}

    @pytest.mark.parametrize("field", OTHER)
    def test_every_field_changes_every_key(self, field: str) -> None:
        other = replace(SPACE, **{field: self.OTHER[field]})
        text = np.arange(9)
        ours, theirs = SPACE.prompt(text), other.prompt(text)
        assert SPACE.digest != other.digest
        assert not set(hashes(ours)).intersection(hashes(theirs))
        assert not set(tail_hashes(ours)).intersection(tail_hashes(theirs))
        assert ours.chunk_key(0)[:NAMESPACE_BYTES] != theirs.chunk_key(0)[:NAMESPACE_BYTES]

    def test_the_same_text_in_two_fields_is_not_the_same(self) -> None:
        changes: list[dict[str, Any]] = [
            {field: "x"}
            for field in ("revision", "dtype", "quantization", "lora", "cache_salt", "hashing")
        ]
        named = [replace(SPACE, **change) for change in changes]
        named += [replace(SPACE, tags=(("x", ""),)), replace(SPACE, tags=(("", "x"),))]
        assert len({space.digest for space in named}) == len(named)

    @pytest.mark.parametrize(
        "separator",
        ["@", "%", "/", ":", "\x00", ",", "|", "-", "=", "\n", " ", "é", "\U0001f999", '"', "\\"],
    )
    def test_no_character_in_a_name_joins_it_to_the_next(self, separator: str) -> None:
        spaces = [
            Namespace(model=f"a{separator}b", revision="c", layout=LAYOUT),
            Namespace(model="a", revision=f"b{separator}c", layout=LAYOUT),
            Namespace(model=f"a{separator}b{separator}c", layout=LAYOUT),
            Namespace(model="a", revision="b", dtype="c", layout=LAYOUT),
            Namespace(model="a", layout=LAYOUT, tags=((f"b{separator}c", ""),)),
            Namespace(model="a", layout=LAYOUT, tags=(("b", f"{separator}c"),)),
            Namespace(model="a", layout=LAYOUT, tags=((f"b{separator}", "c"),)),
            Namespace(model="a", layout=LAYOUT, tags=(("b", ""), ("c", ""))),
            Namespace(model=f"a{separator}", layout=LAYOUT),
            Namespace(model="a", layout=LAYOUT),
        ]
        assert len({space.digest for space in spaces}) == len(spaces)

    def test_names_that_look_alike_are_different(self) -> None:
        composed, decomposed = "caf\u00e9", "cafe\u0301"
        assert (
            Namespace(model=composed, layout=LAYOUT).digest
            != Namespace(model=decomposed, layout=LAYOUT).digest
        )

    def test_a_name_that_is_no_valid_unicode_still_has_a_digest(self) -> None:
        assert (
            Namespace(model="\udcff", layout=LAYOUT).digest
            != Namespace(model="?", layout=LAYOUT).digest
        )

    def test_tags_count_in_any_order(self) -> None:
        tags = (("a", "1"), ("b", "2"), ("c", "3"))
        assert replace(SPACE, tags=tags).digest == replace(SPACE, tags=tags[::-1]).digest
        assert (
            len(
                {
                    replace(SPACE, tags=some).digest
                    for n in range(4)
                    for some in combinations(tags, n)
                }
            )
            == 8
        )

    def test_equal_namespaces_have_equal_digests(self) -> None:
        assert (
            SPACE.digest
            == Namespace(model="llama", layout=Layout((replace(GROUP),), tokens_per_chunk=4)).digest
        )
        assert len(SPACE.digest) == NAMESPACE_BYTES


class TestNarrowed:
    def test_by_nothing_is_the_namespace_itself(self) -> None:
        assert SPACE.narrowed() is SPACE

    def test_by_a_lora_or_a_salt_or_tags_is_another(self) -> None:
        narrower = [
            SPACE.narrowed(lora="x"),
            SPACE.narrowed(cache_salt="x"),
            SPACE.narrowed(tags=[("x", "")]),
            SPACE.narrowed(lora="x", cache_salt="x"),
        ]
        assert len({SPACE.digest, *(space.digest for space in narrower)}) == 5

    def test_is_what_naming_it_at_once_gives(self) -> None:
        assert SPACE.narrowed(lora="l", cache_salt="s", tags=[("t", "1")]) == replace(
            SPACE, lora="l", cache_salt="s", tags=(("t", "1"),)
        )

    def test_keeps_what_it_is_not_told(self) -> None:
        space = replace(SPACE, lora="l", cache_salt="s", tags=(("a", "1"),))
        assert space.narrowed(tags=[("b", "2")]) == replace(space, tags=(("a", "1"), ("b", "2")))
        assert space.narrowed(lora="other").cache_salt == "s"

    def test_step_by_step_is_the_same_as_at_once(self) -> None:
        at_once = SPACE.narrowed(lora="l", cache_salt="s", tags=[("a", "1"), ("b", "2")])
        by_steps = (
            SPACE.narrowed(tags=[("b", "2")])
            .narrowed(cache_salt="s")
            .narrowed(lora="l", tags=[("a", "1")])
        )
        assert at_once.digest == by_steps.digest


class TestChain:
    @given(tokens, tokens)
    def test_a_prefix_of_the_text_has_a_prefix_of_the_chain(
        self, prefix: list[int], rest: list[int]
    ) -> None:
        shorter, longer = SPACE.prompt(prefix), SPACE.prompt(prefix + rest)
        assert longer.chain.startswith(shorter.chain)
        assert len(shorter.chain) == shorter.num_whole * HASH_BYTES == len(prefix) // 4 * HASH_BYTES

    @given(tokens, st.data())
    def test_one_other_token_changes_its_chunk_and_all_after_it(
        self, text: list[int], data: st.DataObject
    ) -> None:
        assume(len(text) >= 4)
        at = data.draw(st.integers(0, len(text) - 1))
        other = list(text)
        other[at] ^= 1
        ours, theirs = SPACE.prompt(text), SPACE.prompt(other)
        for i, (a, b) in enumerate(zip(hashes(ours), hashes(theirs), strict=True)):
            assert (a == b) == (i < at // 4)
        assert not set(tail_hashes(ours)).intersection(tail_hashes(theirs))

    @given(tokens)
    def test_the_same_chunk_at_another_place_has_another_hash(self, text: list[int]) -> None:
        chunk = (text + [0] * 4)[:4]
        prompt = SPACE.prompt(chunk * 6)
        assert len(set(hashes(prompt))) == 6

    def test_chunks_of_another_size_share_no_hash(self) -> None:
        eight = Namespace(model="llama", layout=replace(LAYOUT, tokens_per_chunk=8))
        assert not set(hashes(SPACE.prompt(range(16)))).intersection(
            hashes(eight.prompt(range(16)))
        )

    def test_an_empty_prompt_has_nothing(self) -> None:
        prompt = SPACE.prompt([])
        assert (prompt.num_whole, prompt.chain, prompt.tails, prompt.tail_lengths) == (
            0,
            b"",
            b"",
            (),
        )
        assert len(prompt.chunks()) == 0

    def test_extras_change_their_chunk_and_all_after_it(self) -> None:
        text = range(16)
        plain, image, other = (
            hashes(SPACE.prompt(text, extras)) for extras in (None, {2: b"image"}, {2: b"other"})
        )
        assert plain[:2] == image[:2] == other[:2]
        assert len({*plain[2:], *image[2:], *other[2:]}) == 6

    def test_the_place_of_an_extra_counts(self) -> None:
        at_0, at_1 = (SPACE.prompt(range(8), {i: b"image"}) for i in (0, 1))
        assert at_0.hash_at(1) != at_1.hash_at(1)

    def test_extras_of_the_tail_change_the_tail_alone(self) -> None:
        plain, image = SPACE.prompt(range(10)), SPACE.prompt(range(10), {2: b"image"})
        assert plain.chain == image.chain
        assert plain.tails != image.tails

    @given(
        st.lists(st.integers(0, 255), min_size=4, max_size=4),
        st.binary(max_size=12),
        st.binary(max_size=12),
    )
    def test_different_extras_never_meet(self, text: list[int], one: bytes, other: bytes) -> None:
        assert (SPACE.prompt(text, {0: one}).chain == SPACE.prompt(text, {0: other}).chain) == (
            one == other
        )

    def test_extra_bytes_are_unambiguous(self) -> None:
        values: list[Any] = [
            None,
            b"",
            "",
            "a",
            b"a",
            ["a"],
            [["a"]],
            ["a", "b"],
            ["ab"],
            1,
            "1",
            True,
            1.0,
            [1, [2]],
            [[1], 2],
        ]
        assert len(set(map(canonical, values))) == len(values)


class TestTails:
    def test_where_tails_may_end_anywhere_the_prompts_end_is_the_only_one(self) -> None:
        prompt = SPACE.prompt(range(11))
        assert (prompt.num_whole, prompt.tail_lengths, len(prompt.tails)) == (2, (3,), HASH_BYTES)

    def test_where_tails_end_with_blocks_each_block_is_one(self) -> None:
        prompt = BLOCKS.prompt(range(16 + 13))
        assert (prompt.num_whole, prompt.tail_lengths) == (1, (4, 8, 12))
        assert len(set(tail_hashes(prompt))) == 3

    @pytest.mark.parametrize(
        ("length", "tails"),
        [(0, ()), (3, ()), (4, (4,)), (15, (4, 8, 12)), (16, ()), (17, ()), (20, (4,))],
    )
    def test_a_block_that_is_not_full_is_no_tail(self, length: int, tails: tuple[int, ...]) -> None:
        assert BLOCKS.prompt(range(length)).tail_lengths == tails

    def test_a_hand_over_ends_with_the_text(self) -> None:
        prompt = BLOCKS.prompt(range(2 * 16 + 9))
        end = prompt.end()
        assert end is not None
        assert (end.tail_tokens, end.first_token, end.parent) == (9, 32, prompt.hash_at(1))
        assert end.hashes not in tail_hashes(prompt)
        query = prompt.query(to_end=True)
        assert query.tail_lengths == (4, 8, 9)
        assert query.tail_hashes == prompt.tails + end.hashes
        assert prompt.query().tail_lengths == (4, 8), "other requests end with a block"

    @pytest.mark.parametrize("length", [0, 4, 16, 24])
    def test_a_block_has_no_other_end(self, length: int) -> None:
        prompt = BLOCKS.prompt(range(length))
        assert prompt.end() is None
        assert prompt.query(to_end=True) == prompt.query()

    def test_every_token_is_an_end_of_its_own(self) -> None:
        ends = [BLOCKS.prompt(range(length)).end() for length in range(17, 20)]
        assert len({end.hashes for end in ends if end is not None}) == 3
        assert SPACE.prompt(range(11)).end() is None, "its tails end there, too"
        assert NO_TAILS.prompt(range(7)).end() is None

    def test_a_layout_without_tails_has_none(self) -> None:
        prompt = NO_TAILS.prompt(range(7))
        assert (prompt.tail_lengths, prompt.tails) == ((), b"")
        assert len(prompt.chunks()) == 1

    def test_a_prompt_of_whole_chunks_has_no_tail(self) -> None:
        assert SPACE.prompt(range(8)).tail_lengths == ()

    def test_a_stored_tail_is_found_by_the_longer_prompt(self) -> None:
        """The tail of a prompt is one of the candidates of every prompt that goes on from there, up
        to the end of the chunk.
        """
        stored = BLOCKS.prompt(range(16 + 8))
        longer = BLOCKS.prompt(range(16 + 15))
        assert tail_hashes(longer)[1] == tail_hashes(stored)[1]

    def test_a_tail_is_not_a_whole_chunk_of_a_smaller_size(self) -> None:
        tail = tail_hashes(BLOCKS.prompt(range(4)))[0]
        whole = (
            Namespace(model="llama", layout=replace(BLOCKS.layout, tokens_per_chunk=4))
            .prompt(range(4))
            .hash_at(0)
        )
        assert tail != whole

    def test_an_extra_is_not_one_more_token(self) -> None:
        assert (
            SPACE.prompt([1, 2], {0: (3).to_bytes(4, "little")}).tails
            != SPACE.prompt([1, 2, 3]).tails
        )

    @given(tokens)
    def test_no_tail_meets_another_or_a_whole_chunk(self, text: list[int]) -> None:
        prompts = [SPACE.prompt(text[:n]) for n in range(len(text) + 1)]
        found = {h for prompt in prompts for h in (*hashes(prompt), *tail_hashes(prompt))}
        assert len(found) == len(text)


class TestTokens:
    TEXT = (0, 1, 5, -1, 2**31 - 1, -(2**31), 7, 8, 9)

    @pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4", ">i8", np.dtype("<i4")])
    def test_the_dtype_of_the_array_does_not_matter(self, dtype: Any) -> None:
        prompt = SPACE.prompt(np.array(self.TEXT, dtype=dtype))
        assert (prompt.chain, prompt.tails) == (
            SPACE.prompt(list(self.TEXT)).chain,
            SPACE.prompt(tuple(self.TEXT)).tails,
        )

    @pytest.mark.parametrize(
        "dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.uint64]
    )
    def test_narrow_and_unsigned_integers_are_integers(self, dtype: Any) -> None:
        assert SPACE.prompt(np.arange(9, dtype=dtype)).chain == SPACE.prompt(range(9)).chain

    def test_strides_do_not_matter(self) -> None:
        table = np.arange(30, dtype=np.int32).reshape(10, 3)
        assert SPACE.prompt(table[:, 1]).chain == SPACE.prompt(list(range(1, 30, 3))).chain
        assert SPACE.prompt(np.arange(9)[::-1]).chain == SPACE.prompt(range(8, -1, -1)).chain

    def test_read_only_arrays_are_welcome(self) -> None:
        array = np.frombuffer(np.arange(9, dtype=np.int32).tobytes(), dtype=np.int32)
        assert SPACE.prompt(array).chain == SPACE.prompt(range(9)).chain

    def test_an_array_that_its_owner_writes_to_after_it_was_hashed_changes_no_name(self) -> None:
        array = np.arange(9, dtype=np.int32)
        prompt, same = SPACE.prompt(array), SPACE.prompt([*range(9)])
        assert prompt.chain == same.chain
        array[:] = 0
        assert prompt.tails == same.tails

    def test_an_int32_array_is_not_copied(self) -> None:
        array = np.arange(9, dtype=np.int32)
        assert as_tokens(array) is array or as_tokens(array).base is array

    @pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int64), np.empty(0, np.float32)])
    def test_no_tokens_are_no_tokens_of_any_dtype(self, empty: Any) -> None:
        assert as_tokens(empty).shape == (0,)
        assert as_tokens(empty).dtype == np.int32

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param([1.0, 2.0], id="floats"),
            pytest.param([1, 2.0], id="a float among them"),
            pytest.param([1, "2"], id="a text among them"),
            pytest.param([1, 2**31], id="the last one too large"),
            pytest.param([[1, 2], [3, 4]], id="two axes"),
            pytest.param(5, id="a scalar"),
            pytest.param("12", id="text"),
            pytest.param(["1", "2"], id="texts"),
            pytest.param([True, False], id="booleans"),
            pytest.param([None], id="None"),
            pytest.param([1, None], id="a hole"),
            pytest.param([2**31], id="one too large"),
            pytest.param([-(2**31) - 1], id="one too small"),
            pytest.param([2**63], id="beyond int64"),
            pytest.param([2**64], id="beyond uint64"),
            pytest.param(np.array([2**32 - 1], np.uint32), id="unsigned"),
            pytest.param([[1], [2, 3]], id="ragged"),
        ],
    )
    def test_what_are_no_tokens_is_refused(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=r"tokens|token id|inhomogeneous"):
            SPACE.prompt(bad)


class TestNames:
    def test_whole_chunks_and_the_longest_tail(self) -> None:
        prompt = BLOCKS.prompt(range(2 * 16 + 9))
        names = prompt.chunks()
        assert names == ChunkNames(BLOCKS.digest, prompt.chain + tail_hashes(prompt)[1], 8, 0)
        assert len(names) == 3
        assert names.num_tokens(BLOCKS.layout).tolist() == [16, 16, 8]

    def test_without_the_tail(self) -> None:
        prompt = BLOCKS.prompt(range(2 * 16 + 9))
        assert prompt.chunks(tail=False) == ChunkNames(BLOCKS.digest, prompt.chain, 0, 0)
        assert prompt.chunks(tail=False).num_tokens(BLOCKS.layout).tolist() == [16, 16]

    def test_from_a_chunk_on_they_know_their_position_and_what_they_continue(self) -> None:
        prompt = BLOCKS.prompt(range(3 * 16 + 4))
        assert prompt.chunks(1) == ChunkNames(
            BLOCKS.digest, prompt.chain[HASH_BYTES:] + prompt.tails, 4, 16, prompt.hash_at(0)
        )
        assert prompt.chunks(3) == ChunkNames(BLOCKS.digest, prompt.tails, 4, 48, prompt.hash_at(2))
        assert prompt.chunks(1, last=2, tail=False) == ChunkNames(
            BLOCKS.digest, prompt.hash_at(1), 0, 16, prompt.hash_at(0)
        )
        assert len(prompt.chunks(2, last=2, tail=False)) == 0

    @pytest.mark.parametrize("first", [-1, 4, 100])
    def test_from_beyond_the_whole_chunks_is_a_bug(self, first: int) -> None:
        with pytest.raises(AssertionError):
            BLOCKS.prompt(range(3 * 16 + 4)).chunks(first)

    @pytest.mark.parametrize("chunk", [-1, 3])
    def test_a_chunk_that_is_not_whole_has_no_key(self, chunk: int) -> None:
        with pytest.raises(AssertionError):
            BLOCKS.prompt(range(3 * 16 + 4)).chunk_key(chunk)

    def test_a_query_asks_for_all_of_it(self) -> None:
        space = replace(BLOCKS, shards=3)
        prompt = space.prompt(range(16 + 9))
        query = prompt.query()
        assert (query.namespace, query.layout, query.shards) == (
            space.digest,
            space.layout.fingerprint,
            3,
        )
        assert (query.hashes, query.tail_hashes, query.tail_lengths) == (
            prompt.chain,
            prompt.tails,
            (4, 8),
        )

    def test_prompts_can_be_compared_and_kept_in_sets(self) -> None:
        one, other = SPACE.prompt(range(9)), SPACE.prompt(range(9))
        assert one == one
        assert len({one, other}) == 2


class TestKey:
    @given(
        st.binary(min_size=NAMESPACE_BYTES, max_size=NAMESPACE_BYTES),
        st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
        st.integers(0, 0xFFFF),
        st.integers(0, 0xFFFF),
    )
    def test_a_key_comes_apart_as_it_was_made(
        self, namespace: bytes, chain_hash: bytes, group: int, shard: int
    ) -> None:
        key = make_key(namespace, chain_hash, group, shard)
        assert len(key) == KEY_BYTES
        assert split_key(key) == KeyParts(namespace, chain_hash, group, shard)

    def test_a_prompts_keys_carry_group_and_shard(self) -> None:
        prompt = SPACE.prompt(range(9))
        assert split_key(prompt.chunk_key(1, group=2, shard=3)) == KeyParts(
            SPACE.digest, prompt.hash_at(1), 2, 3
        )
        assert (
            len({prompt.chunk_key(c, g, s) for c in range(2) for g in range(3) for s in range(3)})
            == 18
        )

    @pytest.mark.parametrize(("group", "shard"), [(0x10000, 0), (0, 0x10000), (-1, 0), (0, -1)])
    def test_group_and_shard_have_two_bytes_each(self, group: int, shard: int) -> None:
        with pytest.raises(AssertionError):
            make_key(bytes(NAMESPACE_BYTES), bytes(HASH_BYTES), group, shard)

    @pytest.mark.parametrize("length", [0, KEY_BYTES - 1, KEY_BYTES + 1])
    def test_what_is_not_as_long_as_a_key_is_none(self, length: int) -> None:
        with pytest.raises(ValueError, match=f"{KEY_BYTES} bytes, this has {length}"):
            split_key(bytes(length))


def test_a_requests_salt_narrows_the_namespaces_own_and_does_not_replace_it() -> None:
    tenant = Namespace(model="m", layout=LAYOUT, cache_salt="tenant")
    assert (
        tenant.narrowed(cache_salt="request").digest
        != Namespace(model="m", layout=LAYOUT, cache_salt="request").digest
    )
    assert tenant.narrowed(cache_salt="request").digest != tenant.digest
