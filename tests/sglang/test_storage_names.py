"""The names of SGLang's pages: what was stored for another server, model or rank is never found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvhold.core.errors import LayoutError
from kvhold.integrations.sglang import KVHoldStorage
from kvhold.integrations.sglang.names import PagePart, SGLangEngine, names_of, namespace_of
from kvhold.integrations.sglang.pools import host_pages
from tests.sglang.pools import PAGE, PAGES, config, fill, mha_host, mla_host, slots
from tests.sglang.storages import KEYS, POOLS, on_the_cache_of, open_storage, opened, page_of, same

__all__ = ["open_storage", "opened"]

pytestmark = pytest.mark.sglang
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
    on_the_cache_of(storage, foreign)
    other = foreign.mem_pool_host
    fill(other)
    before = [page_of(other, number) for number in range(PAGES)]
    assert foreign.batch_exists(KEYS[:1]) == 0
    assert foreign.batch_get_v1(KEYS[:1], slots([0], other.page_size)) == [False]
    assert all(same(page_of(other, number), before[number]) for number in range(PAGES))

    alike = open_storage(POOLS["mha page_first"]())
    on_the_cache_of(storage, alike)
    assert alike.batch_get_v1(KEYS[:1], slots([3])) == [True]
    assert same(page_of(alike.mem_pool_host, 3), wanted)


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
        on_the_cache_of(first, other)
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
    on_the_cache_of(storage, other)
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
    on_the_cache_of(e4m3, e5m2)
    assert e5m2.batch_exists(KEYS[:1]) == 0
    for key in KEYS[:2]:
        fill(e4m3.mem_pool_host)
        assert e4m3.batch_get_v1([key], slots([4])) == [True]
        assert same(page_of(e4m3.mem_pool_host, 4), wanted)


def test_clear_forgets_this_ranks_pages_alone(open_storage: Any) -> None:
    one = open_storage(mha_host("page_first"))
    other = open_storage(mha_host("page_first"), {"model_id": "model@2"})
    on_the_cache_of(one, other)
    for storage in (one, other):
        assert storage.batch_set_v1(KEYS[:2], slots([0, 1])) == [True, True]
    one.clear()
    assert one.batch_exists(KEYS[:2]) == 0
    assert other.batch_exists(KEYS[:2]) == 2


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


def test_without_a_server_the_model_must_be_named() -> None:
    with pytest.raises(LayoutError, match="model_id"):
        KVHoldStorage(config({"model_id": ""}), {})
