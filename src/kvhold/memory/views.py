"""An engine's arrangement of a group's KV, checked against the layout.

Axes may have any order and strides; `dim` must be contiguous. `slot` is blocks and tokens in one
axis. An axis with one entry may be missing (MLA). Elements have the group's dtype, or are unsigned
integers of that width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvhold.core.errors import LayoutError
from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group
from kvhold.kernels.view import Int64s, Tensor, View

__all__ = ["View", "cross_layer", "opaque_blocks", "per_layer", "separate_pools"]

_KNOWN = ("layer", "plane", "block", "token", "slot", "head", "dim")


def per_layer(
    group: Group,
    tensors: Sequence[Tensor],
    *,
    axes: str | Sequence[str],
    tokens_per_block: int | None = None,
) -> View:
    """One tensor per layer. tokens_per_block: required with a `slot` axis."""
    named = _axes(axes, without=("layer",))
    planes = [
        [_Strided.of(tensor, named, f"the tensor of layer {layer}")]
        for layer, tensor in enumerate(tensors)
    ]
    return _paged(
        group,
        [list(_split(group, layer[0], "plane", group.planes)) for layer in planes],
        tokens_per_block,
    )


def cross_layer(
    group: Group, tensor: Tensor, *, axes: str | Sequence[str], tokens_per_block: int | None = None
) -> View:
    """One tensor for all layers, such as "block layer plane token head dim"."""
    whole = _Strided.of(tensor, _axes(axes), "the cross-layer tensor")
    layers = _split(group, whole, "layer", group.layers)
    return _paged(
        group,
        [list(_split(group, layer, "plane", group.planes)) for layer in layers],
        tokens_per_block,
    )


def separate_pools(
    group: Group,
    planes: Sequence[Sequence[Tensor]],
    *,
    axes: str | Sequence[str],
    tokens_per_block: int | None = None,
) -> View:
    """One tensor per layer and plane, such as "slot head dim" (SGLang).

    planes: `group.planes` sequences of `group.layers` tensors
    """
    if len(planes) != group.planes:
        raise LayoutError(f"planes: {len(planes)} pools given, group.planes is {group.planes}")
    named = _axes(axes, without=("layer", "plane"))
    for plane, tensors in enumerate(planes):
        if len(tensors) != group.layers:
            raise LayoutError(
                f"layers: plane {plane} has {len(tensors)} tensors, group.layers is {group.layers}"
            )
    layers = [
        [
            _Strided.of(pool[layer], named, f"the tensor of layer {layer}, plane {plane}")
            for plane, pool in enumerate(planes)
        ]
        for layer in range(group.layers)
    ]
    return _paged(group, layers, tokens_per_block)


def opaque_blocks(group: Group, tensors: Sequence[Tensor], *, block_axis: int) -> View:
    """One tensor per layer, with contiguous blocks of `group.block_bytes`."""
    if group.packing == CANONICAL:
        raise LayoutError(
            "group.packing is canonical; opaque blocks need the name of the engine's packing"
        )
    blocks = []
    for layer, tensor in enumerate(tensors):
        what = f"the tensor of layer {layer}"
        rank = len(tensor.shape)
        if not 0 <= block_axis < rank:
            raise LayoutError(f"block_axis is {block_axis}; {what} has {rank} axes")
        memory = _Strided.of(
            tensor,
            tuple("block" if axis == block_axis else f"axis {axis}" for axis in range(rank)),
            what,
        )
        memory.check_dtype(group)
        expected = memory.item_bytes
        for axis in sorted(
            (axis for axis in memory.sizes if axis != "block" and memory.sizes[axis] != 1),
            key=memory.strides.__getitem__,
        ):
            if memory.strides[axis] != expected:
                raise LayoutError(
                    f"group.block_bytes: a block of {what} is not contiguous bytes ({axis} "
                    f"steps {memory.strides[axis]})"
                )
            expected *= memory.sizes[axis]
        if expected != group.block_bytes:
            raise LayoutError(
                f"group.block_bytes is {group.block_bytes}; a block of {what} has {expected} bytes"
            )
        blocks.append(memory)
    _check_alike(group, [[memory] for memory in blocks])
    num_blocks = blocks[0].sizes["block"]
    return View(
        group=group,
        device=blocks[0].device,
        table=_table([[memory] for memory in blocks]),
        owners=tuple((memory.tensor,) for memory in blocks),
        num_rows=num_blocks,
        rows_per_block=1,
        block_stride=blocks[0].strides["block"] if num_blocks > 1 else group.block_bytes,
        row_stride=group.block_bytes,
        head_stride=group.block_bytes,
        writable=all(memory.writable for memory in blocks),
    )


@dataclass(frozen=True)
class _Strided:
    """A tensor, or a slice. Sizes in elements, strides in bytes."""

    tensor: Tensor
    what: str
    address: int
    sizes: dict[str, int]
    strides: dict[str, int]
    dtype: str
    item_bytes: int
    device: str
    writable: bool

    @classmethod
    def of(cls, tensor: Tensor, names: tuple[str, ...], what: str) -> "_Strided":
        shape = tuple(int(size) for size in tensor.shape)
        if len(names) != len(shape):
            raise LayoutError(
                f"axes: {len(names)} named ({' '.join(names)}), {what} has {len(shape)}: {shape}"
            )
        if isinstance(tensor, np.ndarray):
            address, steps = tensor.__array_interface__["data"][0], tensor.strides
            dtype, item, device, writable = (
                tensor.dtype.name,
                tensor.dtype.itemsize,
                "cpu",
                bool(tensor.flags.writeable),
            )
        else:
            item = int(tensor.element_size())
            address, steps = (
                int(tensor.data_ptr()),
                tuple(int(stride) * item for stride in tensor.stride()),
            )
            dtype, device, writable = (
                str(tensor.dtype).removeprefix("torch."),
                str(tensor.device),
                True,
            )
        for name, size, step in zip(names, shape, steps, strict=True):
            if step == 0 and size > 1:
                raise LayoutError(
                    f"axes: {name} of {what} has {size} entries at one address (an expanded tensor)"
                )
        sizes, strides = dict(zip(names, shape, strict=True)), dict(zip(names, steps, strict=True))
        return cls(tensor, what, address, sizes, strides, dtype, item, device, writable)

    def at(self, axis: str, index: int) -> "_Strided":
        return replace(
            self,
            address=self.address + index * self.strides[axis],
            sizes={name: size for name, size in self.sizes.items() if name != axis},
            strides={name: stride for name, stride in self.strides.items() if name != axis},
        )

    def check_dtype(self, group: Group) -> None:
        bits = f"uint{8 * DTYPE_BYTES[group.dtype]}"
        if self.dtype not in (group.dtype, bits):
            raise LayoutError(
                f"group.dtype is {group.dtype}; {self.what} is {self.dtype}, neither the "
                f"same nor {bits} for its bits"
            )

    def check_size(self, axis: str, size: int, field: str) -> None:
        if self.sizes.get(axis, 1) != size:
            raise LayoutError(
                f"{field} is {size}; axis {axis} of {self.what} has "
                f"{self.sizes.get(axis, 'no entry')}"
            )


def _axes(axes: str | Sequence[str], without: tuple[str, ...] = ()) -> tuple[str, ...]:
    names = tuple(axes.split()) if isinstance(axes, str) else tuple(axes)
    allowed = [name for name in _KNOWN if name not in without]
    for name in names:
        if name not in allowed:
            raise LayoutError(f"axes: {name!r} is not one of {', '.join(allowed)}")
        if names.count(name) > 1:
            raise LayoutError(f"axes: {name!r} is named twice")
    if ("slot" in names) == ("block" in names) or ("slot" in names) == ("token" in names):
        raise LayoutError(f"axes: name either slot, or block and token; got {' '.join(names)}")
    if "dim" not in names:
        raise LayoutError(f"axes: dim is missing in {' '.join(names)}")
    return names


def _split(group: Group, whole: _Strided, axis: str, size: int) -> Iterator[_Strided]:
    whole.check_size(axis, size, f"group.{axis}s")
    if axis not in whole.sizes:
        yield whole
        return
    for index in range(size):
        yield whole.at(axis, index)


def _paged(group: Group, layers: list[list[_Strided]], tokens_per_block: int | None) -> View:
    if group.packing != CANONICAL:
        raise LayoutError(
            f"group.packing is {group.packing!r}, which has no token axis; use opaque_blocks"
        )
    for memory in (memory for planes in layers for memory in planes):
        memory.check_dtype(group)
        memory.check_size("head", group.heads, "group.heads")
        memory.check_size("dim", group.head_dim, "group.head_dim")
        if group.head_dim > 1 and memory.strides["dim"] != memory.item_bytes:
            raise LayoutError(
                f"axes: dim of {memory.what} is not contiguous ({memory.strides['dim']} "
                "bytes from element to element)"
            )
    _check_alike(group, layers)
    any_ = layers[0][0]
    head_bytes = group.head_dim * any_.item_bytes
    head_stride = any_.strides["head"] if group.heads > 1 else head_bytes
    if "slot" in any_.sizes:
        if tokens_per_block is None or tokens_per_block < 1:
            raise LayoutError(
                "tokens_per_block must be given, and 1 or more, with axis slot: the "
                "engine's page size"
            )
        num_blocks, rest = divmod(any_.sizes["slot"], tokens_per_block)
        if rest:
            raise LayoutError(
                f"tokens_per_block is {tokens_per_block}; axis slot has "
                f"{any_.sizes['slot']}, not a multiple of it"
            )
        rows, row_stride = tokens_per_block, any_.strides["slot"]
        block_stride = rows * row_stride
    else:
        num_blocks, rows = any_.sizes["block"], any_.sizes["token"]
        if rows < 1 or tokens_per_block not in (None, rows):
            raise LayoutError(f"tokens_per_block is {tokens_per_block}; axis token has {rows}")
        row_stride = any_.strides["token"] if rows > 1 else group.heads * head_bytes
        block_stride = any_.strides["block"] if num_blocks > 1 else rows * row_stride
    return View(
        group=group,
        device=any_.device,
        table=_table(layers),
        owners=tuple(tuple(memory.tensor for memory in planes) for planes in layers),
        num_rows=num_blocks * rows,
        rows_per_block=rows,
        block_stride=block_stride,
        row_stride=row_stride,
        head_stride=head_stride,
        writable=all(memory.writable for planes in layers for memory in planes),
    )


def _check_alike(group: Group, layers: list[list[_Strided]]) -> None:
    if len(layers) != group.layers:
        raise LayoutError(f"layers: {len(layers)} tensors given, group.layers is {group.layers}")
    first = layers[0][0]
    for memory in (memory for planes in layers for memory in planes):
        for field in ("device", "sizes"):
            if getattr(memory, field) != getattr(first, field):
                raise LayoutError(
                    f"{field}: {memory.what} has {getattr(memory, field)}, {first.what} "
                    f"{getattr(first, field)}"
                )
        for axis, stride in memory.strides.items():
            if stride != first.strides[axis] and memory.sizes[axis] > 1:
                raise LayoutError(
                    f"strides: axis {axis} of {memory.what} steps {stride} bytes, that of "
                    f"{first.what} {first.strides[axis]}"
                )


def _table(layers: list[list[_Strided]]) -> Int64s:
    table = np.array([[memory.address for memory in planes] for planes in layers], dtype=np.int64)
    table.setflags(write=False)
    return table
