"""Plain KV (MHA, MLA) becomes canonical chunks. Other pages are opaque bytes, if SGLang can flatten
them completely. A pool's class must match exactly. Threads must not write the same pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import sglang
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvhold.core.errors import KVHoldError, LayoutError
from kvhold.core.holdings import ABSENT, ChunkBytes, Lease
from kvhold.core.layout import DTYPE_BYTES, Group, Layout
from kvhold.memory.copier import Piece
from kvhold.memory.copy import gather_blocks, scatter_blocks, warm_up
from kvhold.memory.views import View, separate_pools

Int64s: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Places: TypeAlias = Sequence[ChunkBytes]

_FIELD_OF = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Pages(Protocol):
    @property
    def layout(self) -> Layout: ...

    @property
    def identity(self) -> str:
        """Distinguishes KV of the same layout."""

    def ids(self, indices: "torch.Tensor", num_pages: int) -> Int64s:
        """[num_pages], of `num_pages * page size` slots.

        Raises ValueError: not whole pages.
        """

    def gather(self, ids: Int64s, buffer: Bytes, places: Places) -> None:
        """ABSENT chunks are left out."""

    def scatter(self, ids: Int64s, buffer: Bytes, places: Places) -> None: ...

    def takes_flat(self, page: object) -> bool: ...

    def gather_flat(
        self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places
    ) -> None: ...

    def scatter_flat(
        self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places
    ) -> None: ...

    def new_flat(self) -> "torch.Tensor": ...


def host_pages(pool: Any, *, kv_dtype: str, threads: int) -> Pages:
    """kv_dtype: of a uint8 pool

    Raises LayoutError.
    """
    pages = _plain_host_pages(pool, kv_dtype, threads)
    return pages if pages is not None else _opaque_host_pages(pool)


def device_pages(pool: Any, *, page_size: int, kv_dtype: str, threads: int) -> "PlainPages":
    """Raises LayoutError: no plain KV."""
    dtype = str(getattr(pool, "dtype", kv_dtype)).removeprefix("torch.")
    if (
        type(pool) is MHATokenToKVPool
        and pool.kv_cache_layout == "nhd"
        and pool.k_scale_buffer is None
        and pool.v_scale_buffer is None
    ):
        planes = [
            (pool.head_num, pool.head_dim, pool.k_buffer),
            (pool.head_num, pool.v_head_dim, pool.v_buffer),
        ]
    elif (
        type(pool) is MLATokenToKVPool
        and pool.kv_scale_buffer is None
        and not pool.dcp_replicated
        and not pool.layer_shard_enabled
    ):
        planes = [(1, pool.kv_cache_dim, pool.kv_buffer)]
    else:
        raise LayoutError(
            f"{_named(pool)}: the linker serves plain MHA (NHD) and MLA pools without "
            "scales or layer shards"
        )
    whole = [
        (heads, dim, [buffer[: len(buffer) // page_size * page_size] for buffer in layers])
        for heads, dim, layers in planes
    ]
    return _plain(
        whole, dtype, "slot head dim", page_size, page_size, threads, None, _mla_detail(pool)
    )


def _plain_host_pages(pool: Any, kv_dtype: str, threads: int) -> "PlainPages | None":
    kind = type(pool)
    page = int(pool.page_size)
    if kind is MHATokenToKVPoolHost:
        arranged = _mha(pool)
        planes = [
            (pool.head_num, pool.head_dim, [arranged.layer(p, n) for n in range(pool.layer_num)])
            for p in range(2)
        ]
    elif kind is AsymmetricMHATokenToKVPoolHost:
        axes = {"page_first": "slot head dim", "page_first_direct": "block token head dim"}[
            pool.layout
        ]
        arranged = _Arranged(
            axes, lambda plane, layer: (pool.k_buffer, pool.v_buffer)[plane][:, layer]
        )
        widths = (pool.head_dim, pool.v_head_dim)
        planes = [
            (pool.head_num, widths[p], [arranged.layer(p, n) for n in range(pool.layer_num)])
            for p in range(2)
        ]
    elif (
        kind is MLATokenToKVPoolHost
        and pool.kv_buffer is not None
        and pool.layout != "page_first_kv_split"
    ):
        arranged = _mla(pool)
        planes = [(1, pool.kv_cache_dim, [arranged.layer(0, n) for n in range(pool.layer_num)])]
    else:
        return None
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype == "uint8" and not getattr(pool, "dsa_kv_cache_store_fp8", False):
        if not kv_dtype:
            raise LayoutError(
                "kv_cache_dtype must be set: the pool holds bare bytes, and SGLang does "
                "not say which fp8 they are"
            )
        dtype = kv_dtype
    if dtype not in DTYPE_BYTES:
        return None
    slots = int(getattr(pool, "logical_page_size", page))
    return _plain(
        planes, dtype, arranged.axes, page, slots, threads, arranged.flat, _mla_detail(pool)
    )


@dataclass(frozen=True)
class _Arranged:
    """axes: of the tensor that `layer(plane, layer)` returns
    flat: axes of a flat page: l(ayer), p(lane), t(oken), h(ead), d(im)
    """

    axes: str
    layer: Callable[[int, int], "torch.Tensor"]
    flat: str = ""


def _mha(pool: Any) -> _Arranged:
    kv = pool.kv_buffer
    if pool.layout == "layer_first":
        return _Arranged("slot head dim", lambda plane, layer: kv[plane, layer], "plthd")
    if pool.layout == "page_first":
        return _Arranged("slot head dim", lambda plane, layer: kv[plane, :, layer], "ptlhd")
    if pool.layout == "page_first_direct":
        return _Arranged("block token head dim", lambda plane, layer: kv[plane, :, layer], "plthd")
    if pool.layout == "page_head":
        return _Arranged(
            "block head token dim", lambda plane, layer: kv[plane, :, :, :, layer], "phtld"
        )
    if pool.layout == "page_unified" and pool.head_group_num == 1:
        return _Arranged("block token head dim", lambda plane, layer: kv[:, 0, layer, plane])
    if pool.layout == "page_unified" and pool.head_group_num == pool.head_num:
        return _Arranged("block head token dim", lambda plane, layer: kv[:, :, layer, plane, :, 0])
    groups = (
        f" with {pool.head_group_num} groups of its {pool.head_num} heads"
        if pool.layout == "page_unified"
        else ""
    )
    raise LayoutError(
        f"layout: {pool.layout}{groups} is not supported; use page_first, "
        "page_first_direct, page_head or layer_first"
    )


def _mla(pool: Any) -> _Arranged:
    kv = pool.kv_buffer
    if pool.layout == "layer_first":
        return _Arranged("slot head dim", lambda _, layer: kv[layer], "ltd")
    if pool.layout == "page_first":
        return _Arranged("slot head dim", lambda _, layer: kv[:, layer], "tld")
    if pool.layout == "page_first_direct":
        return _Arranged("block token head dim", lambda _, layer: kv[:, layer], "ltd")
    if pool.layout == "page_unified":
        return _Arranged("block token dim", lambda _, layer: kv[:, layer])
    raise LayoutError(
        f"layout: {pool.layout} is not supported; use page_first, page_first_direct or layer_first"
    )


def _plain(
    planes: list[tuple[int, int, list[Any]]],
    dtype: str,
    axes: str,
    page: int,
    slots: int,
    threads: int,
    flat: str | None,
    identity: str,
) -> "PlainPages":
    alike = len({(heads, dim) for heads, dim, _ in planes}) == 1
    parts = [planes] if alike else [[plane] for plane in planes]
    views = []
    for part in parts:
        heads, dim, layers = part[0]
        group = Group(layers=len(layers), planes=len(part), heads=heads, head_dim=dim, dtype=dtype)
        views.append(
            separate_pools(
                group, [tensors for _, _, tensors in part], axes=axes, tokens_per_block=page
            )
        )
    layout = Layout(tuple(view.group for view in views), tokens_per_chunk=page, tail_tokens=0)
    warm_up(views[0].device, views)
    return PlainPages(
        layout, tuple(views), slots, threads, flat if alike and flat else "", identity
    )


@dataclass(frozen=True)
class PlainPages:
    """slots: of a page; more than its tokens if ranks share it"""

    layout: Layout
    views: tuple[View, ...]
    slots: int
    threads: int
    flat: str
    identity: str

    def ids(self, indices: "torch.Tensor", num_pages: int) -> Int64s:
        return _page_ids(indices, num_pages, self.slots, self.views[0].num_blocks)

    def gather(self, ids: Int64s, buffer: Bytes, places: Places) -> None:
        for view, place in zip(self.views, places, strict=True):
            gather_blocks(view, ids, buffer, place, threads=self.threads)

    def scatter(self, ids: Int64s, buffer: Bytes, places: Places) -> None:
        for view, place in zip(self.views, places, strict=True):
            scatter_blocks(view, ids, buffer, place, threads=self.threads)

    def pieces(self, ids: Int64s, buffer: Bytes, places: Places) -> list[Piece]:
        return [
            Piece(view, ids, buffer, place) for view, place in zip(self.views, places, strict=True)
        ]

    def pieces_of(self, lease: Lease, ids: Int64s) -> list[Piece]:
        """Raises KVHoldError: a page is absent."""
        places = [lease.chunks(group).first(len(ids)) for group in range(len(self.views))]
        if any((place.offsets == ABSENT).any() for place in places):
            raise KVHoldError("a page of the lease is absent")
        return self.pieces(ids, lease.buffer, places)

    def takes_flat(self, page: object) -> bool:
        return bool(self.flat) and _is_flat(page, self.layout.groups[0].dtype, self._flat_elements)

    def gather_flat(self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places) -> None:
        for page, chunk in self._pairs(pages, buffer, places):
            chunk[...] = page

    def scatter_flat(self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places) -> None:
        for page, chunk in self._pairs(pages, buffer, places):
            page[...] = chunk

    def new_flat(self) -> "torch.Tensor":
        owner = self.views[0].owners[0][0]
        return torch.empty(self._flat_elements, dtype=owner.dtype)

    @property
    def _sizes(self) -> dict[str, int]:
        group = self.layout.groups[0]
        return {
            "l": group.layers,
            "p": group.planes,
            "t": self.layout.tokens_per_chunk,
            "h": group.heads,
            "d": group.head_dim,
        }

    @property
    def _flat_elements(self) -> int:
        return int(np.prod(list(self._sizes.values())))

    def _pairs(
        self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places
    ) -> "list[tuple[Any, Any]]":
        sizes, nbytes = self._sizes, self.layout.chunk_bytes(0, self.layout.tokens_per_chunk)
        inner = "lpthd" if len(self.flat) == 5 else "ltd"
        field = _FIELD_OF[DTYPE_BYTES[self.layout.groups[0].dtype]]
        shape = tuple(sizes[axis] for axis in inner)
        pairs = []
        for page, offset in zip(pages, places[0].offsets, strict=True):
            if offset != ABSENT:
                flat = (
                    page.view(getattr(torch, field))
                    .numpy()
                    .reshape([sizes[axis] for axis in self.flat])
                )
                chunk = buffer[offset : offset + nbytes].view(field).reshape(shape)
                pairs.append((flat.transpose([self.flat.index(axis) for axis in inner]), chunk))
        return pairs


def _opaque_host_pages(pool: Any) -> "OpaquePages":
    for method in (
        "get_dummy_flat_data_page",
        "get_size_per_token",
        "get_data_page",
        "set_from_flat_data_page",
    ):
        if not hasattr(pool, method):
            raise LayoutError(
                f"{_named(pool)}: SGLang cannot flatten its pages (it has no {method})"
            )
    try:
        sample = pool.get_dummy_flat_data_page()
        wanted = int(pool.get_size_per_token()) * int(pool.page_size)
    except NotImplementedError as error:
        raise LayoutError(f"{_named(pool)}: SGLang cannot flatten its pages ({error})") from None
    if sample.nbytes != wanted:
        raise LayoutError(
            f"{_named(pool)}: a flat page has {sample.nbytes} bytes, but a page in the pool has "
            f"{wanted}; some would be lost"
        )
    what = [
        type(pool).__module__,
        type(pool).__qualname__,
        sglang.__version__,
        str(pool.layout),
        str(sample.dtype),
        sample.nbytes,
    ]
    packing = "sglang-" + blake2b(repr(what).encode(), digest_size=12).hexdigest()
    page = int(pool.page_size)
    group = Group(
        layers=1,
        planes=1,
        heads=1,
        head_dim=1,
        dtype="uint8",
        packing=packing,
        block_tokens=page,
        block_bytes=int(sample.nbytes),
    )
    return OpaquePages(Layout((group,), tokens_per_chunk=page, tail_tokens=0), pool, sample.dtype)


@dataclass(frozen=True)
class OpaquePages:
    layout: Layout
    pool: Any
    dtype: "torch.dtype"
    identity: str = ""

    @property
    def _slots(self) -> int:
        return int(getattr(self.pool, "logical_page_size", self.pool.page_size))

    def ids(self, indices: "torch.Tensor", num_pages: int) -> Int64s:
        return _page_ids(
            indices, num_pages, self._slots, int(self.pool.size) // int(self.pool.page_size)
        )

    def gather(self, ids: Int64s, buffer: Bytes, places: Places) -> None:
        for page, chunk in self._present(ids, buffer, places):
            flat = self.pool.get_data_page(int(page) * self._slots, flat=True).contiguous()
            chunk[...] = flat.view(torch.uint8).numpy()

    def scatter(self, ids: Int64s, buffer: Bytes, places: Places) -> None:
        for page, chunk in self._present(ids, buffer, places):
            flat = self.new_flat()
            flat.view(torch.uint8).numpy()[...] = chunk
            self.pool.set_from_flat_data_page(int(page) * self._slots, flat)

    def takes_flat(self, page: object) -> bool:
        return _is_flat(
            page, str(self.dtype).removeprefix("torch."), self._nbytes // self.dtype.itemsize
        )

    def gather_flat(self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places) -> None:
        for page, chunk in self._present(pages, buffer, places):
            chunk[...] = page.view(torch.uint8).numpy()

    def scatter_flat(self, pages: "Sequence[torch.Tensor]", buffer: Bytes, places: Places) -> None:
        for page, chunk in self._present(pages, buffer, places):
            page.view(torch.uint8).numpy()[...] = chunk

    def new_flat(self) -> "torch.Tensor":
        return torch.empty(self._nbytes // self.dtype.itemsize, dtype=self.dtype)

    @property
    def _nbytes(self) -> int:
        return self.layout.groups[0].block_bytes

    def _present(self, pages: Any, buffer: Bytes, places: Places) -> list[tuple[Any, Bytes]]:
        together = zip(pages, places[0].offsets, strict=True)
        return [
            (page, buffer[offset : offset + self._nbytes])
            for page, offset in together
            if offset != ABSENT
        ]


def _page_ids(indices: "torch.Tensor", num_pages: int, slots: int, pool_pages: int) -> Int64s:
    given: Int64s = indices.detach().to(device="cpu", dtype=torch.int64).numpy().reshape(-1)
    if given.size != num_pages * slots:
        raise ValueError(f"host_indices: {given.size} slots for {num_pages} pages of {slots}")
    pages = given.reshape(num_pages, slots)
    first = pages[:, 0]
    if (first % slots).any() or (pages != first[:, None] + np.arange(slots)).any():
        raise ValueError(f"host_indices: not whole pages of {slots} slots in order")
    if num_pages and (int(first.min()) < 0 or int(first.max()) >= pool_pages * slots):
        raise ValueError(
            f"host_indices: from {int(first.min())} to {int(first.max())}, the pool has "
            f"{pool_pages * slots} slots"
        )
    ids: Int64s = first // slots
    return ids


def _is_flat(page: object, dtype: str, elements: int) -> bool:
    if (
        not isinstance(page, torch.Tensor)
        or page.device.type != "cpu"
        or not page.is_contiguous()
        or page.numel() != elements
    ):
        return False
    return str(page.dtype).removeprefix("torch.") in (
        dtype,
        "uint8" if page.element_size() == DTYPE_BYTES.get(dtype) == 1 else dtype,
    )


def _mla_detail(pool: Any) -> str:
    if not hasattr(pool, "kv_lora_rank"):
        return ""
    packed = " packed" if getattr(pool, "dsa_kv_cache_store_fp8", False) else ""
    return f"latent {pool.kv_lora_rank} rope {pool.qk_rope_head_dim}{packed}"


def _named(pool: Any) -> str:
    return f"{type(pool).__qualname__} ({getattr(pool, 'layout', 'no layout')})"
