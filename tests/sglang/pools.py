"""SGLang's real pools on the CPU, filled with bits that are all different, and the classes of a
storage's settings.
"""

import itertools
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

PAGE, PAGES, LAYERS, HEADS, DIM, V_DIM, RANK, ROPE = 4, 8, 3, 2, 8, 16, 24, 8
_numbers = itertools.count(1)


def mha_device(
    *,
    page: int = PAGE,
    layers: int = LAYERS,
    dtype: Any = torch.bfloat16,
    v_dim: int = DIM,
    heads: int = HEADS,
) -> Any:
    return MHATokenToKVPool(
        PAGES * page, page, dtype, heads, DIM, layers, "cpu", False, v_head_dim=v_dim
    )


def mla_device(*, page: int = PAGE, layers: int = LAYERS, dtype: Any = torch.bfloat16) -> Any:
    return MLATokenToKVPool(PAGES * page, page, dtype, RANK, ROPE, layers, "cpu", False)


def mha_host(layout: str, *, page: int = PAGE, groups: int = 1, **of_device: Any) -> Any:
    device = mha_device(page=page, **of_device)
    info = device._mha_buffer_info()
    kind = (
        AsymmetricMHATokenToKVPoolHost
        if device.v_head_dim != device.head_dim
        else MHATokenToKVPoolHost
    )
    return _host(kind, info, device, layout, page, head_group_num=groups)


def mla_host(
    layout: str, *, page: int = PAGE, dcp: tuple[int, int] = (0, 1), **of_device: Any
) -> Any:
    device = mla_device(page=page, **of_device)
    more = {"dcp_rank": dcp[0], "dcp_size": dcp[1], "target_layer_num": device.layer_num}
    return _host(
        MLATokenToKVPoolHost, device._mla_buffer_info(), device, layout, page * dcp[1], **more
    )


def _host(kind: Any, info: Any, device: Any, layout: str, page: int, **more: Any) -> Any:
    with ExitStack() as budget:
        budget.enter_context(host_memory_budget_scope(1 << 30))
        tokens = PAGES * device.page_size
        return kind(
            info,
            2.0,
            0,
            page,
            layout,
            False,
            "cpu",
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=device.layer_num,
            host_token_capacity=tokens,
            **more,
        )


def buffers(pool: Any) -> list[Any]:
    """All memory of a host pool."""
    return list(pool.kv_buffer) if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]


def fill(pool: Any) -> None:
    """Bits of which no page, and no two tokens, are alike."""
    random = np.random.default_rng(next(_numbers))
    for buffer in buffers(pool):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.from_numpy(random.integers(0, 256, size=tuple(raw.shape), dtype=np.uint8)))


def slots(pages: list[int], page: int = PAGE) -> Any:
    """The host indices of pages."""
    return (
        torch.cat([torch.arange(number * page, (number + 1) * page) for number in pages])
        if pages
        else torch.empty(0, dtype=torch.int64)
    )


def config(extra: dict[str, Any] | None = None, **changes: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "served",
    }
    section = {"embedded": True, "ram_bytes": "8MiB", "model_id": "model@1"} | (extra or {})
    return HiCacheStorageConfig(**values | changes, extra_config={"kvhold": section})
