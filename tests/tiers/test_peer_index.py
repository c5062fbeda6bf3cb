"""The index of peers' chunks: what it finds, what it forgets, and its size."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.tiers.peers.index import PeerChunk, PeerIndex, digest_of, unpack

PEERS = range(3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "forget"]),
        st.integers(1, 40),
        st.sampled_from(PEERS),
        st.sampled_from([64, 1 << 33]),
    ),
    max_size=80,
)


@settings(max_examples=25)
@given(STEPS)
def test_it_finds_what_a_plain_dictionary_would(steps: list[tuple[str, int, int, int]]) -> None:
    index, plain = PeerIndex(), dict[int, tuple[int, set[int]]]()
    for what, number, peer, nbytes in steps:
        digest = number << 10 | 7  # one table, so that chunks collide
        size, peers = plain.get(digest, (nbytes, set()))
        if what == "add":
            index.add(digest, nbytes, peer=peer)
            plain[digest] = (max(size, nbytes) if peers - {peer} else nbytes, peers | {peer})
        elif what == "remove":
            index.remove(digest, peer=peer)
            plain[digest] = (size, peers - {peer})
        else:
            list(index.forget(peer))
            plain = {key: (size, peers - {peer}) for key, (size, peers) in plain.items()}
        plain = {key: found for key, found in plain.items() if found[1]}
        assert len(index) == len(plain)
    for number in range(1, 41):
        digest = number << 10 | 7
        expected = plain.get(digest)
        assert index.find(digest) == (
            None
            if expected is None
            else PeerChunk(expected[0], sum(1 << peer for peer in expected[1]))
        )
    for peer in PEERS:
        read = dict[int, int]()
        for part in index.parts(peer):
            read.update(zip(*unpack(part.digests, part.sizes), strict=True))
        assert read == {key: size for key, (size, peers) in plain.items() if peer in peers}
        assert index.count(peer) == len(read)


def test_a_peer_with_another_size_is_found_after_the_first_has_left() -> None:
    index = PeerIndex()
    for peer, nbytes in ((0, 1000), (1, 700)):  # raw in memory, lossless on a disk
        index.add(1, nbytes, peer=peer)
    assert index.find(1) == PeerChunk(1000, 0b11)
    index.remove(1, peer=0)
    found = index.find(1)
    assert found is not None
    assert found.peers == 0b10
    assert found.nbytes >= 700
    index.add(1, 700, peer=1)
    assert index.find(1) == PeerChunk(700, 0b10)


@pytest.mark.parametrize("num_chunks", [20_000, 28_000])
def test_a_chunk_of_many_peers_takes_at_most_48_bytes(num_chunks: int) -> None:
    index, random = PeerIndex(), Random(num_chunks)
    digests = [digest_of(random.randbytes(40)) for _ in range(num_chunks)]
    for digest in digests:
        for peer in (0, 5, 31):
            index.add(digest, 4 << 20, peer=peer)
    assert len(index) == num_chunks
    before = index.nbytes
    assert before <= 48 * num_chunks
    for digest in digests[num_chunks // 10 :]:
        for peer in (0, 5, 31):
            index.remove(digest, peer=peer)
    assert index.nbytes < before / 4  # memory is given back


def test_to_forget_takes_a_turn_only_for_each_table_with_chunks() -> None:
    index = PeerIndex()
    assert not list(index.forget(0))
    for number, peer in ((1, 0), (1025, 0), (2, 0), (3, 1)):  # two in one table
        index.add(number, 64, peer=peer)
    assert len(list(index.forget(0))) == 2
    assert (len(index), index.count(0), index.count(1)) == (1, 0, 1)


def test_impossible_sizes_are_not_kept() -> None:
    index = PeerIndex()
    index.add(1, 0, peer=0)
    index.add(2, 1 << 40, peer=0)
    assert len(index) == 0


@pytest.mark.parametrize(("digests", "sizes"), [(b"1234567", b""), (bytes(16), bytes(8))])
def test_parts_of_wrong_lengths_are_refused(digests: bytes, sizes: bytes) -> None:
    with pytest.raises(ValueError, match="bytes of digests"):
        unpack(digests, sizes)


@pytest.mark.parametrize(("digest", "nbytes"), [(0, 64), (7, 0), (7, 1 << 40)])
def test_a_chunk_that_cannot_be_is_ignored(digest: int, nbytes: int) -> None:
    index = PeerIndex()
    before = index.nbytes
    for _ in range(100):
        index.add(digest, nbytes, peer=0)
    assert (len(index), index.count(0), index.nbytes) == (0, 0, before)


def test_its_bytes_are_those_of_its_arrays() -> None:
    index = PeerIndex()
    for number in range(1, 50_000):
        index.add(number * 0x9E3779B97F4A7C15 % (1 << 64), number, peer=0)
    arrays = (
        values
        for table in index._tables
        for values in (table.digests, table.sizes_low, table.sizes_high, table.peers)
    )
    assert index.nbytes == sum(values.itemsize * len(values) for values in arrays)
