"""Pools beside the KV, pools of other classes, and how SGLang makes its storage."""

from typing import Any

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvhold.core.errors import ConfigError, LayoutError
from kvhold.integrations.sglang import KVHoldStorage
from kvhold.integrations.sglang.pools import OpaquePages, PlainPages, host_pages
from tests.sglang.pools import PAGE, config, fill, mha_device, mha_host, mla_host, slots
from tests.sglang.storages import KEYS, open_storage, opened, page_of, same

__all__ = ["open_storage", "opened"]

pytestmark = pytest.mark.sglang


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


def test_a_device_pool_is_not_taken_for_a_host_pool(open_storage: Any) -> None:
    with pytest.raises(LayoutError, match="MHATokenToKVPool"):
        open_storage(mha_device())
