"""SGLang's host pools, storages over them, and their pages, for tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvhold.integrations.sglang import KVHoldStorage
from tests.sglang.pools import V_DIM, buffers, config, mha_host, mla_host

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


def on_the_cache_of(owner: KVHoldStorage, storage: KVHoldStorage) -> None:
    """Join two servers in one process: the second goes on with the first one's cache, and keeps
    names and shapes of its own.
    """
    storage._cache.close()
    storage._cache = owner._cache
    storage.register_mem_pool_host(storage.mem_pool_host)
