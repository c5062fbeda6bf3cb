"""Tiers that learn are told of lookups: of all chunks, in order, and never at a lookup's cost."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvhold.cache import LocalCache
from kvhold.cache.state import CacheState, new_state
from kvhold.cache.transfer import use_queue
from kvhold.cache.transfer.commands import ProbeCommand, UsedCommand
from kvhold.cache.transfer.use_queue import keys_of
from kvhold.core.config import Config
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace, make_key
from kvhold.core.planning import ComputeCost
from kvhold.node.central_store import CentralStore
from kvhold.testing.cache import HYBRID, LAYOUTS, a_prompt, read, store
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.policies import LearnedPolicy
from kvhold.tiers.policies.base import NEUTRAL, NUM_VALUES, PolicyLookup
from kvhold.tiers.policies.ghosts import uses_of
from kvhold.tiers.policies.kinds import kind_of, prompt_of
from tests.cache.below import (
    CHUNK_BYTES,
    SPACE,
    a_cache_over,
    cache_over,
    eventually,
    forget,
    on_disk,
    tier_counter,
)
from tests.cache.scripted import arena_of
from tests.tiers.learnt import Clock, teach

DROPPED = "kvhold_tier_dropped_chunks"
FRAME_BYTES = -(-CHUNK_BYTES // 4096) * 4096 + 4096  # with a header page
SHARDED = Namespace("model", HYBRID, shards=2)


def new(policy: str = "learned", *, is_told: bool = True, policy_for: str = "tokens") -> CacheState:
    config = Config(policy=policy, policy_for=policy_for, tiers=("disk:///x",))
    state = new_state(config, arena_of(64 << 20))
    for space in (SPACE, SHARDED):
        state.register(space.layout)
    if is_told:
        state.uses.begin()
    return state


def told(state: CacheState) -> list[UsedCommand]:
    return [each for each in state.take_commands() if isinstance(each, UsedCommand)]


def dropped(state: CacheState) -> float:
    return state.metrics.value("kvhold_tier_dropped_uses")


def test_a_lookup_is_told_to_tiers_that_learn_and_to_no_others() -> None:
    query = a_prompt(SPACE, 64).query()
    for state, num in ((new(), 1), (new(is_told=False), 0), (new("lru", is_told=False), 0)):
        state.lookup("reader", query)
        commands = state.take_commands()
        assert sum(isinstance(each, UsedCommand) for each in commands) == num
        assert any(isinstance(each, ProbeCommand) for each in commands)


def test_it_has_the_prompt_and_the_value_that_memorys_policy_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, heard, missed = new(), list[tuple[int, int]](), LearnedPolicy.missed

    def noted(
        policy: LearnedPolicy,
        keys: Sequence[bytes],
        lookup: PolicyLookup,
        value: int,
        **options: bool,
    ) -> None:
        heard.append((lookup.prompt, value))
        missed(policy, keys, lookup, value, **options)

    monkeypatch.setattr(LearnedPolicy, "missed", noted)
    state.lookup("reader", a_prompt(SPACE, 64).query())
    [command] = told(state)
    assert heard == [(command.prompt, command.value)] == [(prompt_of(0, 4), NEUTRAL)]


def test_all_chunks_of_a_prompt_have_the_value_of_the_last_one_which_needs_them() -> None:
    state = new(policy_for="ttft")
    cost = ComputeCost("a", 64, token_s=1e-3, pair_s=1e-3)
    state.lookup("reader", a_prompt(SPACE, 16).query(), cost)
    state.lookup("reader", a_prompt(SPACE, 16 * 64).query(), cost)
    assert NEUTRAL == told(state)[0].value < NUM_VALUES - 1
    state.lookup("reader", a_prompt(SPACE, 16 * 64).query(), cost)
    assert told(state)[0].value == NUM_VALUES - 1


def test_its_keys_are_of_all_groups_and_shards_the_last_chunk_first() -> None:
    query = a_prompt(SHARDED, 16 * 200).query()
    command = UsedCommand(query, len(HYBRID.groups), 1, NEUTRAL, 0.0)
    parts = list(keys_of(command))
    assert max(len(keys) for keys, _ in parts) <= 250
    assert all(are_whole for _, are_whole in parts)
    assert [key for keys, _ in parts for key in keys] == [
        make_key(SHARDED.digest, query.hashes[at : at + 20], group, shard)
        for at in reversed(range(0, len(query.hashes), 20))
        for group in range(3)
        for shard in range(2)
    ]
    assert command.num_keys == 200 * 3 * 2


def test_tails_are_told_apart() -> None:
    space = Namespace("model", LAYOUTS["tails-in-blocks"])
    query = a_prompt(space, 16 + 12).query()
    assert query.tail_lengths == (4, 8, 12)
    (tails, are_whole), (keys, _) = keys_of(UsedCommand(query, 1, 1, NEUTRAL, 0.0))
    assert not are_whole
    assert len(keys) == 1
    assert tails[0] == make_key(space.digest, query.tail_hashes[40:], 0, 0)


def test_lookups_that_tiers_do_not_keep_up_with_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(use_queue, "_MOST_WAITING", 10)
    state, query = new(), a_prompt(SPACE, 64).query()
    for _ in range(5):
        state.lookup("reader", query)
    first, second = told(state)
    assert dropped(state) == 3 * 4
    state.uses.done(first)
    state.lookup("reader", query)
    assert len(told(state)) == 1
    assert dropped(state) == 3 * 4
    state.uses.done(second)


@pytest.mark.parametrize("num_folders", [1, 2])
def test_a_disk_counts_the_uses_of_its_chunks_wherever_they_are(
    tmp_path: Path, num_folders: int
) -> None:
    folders = ",".join(str(tmp_path / str(number)) for number in range(num_folders))
    url = f"disk://{folders}?max_bytes=1GiB&policy=learned"
    prompt = a_prompt(SPACE, 16 * 8)
    with a_cache_over(url, policy="learned") as cache:
        cache.lookup(prompt.query()).close()
        store(cache, prompt)
        assert cache.flush()
        eventually(lambda: uses_on(cache) == [1] * 8)
        assert read(cache, prompt) == 16 * 8
        eventually(lambda: uses_on(cache) == [2] * 8)
        forget(cache)
        assert read(cache, prompt) == 16 * 8
        eventually(lambda: uses_on(cache) == [3] * 8)
        cache.lookup(a_prompt(SPACE, 16 * 3).query()).close()
        eventually(lambda: uses_on(cache) == [3] * 5 + [4] * 3)


def test_prompts_that_come_back_stay_on_a_full_disk(tmp_path: Path) -> None:
    """Before it knows anything, the time of the last use counts, not that of the last read."""
    prompts = [a_prompt(SPACE, 16 * 16, seed) for seed in range(8)]
    with cache_over(
        f"disk://{tmp_path}/kv?max_bytes={5 * 16 * FRAME_BYTES}&policy=learned", policy="learned"
    ) as cache:
        for number, prompt in enumerate(prompts):
            cache.lookup(prompts[0].query()).close()
            cache.lookup(prompt.query()).close()
            store(cache, prompt)
            assert cache.flush()
            assert number < 5 or uses_on(cache)[-1] >= number, "the first prompt is there"
        assert len(uses_on(cache)) < 16 * 8


def test_a_chunk_that_the_disk_declines_stays_in_memory(
    tmp_path: Path,
) -> None:
    policy = LearnedPolicy(clock := Clock())
    back, gone = a_prompt(SPACE, 16 * 8, 1), a_prompt(SPACE, 16 * 3, 2)
    url = f"disk://{tmp_path}/kv?max_bytes={8 * FRAME_BYTES}&policy=learned"
    config = Config(ram_bytes=16 << 20, huge_pages="never", tiers=(url,), policy="learned")
    with LocalCache(config, policy=policy) as cache:
        cache.register(SPACE)
        back_kind, gone_kind = (kind_of(1, prompt_of(0, num_new)) for num_new in (8, 3))
        teach(policy, clock, back=back_kind, gone=gone_kind)
        for prompt in (back, gone):
            cache.lookup(prompt.query()).close()
            store(cache, prompt)
            assert cache.flush()
        assert uses_on(cache) == [1] * 8
        assert tier_counter(cache, DROPPED, tier="disk", reason="declined") == 3
        assert read(cache, gone) == gone.num_tokens
        forget(cache)
        assert read(cache, back) == back.num_tokens
        assert read(cache, gone) == 0


def uses_on(cache: LocalCache) -> list[int]:
    """Return the uses of each chunk on the disk, in ascending order."""
    return sorted(
        uses_of(store._opener.place.index._rows.past(row))
        for store in _disk(cache)._stores
        if store._opener.place is not None
        for row in store._opener.place.index._rows.oldest()
    )


def _disk(cache: LocalCache) -> DiskTier:
    assert cache.tier_worker is not None
    [guard] = cache.tier_worker._stack.guards
    assert isinstance(guard.tier, DiskTier)
    return guard.tier


def test_a_disk_that_learns_needs_memory_that_learns(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ConfigError, match=r"tier disk: policy=learned needs policy = 'learned'.*not 'lru'"
        ),
        cache_over(on_disk(tmp_path, policy="learned")),
    ):
        pass


def test_a_central_cache_has_no_disk_that_learns(tmp_path: Path) -> None:
    config = Config(ram_bytes=16 << 20, tiers=(on_disk(tmp_path, policy="learned"),))
    with pytest.raises(ConfigError, match=r"tier disk: policy=learned.*told of no lookups"):
        CentralStore(config)
