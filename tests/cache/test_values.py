"""What a chunk is worth to an eviction policy, by setting, place and layout."""

from itertools import pairwise

import pytest

from kvhold.cache.state import new_state
from kvhold.cache.transfer.speeds import TierSpeed
from kvhold.cache.values import ChunkValues, ValueRun
from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError
from kvhold.core.keys import HASH_BYTES, Namespace, Query, split_hashes
from kvhold.core.layout import Group, Layout
from kvhold.core.planning import ComputeCost
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.base import NEUTRAL, NUM_VALUES
from kvhold.tiers.policies.ghosts import unpack

WIDE = Layout(groups=(Group(layers=1, planes=2, heads=1, head_dim=64, dtype="uint8"),))
NARROW = Layout(groups=(Group(layers=1, planes=2, heads=1, head_dim=16, dtype="uint8"),))
SIZE = WIDE.tokens_per_chunk
LINEAR = ComputeCost("a", 100 * SIZE, token_s=1e-3)
SQUARE = ComputeCost("a", 100 * SIZE, token_s=1e-3, pair_s=1e-6)


def a_query(layout: Layout, *, name: str = "a", shards: int = 1, chunks: int = 100) -> Query:
    namespace = Namespace(model=name, layout=layout)
    hashes = b"".join(number.to_bytes(HASH_BYTES, "big") for number in range(chunks))
    return Query(namespace.digest, layout.fingerprint, shards, hashes)


def a_tier(*, byte_s: float) -> TierSpeed:
    speed, now_s = TierSpeed(), 0.0
    for number in range(1, 40):
        nbytes = number * 1_000_000
        speed.requested(nbytes, now_s)
        now_s += nbytes * byte_s
        speed.ended(nbytes, now_s)
        now_s += 10.0
    assert speed.costs is not None
    return speed


@pytest.mark.parametrize("policy_for", ["tokens", "bytes"])
def test_a_place_in_the_prompt_changes_neither_tokens_nor_bytes(policy_for: str) -> None:
    values = ChunkValues(policy_for)
    assert values.runs(a_query(WIDE), WIDE, 100, SQUARE) == [ValueRun(0, 100, NEUTRAL)]


def test_tokens_of_fewer_bytes_are_worth_more() -> None:
    values = ChunkValues("tokens")
    assert values.runs(a_query(WIDE), WIDE, 9) == [ValueRun(0, 9, NEUTRAL)]
    assert values.runs(a_query(NARROW), NARROW, 9) == [ValueRun(0, 9, NEUTRAL + 4)]  # 4 times
    two = a_query(WIDE, shards=2)
    assert values.runs(two, WIDE, 9) == [ValueRun(0, 9, NEUTRAL - 2)]


def test_bytes_are_worth_the_same_in_each_layout() -> None:
    values = ChunkValues("bytes")
    assert values.runs(a_query(WIDE), WIDE, 9) == values.runs(a_query(NARROW), NARROW, 9)


def test_ttft_grows_with_the_place_as_attention_does() -> None:
    runs = ChunkValues("ttft").runs(a_query(WIDE), WIDE, 100, SQUARE)
    assert runs[0].first == 0
    assert runs[-1].last == 100
    assert all(one.last == other.first for one, other in pairwise(runs))
    assert [run.value for run in runs] == sorted({run.value for run in runs})
    # the last chunk takes 1 + 12.7 ms a token, the first one 1.06
    assert (runs[0].value, runs[-1].value) == (NEUTRAL, NEUTRAL + 7)
    assert ChunkValues("ttft").runs(a_query(WIDE), WIDE, 100, LINEAR) == [ValueRun(0, 100, NEUTRAL)]


def test_ttft_is_no_more_than_a_tier_below_takes() -> None:
    chunk_bytes = WIDE.chunk_bytes(0, SIZE)
    as_computed = SIZE * 4e-3 / chunk_bytes
    below = ChunkValues("ttft", [TierSpeed(), a_tier(byte_s=as_computed)])
    runs = below.runs(a_query(WIDE), WIDE, 100, SQUARE)
    assert (runs[0].value, runs[-1].value) == (NEUTRAL, NEUTRAL + 4)
    fast = ChunkValues("ttft", [a_tier(byte_s=as_computed / 100)])
    assert fast.runs(a_query(WIDE), WIDE, 100, SQUARE) == [ValueRun(0, 100, NEUTRAL)]


def test_a_first_chunk_that_saves_nothing_does_not_set_the_scale() -> None:
    values = ChunkValues("ttft")
    loaded = ComputeCost("b", 100 * SIZE, token_s=1e-3, load_byte_s=1.0)
    assert values.runs(a_query(WIDE), WIDE, 100, loaded) == [ValueRun(0, 100, 0)]
    assert values.runs(a_query(WIDE), WIDE, 100, LINEAR) == [ValueRun(0, 100, NEUTRAL)]


def test_a_tier_whose_cost_of_a_byte_is_not_known_yet_lowers_nothing() -> None:
    speed = TierSpeed()  # one read: all of its time may be that of the call
    speed.requested(1_000_000, 0.0)
    speed.ended(1_000_000, 0.1)
    assert speed.costs is not None
    assert speed.costs[1] == 0.0
    values = ChunkValues("ttft", [speed])
    assert values.runs(a_query(WIDE), WIDE, 100, SQUARE)[-1].value == NEUTRAL + 7


def test_ttft_without_costs_is_as_their_last_known_values() -> None:
    values, unknown = ChunkValues("ttft"), ComputeCost("a", 100 * SIZE)
    assert values.runs(a_query(WIDE), WIDE, 100, None) == [ValueRun(0, 100, NEUTRAL)]
    assert values.runs(a_query(WIDE), WIDE, 100, unknown) == [ValueRun(0, 100, NEUTRAL)]
    known = values.runs(a_query(WIDE), WIDE, 100, SQUARE)
    assert values.runs(a_query(WIDE), WIDE, 100, None) == known
    other = a_query(WIDE, name="b")
    assert values.runs(other, WIDE, 100, None) == [ValueRun(0, 100, NEUTRAL)]


def test_values_have_limits() -> None:
    values = ChunkValues("ttft")
    values.runs(a_query(WIDE), WIDE, 1, LINEAR)
    slow = ComputeCost("b", SIZE, token_s=1e6)
    assert values.runs(a_query(WIDE), WIDE, 1, slow) == [ValueRun(0, 1, NUM_VALUES - 1)]
    loaded = ComputeCost("b", SIZE, token_s=1e-3, load_byte_s=1.0)
    assert values.runs(a_query(WIDE), WIDE, 1, loaded) == [ValueRun(0, 1, 0)]


@pytest.mark.parametrize("first", [5e-324, 1e-300, 1e9])
@pytest.mark.parametrize("then", [5e-324, 1e-300, 1e9])
def test_no_cost_that_the_protocol_allows_is_out_of_range(first: float, then: float) -> None:
    values = ChunkValues("ttft")
    for one in (first, then):
        cost = ComputeCost("a", 1 << 40, token_s=one, pair_s=one)
        runs = values.runs(a_query(WIDE), WIDE, 100, cost)
        assert (runs[0].first, runs[-1].last) == (0, 100)
        assert all(0 <= run.value < NUM_VALUES for run in runs)


@pytest.mark.parametrize(("policy_for", "grows"), [("tokens", False), ("ttft", True)])
def test_a_lookup_tells_the_policy_what_each_chunk_is_worth(policy_for: str, grows: bool) -> None:
    settings = {"policy": "learned", "policy_for": policy_for}
    with Arena.create(1 << 20, huge_pages="never") as arena:
        state, query = new_state(load_config(settings, environ={}), arena), a_query(WIDE)
        state.register(WIDE, query.namespace)
        state.lookup(object(), query, SQUARE)
        policy = state.ram.policy
        assert isinstance(policy, LearnedPolicy)
        names = [query.namespace + chain_hash for chain_hash in split_hashes(query.hashes)]
        found = [unpack(policy.ghosts.find(name), 0.0).value for name in names]
    assert found[0] == NEUTRAL
    assert found == sorted(found)
    assert (found[-1] > NEUTRAL) == grows


def test_policy_for_is_refused_with_policies_other_than_learned() -> None:
    config = load_config({"policy": "lru", "policy_for": "ttft"}, environ={})
    with (
        Arena.create(1 << 20, huge_pages="never") as arena,
        pytest.raises(ConfigError, match=r"policy_for.*learned"),
    ):
        new_state(config, arena)
