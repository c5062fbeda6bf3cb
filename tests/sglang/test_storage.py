"""Pages between SGLang's real host pools and the cache: every arrangement comes back bit for bit,
and nothing else ever does.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvhold.core.errors import KVHoldError
from kvhold.core.keys import place_suffix, split_hashes
from kvhold.integrations.sglang import KVHoldStorage
from kvhold.integrations.sglang.names import query_of
from kvhold.tiers.policies.ghosts import uses_of
from tests.sglang.pools import PAGE, PAGES, config, fill, mha_host, slots
from tests.sglang.storages import KEYS, POOLS, open_storage, opened, page_of, same

__all__ = ["open_storage", "opened"]

pytestmark = pytest.mark.sglang
# of the others SGLang makes no flat pages
FLAT = [name for name in POOLS if "unified" not in name and "widths" not in name]


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_bit_for_bit_into_other_pages_and_nothing_else_is_touched(
    name: str, open_storage: Any
) -> None:
    pool = POOLS[name]()
    storage = open_storage(pool, is_mla_model=name.startswith("mla"))
    page = pool.page_size
    fill(pool)
    stored = [page_of(pool, number) for number in (5, 0, 3)]
    assert storage.batch_set_v1(KEYS[:3], slots([5, 0, 3], page)) == [True] * 3
    fill(pool)
    before = [page_of(pool, number) for number in range(PAGES)]
    assert not any(
        same(page_of(pool, number), wanted) for number in range(PAGES) for wanted in stored
    )
    assert storage.batch_exists(KEYS[:4]) == 3
    assert storage.batch_get_v1(KEYS[:4], slots([7, 2, 4, 1], page)) == [True, True, True, False]
    for number, wanted in zip((7, 2, 4), stored, strict=True):
        assert same(page_of(pool, number), wanted)
    for number in (0, 1, 3, 5, 6):
        assert same(page_of(pool, number), before[number])


@pytest.mark.parametrize("name", FLAT)
def test_flat_pages_and_slots_are_two_ways_to_the_same_bits(name: str, open_storage: Any) -> None:
    pool = POOLS[name]()
    storage = open_storage(pool)
    page = pool.page_size
    fill(pool)
    flat = [pool.get_data_page(number * page, flat=True).clone() for number in (1, 6)]
    stored = [page_of(pool, number) for number in (1, 6)]
    assert storage.batch_set(KEYS[:2], flat)
    fill(pool)
    assert storage.batch_get_v1(KEYS[:2], slots([2, 3], page)) == [True, True]
    assert same(page_of(pool, 2), stored[0])
    assert same(page_of(pool, 3), stored[1])
    assert storage.batch_set_v1(KEYS[2:3], slots([3], page)) == [True]
    for targets in ([pool.get_dummy_flat_data_page()], None):
        (arrived,) = storage.batch_get(KEYS[2:3], targets)
        assert arrived is not None
        pool.set_from_flat_data_page(5 * page, arrived)
        assert same(page_of(pool, 5), stored[1])
        fill(pool)
    assert storage.get(KEYS[50]) is None
    assert storage.set(KEYS[50], flat[0])
    assert storage.exists(KEYS[50])
    assert torch.equal(
        storage.get(KEYS[50], pool.get_dummy_flat_data_page()).view(torch.uint8),
        flat[0].view(torch.uint8),
    )


@pytest.mark.parametrize(
    "kinds", [("mha layer_first", "mha page_first"), ("mha page_first", "mha page_first_direct")]
)
def test_servers_with_different_host_layouts_share(
    kinds: tuple[str, str], open_storage: Any
) -> None:
    one, other = (POOLS[kind]() for kind in kinds)
    storage = open_storage(one)
    storage._storage_config.is_page_first_layout = True
    fill(one)
    fill(other)
    assert storage.batch_set_v1(KEYS[:1], slots([2])) == [True]
    storage.register_mem_pool_host(other)  # as another server would, on the same cache
    assert storage.batch_get_v1(KEYS[:1], slots([5])) == [True]

    def tokens(refs: list[Any], page: int) -> torch.Tensor:  # SGLang's own views, a layer each
        return torch.stack(
            [ref.reshape(-1, *ref.shape[-2:])[page * PAGE : (page + 1) * PAGE] for ref in refs]
        )

    assert torch.equal(
        tokens(other.k_data_refs, 5).view(torch.uint8), tokens(one.k_data_refs, 2).view(torch.uint8)
    )
    assert torch.equal(
        tokens(other.v_data_refs, 5).view(torch.uint8), tokens(one.v_data_refs, 2).view(torch.uint8)
    )


def test_a_gap_costs_the_pages_behind_it_nothing(open_storage: Any) -> None:
    pool = mha_host("page_first")
    storage = open_storage(pool)
    fill(pool)
    stored = {
        key: page_of(pool, number) for number, key in ((0, KEYS[0]), (1, KEYS[2]), (2, KEYS[4]))
    }
    assert storage.batch_set_v1([KEYS[0], KEYS[2], KEYS[4]], slots([0, 1, 2])) == [True] * 3
    assert storage.batch_exists(KEYS[:6]) == 1
    assert storage.batch_exists(KEYS[1:6]) == 0
    fill(pool)
    assert storage.batch_get_v1(KEYS[:6], slots([7, 6, 5, 4, 3, 2])) == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert same(page_of(pool, 7), stored[KEYS[0]])
    assert same(page_of(pool, 5), stored[KEYS[2]])
    assert same(page_of(pool, 3), stored[KEYS[4]])


def test_a_bad_flat_page_costs_the_others_nothing(open_storage: Any) -> None:
    pool = mha_host("page_first")
    storage = open_storage(pool)
    fill(pool)
    good = pool.get_data_page(0).clone()
    short, other_dtype, not_a_tensor = good[:-1], good.to(torch.float32), b"bytes"
    assert not storage.batch_set(KEYS[:5], [good, short, other_dtype, not_a_tensor, good])
    assert [storage.exists(key) for key in KEYS[:5]] == [True, False, False, False, True]
    targets = [torch.zeros_like(good), torch.zeros_like(short), torch.zeros_like(good)]
    arrived = storage.batch_get([KEYS[0], KEYS[0], KEYS[4]], targets)
    assert arrived[0] is targets[0]
    assert arrived[1] is None
    assert not targets[1].any()
    assert arrived[2] is targets[2]
    assert torch.equal(targets[2].view(torch.uint8), good.view(torch.uint8))


def test_what_is_there_is_not_written_again_and_counts_as_stored(open_storage: Any) -> None:
    pool = mha_host("page_first")
    storage = open_storage(pool)
    fill(pool)
    wanted = page_of(pool, 0)
    assert storage.batch_set_v1(KEYS[:1], slots([0])) == [True]
    assert storage.batch_set_v1([KEYS[0], KEYS[1], KEYS[1]], slots([3, 4, 5])) == [True, True, True]
    assert storage._cache.status()["counters"]["kvhold_stored_chunks"] == 2
    assert storage.batch_get_v1(KEYS[:1], slots([7])) == [True]
    assert same(page_of(pool, 7), wanted)


def test_a_full_arena_says_which_pages_were_not_stored(open_storage: Any) -> None:
    pool = mha_host("page_first", layers=64, heads=16, page=16)  # 512 KiB a page
    storage = open_storage(pool, {"ram_bytes": "2MiB"})
    page_bytes = pool.get_size_per_token() * 16
    assert page_bytes == 512 << 10
    fill(pool)
    stored = storage.batch_set_v1(KEYS[:8], slots(list(range(8)), 16))
    assert stored == [True] * sum(stored) + [False] * (8 - sum(stored))
    assert 0 < sum(stored) < 8
    assert storage.batch_exists(KEYS[:8]) == sum(stored)


def test_pages_that_have_left_memory_come_back_from_a_tier(
    open_storage: Any, tmp_path: Path
) -> None:
    pool = mha_host("page_first", layers=64, heads=16, page=16)  # 512 KiB a page
    storage = open_storage(pool, {"ram_bytes": "2MiB", "tiers": [f"disk://{tmp_path}/tier"]})
    fill(pool)
    wanted = [page_of(pool, number) for number in range(PAGES)]
    for number, key in enumerate(KEYS[:PAGES]):
        assert storage.batch_set_v1([key], slots([number], 16)) == [True]
        assert storage._cache.flush(deadline_s=60)
    assert storage._cache.status()["chunks"] < PAGES
    fill(pool)
    for number, key in enumerate(KEYS[:PAGES]):
        assert storage.batch_get_v1([key], slots([number], 16)) == [True]
        assert same(page_of(pool, number), wanted[number])


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.batch_set_v1(KEYS[:2], slots([0])),
        lambda s: s.batch_get_v1(KEYS[:1], slots([0, 1])),
        lambda s: s.batch_set_v1(KEYS[:1], slots([PAGES])),
        lambda s: s.batch_get_v1(KEYS[:1], slots([0]) + 1),
        lambda s: s.batch_set_v1(KEYS[:1], slots([0]).flip(0)),
        lambda s: s.batch_set(KEYS[:2], [torch.zeros(3)]),
        lambda s: s.batch_set(KEYS[:2], None),
        lambda s: s.batch_get(KEYS[:2], [torch.zeros(3)]),
        lambda s: s.batch_exists([KEYS[0], None]),
        lambda s: s.batch_set_v1([KEYS[0], ""], slots([0, 1])),
        lambda s: s.batch_set_v2(
            [
                PoolTransfer(PoolName.KV, slots([0]), keys=KEYS[:1]),
                PoolTransfer(PoolName.KV, slots([0]), keys=KEYS[:2]),
            ]
        ),
        lambda s: s.batch_get_v2([PoolTransfer(PoolName.KV, None, keys=KEYS[:2])]),
    ],
)
def test_lists_that_do_not_fit_each_other_are_an_error_before_anything_is_moved(
    call: Any, open_storage: Any
) -> None:
    pool = mha_host("page_first")
    storage = open_storage(pool)
    fill(pool)
    before = [page_of(pool, number) for number in range(PAGES)]
    with pytest.raises(ValueError, match=r"host_indices|target_locations|values|keys"):
        call(storage)
    assert storage._cache.status()["chunks"] == 0
    assert all(same(page_of(pool, number), before[number]) for number in range(PAGES))


def test_before_a_pool_is_known_everything_is_a_miss(opened: list[KVHoldStorage]) -> None:
    storage = KVHoldStorage(config(), {})
    opened.append(storage)
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_get_v1(KEYS[:2], slots([0, 1])) == [False, False]
    assert storage.batch_set_v1(KEYS[:2], slots([0, 1])) == [False, False]
    assert storage.batch_get(KEYS[:2], None) == [None, None]
    assert not storage.set(KEYS[0], torch.zeros(4))


def test_rules_forbid_storing_and_loading(open_storage: Any) -> None:
    reads = open_storage(mha_host("page_first"), {"rules": {"store": False}})
    assert reads.batch_set_v1(KEYS[:1], slots([0])) == [False]
    assert reads._cache.status()["chunks"] == 0
    writes = open_storage(mha_host("page_first"), {"rules": {"load": False}})
    writes.batch_set_v1(KEYS[:1], slots([0]))
    assert writes._cache.status()["chunks"] == 1
    assert writes.batch_exists(KEYS[:1]) == 0
    assert writes.batch_get_v1(KEYS[:1], slots([0])) == [False]


def learned_uses(storage: KVHoldStorage, keys: list[str], pool: str = "kv") -> list[int]:
    """How often each page was used; 0: unknown."""
    cache: Any = storage._cache
    policy = cache._state.ram.policy
    query = query_of(storage._pools[pool][0].namespace, keys)
    names = [query.namespace + chain_hash for chain_hash in split_hashes(query.hashes)]
    return [
        uses_of(policy.ghosts.find(name))
        if (chunk := policy._chunks.get(name + place_suffix(0, 0))) is None
        else chunk.uses
        for name in names
    ]


LEARNED = {"policy": "learned"}


def test_a_request_that_is_counted_loaded_and_stored_is_one_use(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"), LEARNED)
    for uses in (1, 2, 3):
        assert storage.batch_exists(KEYS[:5]) == (0 if uses == 1 else 3)
        storage.batch_get_v1(KEYS[:3], slots([4, 5, 6]))
        storage.batch_set_v1(KEYS[:3], slots([0, 1, 2]))
        assert learned_uses(storage, KEYS[:6]) == [uses] * 5 + [0]


def test_pages_behind_a_gap_are_used_once(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"), LEARNED)
    storage.register_mem_host_pool_v2(mha_host("page_first"), "swa")
    storage.batch_set_v1(KEYS[:4], slots([0, 1, 2, 3]))
    window = PoolTransfer(
        name=PoolName.SWA,
        keys=KEYS[2:4],
        host_indices=slots([2, 3]),
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )
    storage.batch_set_v2([window])
    assert learned_uses(storage, KEYS[:4], "swa") == [0, 0, 1, 1]
    storage.batch_exists_v2(KEYS[:4], [window])
    assert learned_uses(storage, KEYS[:4]) == [2] * 4
    assert learned_uses(storage, KEYS[:4], "swa") == [1, 1, 2, 2]


def test_without_storing_only_known_pages_are_used(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"), LEARNED | {"rules": {"store": False}})
    storage.batch_exists(KEYS[:3])
    assert learned_uses(storage, KEYS[:3]) == [0, 0, 0]


def test_metrics_count_what_was_moved_once(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"), enable_storage_metrics=True)
    storage.batch_set_v1(KEYS[:3], slots([0, 1, 2]))
    storage.batch_set_v1(KEYS[:3], slots([0, 1, 2]))
    storage.batch_get_v1(KEYS[:4], slots([4, 5, 6, 7]))
    metrics = storage.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [3])
    assert len(metrics.backup_bandwidth) == len(metrics.prefetch_bandwidth) == 1
    assert min(metrics.backup_bandwidth + metrics.prefetch_bandwidth) > 0
    assert storage.get_stats().backup_pgs == []
    assert open_storage(mha_host("page_first")).get_stats() is None


def test_threads_get_their_own_pages(open_storage: Any) -> None:
    pool = mha_host("page_first")
    storage = open_storage(pool)
    fill(pool)
    wanted = [page_of(pool, number) for number in range(4)]
    failures: list[object] = []

    def work(mine: int) -> None:
        for turn in range(20):
            key = f"{mine:02x}{turn:062x}"
            if storage.batch_set_v1([key], slots([mine])) != [True] or storage.batch_get_v1(
                [key], slots([4 + mine])
            ) != [True]:
                failures.append((mine, turn))
            elif not same(page_of(pool, 4 + mine), wanted[mine]):
                failures.append((mine, turn, "other bits"))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert storage._cache.status()["held"] == {"tickets": 0, "leases": 0, "reservations": 0}


def test_after_close_everything_is_a_miss(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"))
    storage.close()
    assert storage.batch_exists(KEYS[:1]) == 0
    assert storage.batch_set_v1(KEYS[:1], slots([0])) == [False]
    with pytest.raises(KVHoldError):
        storage._cache.status()
