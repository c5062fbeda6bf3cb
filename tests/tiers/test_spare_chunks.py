"""The last copy of a fleet is evicted last."""

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from kvhold.core.metrics import Metrics
from kvhold.net.stream import Address
from kvhold.testing.tier import make_key
from kvhold.tiers.peers.directory import Own
from kvhold.tiers.peers.index import PeerIndex, digest_of
from kvhold.tiers.peers.keepers import keeper_of
from kvhold.tiers.policies import POLICIES, make_policy
from kvhold.tiers.ram import NEVER, RamTier, Wanted
from kvhold.tiers.spare_chunks import (
    _LOOKS,
    _LOOKS_A_CHUNK,
    KEPT_ELSEWHERE,
    KEPT_HERE,
    ONLY_HERE,
)
from tests.cache.scripted import arena_of
from tests.tiers.peer_places import eventually, following, served

NBYTES = 4096
NUM_PLACES = 20


class Memory:
    """A memory of 20 chunks, and what peers have of them."""

    def __init__(self, policy: str = "lru", num_places: int = NUM_PLACES) -> None:
        self.ram = RamTier(arena_of(num_places * NBYTES), make_policy(policy), Metrics())
        self.copies: dict[int, int] = {}
        self.asked: list[int] = []
        self.roots: dict[int, bytes] = {}
        self.numbers = {make_key(number): number for number in range(1000)}
        self.ram.spares.copies_of = self.copies_of

    def copies_of(self, key: bytes, root: bytes) -> int:
        number = self.numbers[key]
        self.asked.append(number)
        self.roots[number] = root
        return self.copies.get(number, ONLY_HERE)

    def store(self, *numbers: int, parents: dict[int, int] | None = None) -> bool:
        """Together."""
        wanted = [
            Wanted(make_key(number), NBYTES, None if up is None else make_key(up))
            for number in numbers
            for up in ((parents or {}).get(number),)
        ]
        entries = self.ram.reserve_all(wanted, num_tokens=1, first_token=0, expires_at=NEVER)
        for entry in entries or ():
            self.ram.commit(entry)
        return entries is not None

    def has(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if self.ram.find(make_key(number)) is not None]


def filled(policy: str = "lru", **copies: int) -> Memory:
    memory = Memory(policy)
    for number in range(NUM_PLACES):
        assert memory.store(number)
    memory.copies = {int(number[1:]): copy for number, copy in copies.items()}
    return memory


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_peer_keeps_goes_first(policy: str) -> None:
    memory = filled(policy, c3=KEPT_ELSEWHERE, c7=KEPT_ELSEWHERE)
    for number in (20, 21):
        assert memory.store(number)
    assert memory.has(range(NUM_PLACES)) == [n for n in range(NUM_PLACES) if n not in (3, 7)]


def test_what_this_node_keeps_of_several_goes_next_and_last_copies_in_the_policys_order() -> None:
    memory = filled(c5=KEPT_HERE, c9=KEPT_ELSEWHERE)
    evicted = []
    for number in range(20, 24):
        before = set(memory.has(range(NUM_PLACES)))
        assert memory.store(number)
        evicted += sorted(before - set(memory.has(range(NUM_PLACES))))
    assert evicted == [9, 5, 0, 1]


def test_chunks_that_are_stored_together_evict_what_peers_have_and_then_the_oldest() -> None:
    memory = filled(c4=KEPT_ELSEWHERE, c12=KEPT_HERE)
    assert memory.store(20, 21, 22, 23)
    assert memory.has(range(NUM_PLACES)) == [n for n in range(2, NUM_PLACES) if n not in (4, 12)]


def test_a_pinned_chunk_and_its_prefix_stay_though_a_peer_keeps_them() -> None:
    memory = Memory()
    chain = dict(zip(range(1, 5), range(4), strict=True))
    for number in range(5):
        assert memory.store(number, parents=chain)
    for number in range(5, NUM_PLACES):
        assert memory.store(number)
    memory.copies = dict.fromkeys(range(5), KEPT_ELSEWHERE)
    entry = memory.ram.find(make_key(2))
    assert entry is not None
    memory.ram.hold(entry)
    for number in range(20, 23):
        assert memory.store(number)
    assert memory.has(range(6)) == [0, 1, 2], "3 and 4, and then the oldest of the others"
    memory.ram.unpin(entry)


def test_a_whole_prompt_has_one_keeper() -> None:
    memory = Memory()
    chain = dict(zip(range(1, 10), range(9), strict=True))
    assert memory.store(0)
    assert memory.store(*range(1, 6), parents=chain)
    for number in range(6, 10):
        assert memory.store(number, parents=chain)
    for number in range(10, NUM_PLACES):
        assert memory.store(number)
    memory.copies = dict.fromkeys(range(10), KEPT_ELSEWHERE)
    assert memory.store(*range(20, 30))
    assert memory.has(range(NUM_PLACES)) == [*range(10, NUM_PLACES)]
    assert {memory.roots[number] for number in range(10)} == {make_key(0)}
    assert memory.roots.get(10, make_key(10)) == make_key(10)


def test_few_candidates_are_looked_at() -> None:
    memory = Memory(num_places=1000)
    for number in range(1000 - 1):
        assert memory.store(number)
    looks = _LOOKS + _LOOKS_A_CHUNK
    memory.copies = {looks + 5: KEPT_ELSEWHERE}
    assert memory.store(999)
    assert not memory.asked, "there was room"
    memory.numbers[make_key(1000)] = 1000
    assert memory.store(1000)
    assert memory.asked == list(range(looks))
    assert not memory.has([0]), "the oldest goes"


def test_what_cannot_be_stored_evicts_nothing() -> None:
    memory = filled(c3=KEPT_ELSEWHERE)
    held = [memory.ram.find(make_key(number)) for number in range(1, NUM_PLACES) if number != 3]
    memory.ram.hold_all([entry for entry in held if entry is not None])
    assert not memory.store(20, 21, 22)
    assert len(memory.has(range(NUM_PLACES))) == NUM_PLACES
    assert memory.store(20, 21)
    assert memory.has((0, 3)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_any_order_and_any_copies_free_what_is_wanted_as_the_policy_does(policy: str) -> None:
    random = Random(7)
    memory, plain = Memory(policy), Memory(policy)
    plain.ram.spares.copies_of = None
    for number in range(300):
        memory.copies = {
            n: random.choice([ONLY_HERE, KEPT_HERE, KEPT_ELSEWHERE]) for n in range(number)
        }
        several = range(3 * number, 3 * number + random.randint(1, 3))
        parents = dict(zip(several[1:], several, strict=False))
        assert memory.store(*several, parents=parents) == plain.store(*several, parents=parents)
        assert memory.ram.used_bytes == plain.ram.used_bytes
        assert memory.has(several) == list(several)


def test_all_hosts_choose_the_same_keeper_and_each_keeps_its_part() -> None:
    hosts = [Random(number).getrandbits(60) | 1 for number in range(4)]
    shuffled = sorted(hosts, key=str)
    keepers = {digest: keeper_of(digest, hosts) for digest in range(1, 4001)}
    assert all(keeper_of(digest, shuffled) == one for digest, one in keepers.items())
    assert all(800 < num < 1200 for num in Counter(keepers.values()).values())
    left = hosts[1:]
    for digest, keeper in keepers.items():
        if keeper != hosts[0]:
            assert keeper_of(digest, left) == keeper, "nothing moves that need not"


def test_the_peers_of_a_chunk_are_read_while_the_table_changes() -> None:
    index = PeerIndex()
    index.add(5, 100, peer=3)
    assert (index.peers_of(5), index.peers_of(6)) == (1 << 3, 0)
    table: Any = index._tables[5]
    table.peers = table.peers[:0]
    assert index.peers_of(5) == 0


@pytest.mark.asyncio
async def test_only_peers_that_are_followed_and_cleared_have_a_copy() -> None:
    key = make_key(1)
    async with served() as place, following(place.port, forget_s=60) as tier:
        place.feed.incarnation = theirs = 3
        place.put(key, bytes(100))
        assert tier.copies_of(key, key) == ONLY_HERE
        await tier.check()
        await eventually(lambda: tier.copies_of(key, key) != ONLY_HERE)
        assert tier.copies_of(key, key) == KEPT_ELSEWHERE, "this node serves no peers"
        kept = Counter[int]()
        for number in range(200):
            tier.serve_as(Own(incarnation=number * 7919 + 1))
            own = tier._roster.own.incarnation
            is_here = keeper_of(digest_of(key), (own, theirs)) == own
            assert tier.copies_of(key, key) == (KEPT_HERE if is_here else KEPT_ELSEWHERE)
            kept[tier.copies_of(key, key)] += 1
        assert min(kept[KEPT_HERE], kept[KEPT_ELSEWHERE]) > 20
        tier.advance(key[:16])
        assert tier.copies_of(key, key) == ONLY_HERE, "it has not made this host's clear"
    assert tier.peers[0].address == Address("127.0.0.1", place.port)


@pytest.mark.asyncio
async def test_a_lost_peer_has_no_copy() -> None:
    key = make_key(1)
    async with served() as place, following(place.port, forget_s=60) as tier:
        place.put(key, bytes(100))
        await tier.check()
        await eventually(lambda: tier.copies_of(key, key) == KEPT_ELSEWHERE)
        await place.server.stop()
        await eventually(lambda: tier.copies_of(key, key) == ONLY_HERE)
        assert tier.num_chunks == 1
