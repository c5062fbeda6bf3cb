"""Pages between SGLang's real host pools and the cache: every arrangement comes back bit for bit,
and nothing else ever does.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvhold.core.errors import ConfigError, KVHoldError, LayoutError
from kvhold.core.keys import place_suffix, split_hashes
from kvhold.integrations.sglang import KVHoldStorage
from kvhold.integrations.sglang.names import (
    PagePart,
    SGLangEngine,
    names_of,
    namespace_of,
    query_of,
)
from kvhold.integrations.sglang.pools import OpaquePages, PlainPages, host_pages
from kvhold.tiers.policies.ghosts import uses_of
from tests.sglang.pools import (
    PAGE,
    PAGES,
    V_DIM,
    buffers,
    config,
    fill,
    mha_device,
    mha_host,
    mla_host,
    slots,
)

pytestmark = pytest.mark.sglang

KEYS = [f"{number:064x}" for number in range(1, 100)]

POOLS: dict[str, Callable[[], Any]] = {
    "mha layer_first": lambda: mha_host("layer_first"),
    "mha page_first": lambda: mha_host("page_first"),
    "mha page_first_direct": lambda: mha_host("page_first_direct"),
    "mha page_head": lambda: mha_host("page_head"),
    "mha page_unified": lambda: mha_host("page_unified"),
    "mha page_unified, a group a head": lambda: mha_host("page_unified", groups=2),
    "mha one head": lambda: mha_host("page_first", heads=1),
    "mha one layer": lambda: mha_host("layer_first", layers=1),
    "mha float32": lambda: mha_host("page_first", dtype=torch.float32),
    "mha pages of one token": lambda: mha_host("layer_first", page=1),
    "k and v of different widths, page_first": lambda: mha_host("page_first", v_dim=V_DIM),
    "k and v of different widths, page_first_direct": lambda: mha_host(
        "page_first_direct", v_dim=V_DIM
    ),
    "mla layer_first": lambda: mla_host("layer_first"),
    "mla page_first": lambda: mla_host("page_first"),
    "mla page_first_direct": lambda: mla_host("page_first_direct"),
    "mla page_unified": lambda: mla_host("page_unified"),
}
# of the others SGLang makes no flat pages
FLAT = [name for name in POOLS if "unified" not in name and "widths" not in name]


@pytest.fixture
def opened() -> Iterator[list[KVHoldStorage]]:
    storages: list[KVHoldStorage] = []
    yield storages
    for storage in storages:
        storage.close()


@pytest.fixture
def open_storage(opened: list[KVHoldStorage]) -> Callable[..., KVHoldStorage]:
    def open_(pool: Any, extra: dict[str, Any] | None = None, **changes: Any) -> KVHoldStorage:
        storage = KVHoldStorage(config(extra, **changes), {})
        opened.append(storage)
        storage.register_mem_pool_host(pool)
        return storage

    return open_


def page_of(pool: Any, number: int) -> list[torch.Tensor]:
    """A page's memory, by the arrangement's definition in SGLang (`init_kv_buffer`), as a copy."""
    by_slot = {
        "layer_first": 2 if len(buffers(pool)[0].shape) == 5 else 1,
        "page_first": len(buffers(pool)[0].shape) - 4,
    }
    found = []
    for buffer in buffers(pool):
        if pool.layout in by_slot:
            axis = 0 if isinstance(pool.kv_buffer, tuple) else by_slot[pool.layout]
            found.append(buffer.narrow(axis, number * pool.page_size, pool.page_size).clone())
        else:
            paired = (
                pool.layout in ("page_first_direct", "page_head")
                and not isinstance(pool.kv_buffer, tuple)
                and buffer.shape[0] == 2
            )
            found.append(buffer.narrow(1 if paired else 0, number, 1).clone())
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


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


SPACES: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "page size": (lambda: mha_host("page_first", page=2 * PAGE), {}, {}),
    "layers": (lambda: mha_host("page_first", layers=6), {}, {}),
    "dtype of the same width": (lambda: mha_host("page_first", dtype=torch.float16), {}, {}),
    "heads against width": (lambda: mha_host("page_first", heads=1, v_dim=16), {}, {}),
    "model": (POOLS["mha page_first"], {"model_id": "model@2"}, {}),
    "tensor parallel rank": (POOLS["mha page_first"], {}, {"tp_rank": 1, "tp_size": 2}),
    "tensor parallel size": (POOLS["mha page_first"], {}, {"tp_size": 2}),
    "pipeline stage": (POOLS["mha page_first"], {}, {"pp_rank": 1, "pp_size": 2}),
    "context parallel rank": (POOLS["mha page_first"], {}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
    "MLA": (POOLS["mla page_first"], {}, {"is_mla_model": True}),
}


@pytest.mark.parametrize("differs", SPACES)
def test_what_was_stored_for_something_else_never_comes_back(
    differs: str, open_storage: Any
) -> None:
    """One cache, two servers: same hashes, another namespace.

    Then the same settings again find what was stored.
    """
    pool = POOLS["mha page_first"]()
    storage = open_storage(pool)
    fill(pool)
    wanted = page_of(pool, 0)
    assert storage.batch_set_v1(KEYS[:1], slots([0])) == [True]
    make_pool, extra, changes = SPACES[differs]
    foreign = open_storage(make_pool(), extra, **changes)
    _on_the_cache_of(storage, foreign)
    other = foreign.mem_pool_host
    fill(other)
    before = [page_of(other, number) for number in range(PAGES)]
    assert foreign.batch_exists(KEYS[:1]) == 0
    assert foreign.batch_get_v1(KEYS[:1], slots([0], other.page_size)) == [False]
    assert all(same(page_of(other, number), before[number]) for number in range(PAGES))

    alike = open_storage(POOLS["mha page_first"]())
    _on_the_cache_of(storage, alike)
    assert alike.batch_get_v1(KEYS[:1], slots([3])) == [True]
    assert same(page_of(alike.mem_pool_host, 3), wanted)


def _on_the_cache_of(owner: KVHoldStorage, storage: KVHoldStorage) -> None:
    """Join two servers in one process: the second goes on with the first one's cache, and keeps
    names and shapes of its own.
    """
    storage._cache.close()
    storage._cache = owner._cache
    storage.register_mem_pool_host(storage.mem_pool_host)


def test_ranks_with_the_same_kv_share_and_others_do_not(open_storage: Any) -> None:
    pool = mla_host("page_first")
    first = open_storage(pool, is_mla_model=True, tp_size=2)
    fill(pool)
    assert first.batch_set_v1(KEYS[:1], slots([0])) == [True]
    for changes, shares in (
        ({"is_mla_model": True, "tp_rank": 1, "tp_size": 2}, True),
        ({"tp_rank": 1, "tp_size": 2}, False),
    ):
        other = open_storage(mla_host("page_first"), **changes)
        _on_the_cache_of(first, other)
        assert other.batch_exists(KEYS[:1]) == int(shares)


def test_pages_shared_by_decode_context_ranks_are_counted_as_sglang_does(open_storage: Any) -> None:
    """A page of 4 tokens a rank is 8 slots for SGLang; ranks never meet each other's tokens."""
    pool = mla_host("page_first", dcp=(1, 2))
    dcp = {
        "is_mla_model": True,
        "tp_size": 2,
        "tp_rank": 1,
        "dcp_size": 2,
        "dcp_rank": 1,
        "logical_page_size": 8,
    }
    storage = open_storage(pool, **dcp)
    fill(pool)
    wanted = pool.get_data_page(3 * 8).clone()
    assert storage.batch_set_v1(KEYS[:1], slots([3], 8)) == [True]
    fill(pool)
    assert storage.batch_get_v1(KEYS[:1], slots([1], 8)) == [True]
    assert torch.equal(pool.get_data_page(8).view(torch.uint8), wanted.view(torch.uint8))
    other = open_storage(mla_host("page_first", dcp=(0, 2)), **dcp | {"tp_rank": 0, "dcp_rank": 0})
    _on_the_cache_of(storage, other)
    assert other.batch_exists(KEYS[:1]) == 0


def test_fp8_in_pools_of_bare_bytes_must_be_named_and_is_told_apart(open_storage: Any) -> None:
    def pool() -> Any:
        return mha_host("page_first", dtype=torch.float8_e4m3fn)

    assert pool().dtype == torch.uint8
    with pytest.raises(LayoutError, match="kv_cache_dtype"):
        open_storage(pool())
    e4m3 = open_storage(pool(), {"kv_cache_dtype": "fp8_e4m3"})
    fill(e4m3.mem_pool_host)
    wanted = page_of(e4m3.mem_pool_host, 0)
    assert e4m3.batch_set_v1(KEYS[:1], slots([0])) == [True]
    assert e4m3.batch_set(KEYS[1:2], [e4m3.mem_pool_host.get_data_page(0)])
    e5m2 = open_storage(pool(), {"kv_cache_dtype": "fp8_e5m2"})
    _on_the_cache_of(e4m3, e5m2)
    assert e5m2.batch_exists(KEYS[:1]) == 0
    for key in KEYS[:2]:
        fill(e4m3.mem_pool_host)
        assert e4m3.batch_get_v1([key], slots([4])) == [True]
        assert same(page_of(e4m3.mem_pool_host, 4), wanted)


def test_pools_beside_the_kv_have_pages_of_their_own(open_storage: Any) -> None:
    kv, beside = mha_host("page_first"), mha_host("layer_first", layers=1)
    storage = open_storage(kv)
    storage.register_mem_host_pool_v2(kv, PoolName.KV)
    storage.register_mem_host_pool_v2(beside, PoolName.SWA)
    fill(kv)
    fill(beside)
    wanted = page_of(kv, 0), page_of(beside, 1)
    both = [
        PoolTransfer(PoolName.KV, slots([0]), keys=KEYS[:1]),
        PoolTransfer(PoolName.SWA, slots([1]), keys=KEYS[:1]),
    ]
    assert storage.batch_set_v2(both) == {"kv": [True], "swa": [True]}
    fill(kv)
    fill(beside)
    back = [
        PoolTransfer(PoolName.KV, slots([2]), keys=KEYS[:1]),
        PoolTransfer(PoolName.SWA, slots([3, 4]), keys=[KEYS[9], KEYS[0]]),
        PoolTransfer(PoolName.MAMBA, slots([3]), keys=KEYS[:1]),
    ]
    assert storage.batch_get_v2(back) == {"kv": [True], "swa": [False, True], "mamba": [False]}
    assert same(page_of(kv, 2), wanted[0])
    assert same(page_of(beside, 4), wanted[1])


def test_a_hit_is_as_long_as_every_pool_allows(open_storage: Any) -> None:
    """KV of 5 pages; a state after pages 2 and 4; an indexer for the first 4."""
    kv, state, indexer = (
        mha_host("page_first"),
        mha_host("page_first", layers=1),
        mha_host("page_first", layers=2),
    )
    storage = open_storage(kv)
    storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
    storage.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    for pool in (kv, state, indexer):
        fill(pool)
    storage.batch_set_v1(KEYS[:5], slots([0, 1, 2, 3, 4]))
    storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots([0, 1]), keys=[KEYS[1], KEYS[3]])])
    storage.batch_set_v2([PoolTransfer(PoolName.INDEXER, slots([0, 1, 2, 3]), keys=KEYS[:4])])
    mamba = PoolTransfer(PoolName.MAMBA, keys=["last"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    index = PoolTransfer(PoolName.INDEXER)
    window = PoolTransfer(
        PoolName.INDEXER, keys=["a", "b", "c"], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    groups = PoolTransfer(PoolName.DRAFT, keys=["a"], hit_policy=PoolHitPolicy.BLOCK_GROUPS)

    plain = storage.batch_exists_v2(KEYS[:7])
    assert (plain.kv_hit_pages, plain.restorable_prefix_pages, plain.extra_pool_hit_pages) == (
        5,
        [1, 2, 3, 4, 5],
        {PoolName.KV: 5},
    )
    found = storage.batch_exists_v2(KEYS[:7], [mamba, index, groups])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 4, PoolName.INDEXER: 4}
    assert storage.batch_exists_v2(KEYS[:3], [mamba, index]).kv_hit_pages == 2
    assert storage.batch_exists_v2(KEYS[:7], [window]).restorable_prefix_pages == [1, 2, 3, 4]
    # never registered
    assert storage.batch_exists_v2(KEYS[:5], [PoolTransfer(PoolName.SWA)]).kv_hit_pages == 0


def test_a_pool_of_another_class_is_moved_as_sglang_flattens_it_or_refused() -> None:
    class Subclass(type(mha_host("page_first"))):  # type: ignore[misc]
        """May keep more than its parent."""

    plain, pool = host_pages(mha_host("page_first"), kv_dtype="", threads=1), mha_host("page_first")
    pool.__class__ = Subclass
    opaque = host_pages(pool, kv_dtype="", threads=1)
    assert isinstance(plain, PlainPages)
    assert isinstance(opaque, OpaquePages)
    assert opaque.layout.fingerprint != plain.layout.fingerprint
    pool.get_size_per_token = lambda: 1 + Subclass.get_size_per_token(pool)
    with pytest.raises(LayoutError, match="some would be lost"):
        host_pages(pool, kv_dtype="", threads=1)


def test_a_pool_that_sglang_does_not_flatten_is_refused() -> None:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    class Silent(type(mha_host("page_first"))):  # type: ignore[misc]
        """As SGLang's own of scaled KV."""

        def get_dummy_flat_data_page(self) -> Any:
            raise NotImplementedError("its scales lie elsewhere")

    pool = mha_host("page_first")
    pool.__class__ = Silent
    with pytest.raises(LayoutError, match=r"cannot flatten its pages \(its scales lie elsewhere"):
        host_pages(pool, kv_dtype="", threads=1)
    pool.__class__ = type(mha_host("page_first"))
    with pytest.raises(
        LayoutError, match=r"cannot flatten its pages \(it has no get_size_per_token"
    ):
        host_pages(LogicalHostPool(PAGE * 4, PAGE), kv_dtype="", threads=1)


def test_opaque_pages_come_back_bit_for_bit(open_storage: Any) -> None:
    class Subclass(type(mla_host("page_first"))):  # type: ignore[misc]
        """Not known to us."""

    pool = mla_host("page_first")
    pool.__class__ = Subclass
    storage = open_storage(pool)
    assert isinstance(storage._pools["kv"][1], OpaquePages)
    fill(pool)
    wanted = [page_of(pool, 0), page_of(pool, 1)]
    flat = pool.get_data_page(PAGE).clone()
    assert storage.batch_set_v1(KEYS[:1], slots([0])) == [True]
    assert storage.batch_set(KEYS[1:2], [flat])
    fill(pool)
    before = page_of(pool, 2)
    assert storage.batch_get_v1(KEYS[:2], slots([4, 5])) == [True, True]
    assert same(page_of(pool, 4), wanted[0])
    assert same(page_of(pool, 5), wanted[1])
    assert same(page_of(pool, 2), before)
    (arrived,) = storage.batch_get(KEYS[:1], None)
    pool.set_from_flat_data_page(6 * PAGE, arrived)
    assert same(page_of(pool, 6), wanted[0])


@pytest.mark.parametrize("make", [lambda: mha_host("page_unified", heads=4, groups=2)])
def test_an_arrangement_that_is_not_known_is_refused_by_name(make: Any, open_storage: Any) -> None:
    with pytest.raises(LayoutError, match="page_unified with 2 groups of its 4 heads"):
        open_storage(make())


def test_before_a_pool_is_known_everything_is_a_miss(opened: list[KVHoldStorage]) -> None:
    storage = KVHoldStorage(config(), {})
    opened.append(storage)
    assert storage.batch_exists(KEYS[:2]) == 0
    assert storage.batch_get_v1(KEYS[:2], slots([0, 1])) == [False, False]
    assert storage.batch_set_v1(KEYS[:2], slots([0, 1])) == [False, False]
    assert storage.batch_get(KEYS[:2], None) == [None, None]
    assert not storage.set(KEYS[0], torch.zeros(4))


def test_clear_forgets_this_ranks_pages_alone(open_storage: Any) -> None:
    one = open_storage(mha_host("page_first"))
    other = open_storage(mha_host("page_first"), {"model_id": "model@2"})
    _on_the_cache_of(one, other)
    for storage in (one, other):
        assert storage.batch_set_v1(KEYS[:2], slots([0, 1])) == [True, True]
    one.clear()
    assert one.batch_exists(KEYS[:2]) == 0
    assert other.batch_exists(KEYS[:2]) == 2


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


def test_names_chain_as_the_prompt_does() -> None:
    layout = host_pages(mha_host("page_first"), kv_dtype="", threads=1).layout
    space = namespace_of(SGLangEngine("m"), layout, PagePart(), pool="kv", replicated=False)
    whole = names_of(space, KEYS[:4], [])
    later = names_of(space, KEYS[2:4], KEYS[:2])
    assert (whole.parent, whole.first_token, len(whole)) == (b"", 0, 4)
    assert later.hashes == whole.hashes[40:]
    assert later.parent == whole.hashes[20:40]
    assert later.first_token == 2 * PAGE
    assert names_of(space, KEYS[2:4], None).hashes == later.hashes
    other = namespace_of(SGLangEngine("n"), layout, PagePart(), pool="kv", replicated=False)
    assert names_of(other, KEYS[:4], []).hashes != whole.hashes


def test_what_stands_before_a_batch_is_handed_on(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"))
    extra = HiCacheStorageExtraInfo(prefix_keys=KEYS[:2])
    assert storage.batch_set_v1(KEYS[2:4], slots([2, 3]), extra) == [True, True]
    assert storage.batch_set_v1(
        KEYS[:2], slots([0, 1]), HiCacheStorageExtraInfo(prefix_keys=[])
    ) == [True, True]
    assert storage.batch_exists(KEYS[:4], HiCacheStorageExtraInfo(prefix_keys=[])) == 4


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


def test_sglangs_factory_makes_it_from_the_json() -> None:
    extra = {
        "backend_name": "kvhold",
        "module_path": "kvhold.integrations.sglang",
        "class_name": "KVHoldStorage",
        "interface_v1": 1,
    }
    made = config()
    made.extra_config = extra | made.extra_config
    pool = mha_host("page_first")
    storage = StorageBackendFactory.create_backend("dynamic", made, pool)
    try:
        assert type(storage) is KVHoldStorage
        storage.register_mem_pool_host(pool)
        storage.on_host_pools_registered()
        assert storage.batch_set_v1(KEYS[:1], slots([0])) == [True]
        assert storage.batch_exists(KEYS[:2]) == 1
    finally:
        storage.close()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"kvhold": {"ram_byte": "1GiB"}}, "ram_bytes"),
        ({"kvhold": {"embedded": "yes"}}, "embedded"),
        ({"kvhold": {"kv_cache_dtype": "fp8"}}, "kv_cache_dtype"),
        ({"kvhold": 3}, "kvhold"),
        ({"ram_bytes": "1GiB"}, "ram_bytes"),
    ],
)
def test_the_factory_passes_on_what_is_wrong_with_the_json(
    extra: dict[str, Any], says: str
) -> None:
    made = config()
    made.extra_config = {
        "backend_name": "k",
        "module_path": "kvhold.integrations.sglang",
        "class_name": "KVHoldStorage",
    } | extra
    with pytest.raises(ConfigError, match=says):
        StorageBackendFactory.create_backend("dynamic", made, None)


def test_without_a_server_the_model_must_be_named() -> None:
    with pytest.raises(LayoutError, match="model_id"):
        KVHoldStorage(config({"model_id": ""}), {})


def test_after_close_everything_is_a_miss(open_storage: Any) -> None:
    storage = open_storage(mha_host("page_first"))
    storage.close()
    assert storage.batch_exists(KEYS[:1]) == 0
    assert storage.batch_set_v1(KEYS[:1], slots([0])) == [False]
    with pytest.raises(KVHoldError):
        storage._cache.status()


def test_a_device_pool_is_not_taken_for_a_host_pool(open_storage: Any) -> None:
    with pytest.raises(LayoutError, match="MHATokenToKVPool"):
        open_storage(mha_device())
