"""Copies between an engine's paged KV (a view) and chunks in the arena: gather takes KV out,
scatter puts it back.

    plan = plan_blocks(view, block_ids, Chunks(arena, offsets, num_tokens))
    gather(plan)                                    # all layers, one call
    scatter(plan, layers=range(4, 5), threads=2)    # one layer, two threads

Three workers stand behind the two doors and give the same bytes: numba for host memory, Triton for
a GPU that reaches the arena, and the reference (numpy on the host, torch on a device) for the rest.
Which one is decided once for each kind of device and logged with the reason. On the host a call
returns when the bytes are there; on a device it returns at once and the copy is in the current
stream's order. Any thread may call; two calls at a time must not write the same bytes.

Where a view has a `coding`, a gather encodes and a scatter decodes on the way: by numba in host
memory, by Triton on a device.

With `sums` a copy in host memory also takes the checksum (xxh3_64) of each layer of each chunk, as
the frames below memory state it. What is compared with what, and what follows, is the caller's
(`kvhold.memory.copy`).
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvhold.kernels.plan import Chunks, Plan, plan_blocks, plan_slots
from kvhold.kernels.view import View

__all__ = [
    "Chunks",
    "Plan",
    "Sums",
    "View",
    "Worker",
    "gather",
    "plan_blocks",
    "plan_slots",
    "scatter",
    "sum_layers",
    "warm_up",
]

Worker: TypeAlias = Literal["numba", "triton", "reference"]
Sums: TypeAlias = npt.NDArray[np.uint64]  # [chunks, layers]
Copy: TypeAlias = Callable[[Plan, range, bool, int], None]  # plan, layers, to_arena, threads

_SHORT_LAYER = (
    240  # bytes of a layer up to which the compiled copies leave checksums to the library
)

_log = logging.getLogger(__name__)


def gather(
    plan: Plan,
    *,
    layers: range | None = None,
    threads: int = 1,
    sums: Sums | None = None,
    worker: Worker | None = None,
) -> None:
    """Copy the plan's rows of the view into its chunks.

    layers:  consecutive layers of the group, all by default; each layer's place in a chunk is the
        same either way
    threads: how many threads may share the work (host memory only); the caller is one of them, and
        the GIL is released
    sums:    where to write the checksums of those layers of the chunks; a chunk of which no row is
        copied keeps what stands there.
             Host memory only: on a device the bytes are not there yet when this returns
    worker:  overrides the choice, for tests

    Bytes of a chunk whose slot was negative, or whose layer was not asked for, stay as they were.
    Raises ValueError for bad arguments.
    """
    if not plan.chunks.writable:
        raise ValueError("gather would write chunks.base, which is read-only")
    _copy(plan, layers, True, threads, sums, worker)


def scatter(
    plan: Plan,
    *,
    layers: range | None = None,
    threads: int = 1,
    sums: Sums | None = None,
    worker: Worker | None = None,
) -> None:
    """Copy the plan's chunks into the view's rows. Arguments as for `gather`; nothing but the rows
    named by slots is written.

    sums: of all bytes of the layers, whether their rows are copied or not, as they were after the
        copy
    """
    if not plan.view.writable:
        raise ValueError("scatter would write a view of read-only tensors")
    _copy(plan, layers, False, threads, sums, worker)


def warm_up(device: str = "cpu", views: Sequence[View] = ()) -> None:
    """Choose and load the worker for a device now, so that the first copy does not pay for it
    (numba: 0.3 s, or seconds uncached).

    views: on a GPU, what is compiled for them is compiled now
    """
    worker = _chosen(device.partition(":")[0], True)
    _load(worker)
    if worker == "numba":
        _load_summed()
        if any(view.coding is not None for view in views):
            _load_coded(worker)
    elif worker == "triton":
        for view in views:
            import_module(
                f"kvhold.kernels.triton_{'copy' if view.coding is None else 'coded_copy'}"
            ).prepare(view)


def sum_layers(
    plan: Plan, layers: range, sums: Sums, chunks: "npt.NDArray[np.int64] | None" = None
) -> None:
    """Write the checksums of `layers` of the plan's chunks to `sums` [chunks, layers of the view].

    chunks: which, by default those of which rows are copied
    """
    base, view = np.asarray(plan.chunks.base), plan.view
    for chunk in np.unique(plan.chunk) if chunks is None else chunks:
        nbytes = int(plan.chunk_rows[chunk]) * view.planes * view.row_bytes
        start = int(plan.chunk_starts[chunk])
        for layer in layers:
            sums[chunk, layer] = xxh3_64_intdigest(
                base[start + layer * nbytes : start + (layer + 1) * nbytes].data
            )


def _copy(
    plan: Plan,
    layers: range | None,
    to_arena: bool,
    threads: int,
    sums: Sums | None,
    worker: Worker | None,
) -> None:
    layers = range(plan.view.layers) if layers is None else layers
    if sums is not None:
        _check_sums(plan, sums)
    if layers and (layers.step != 1 or layers.start < 0 or layers.stop > plan.view.layers):
        raise ValueError(
            f"layers {layers} must be consecutive and among the {plan.view.layers} of the view"
        )
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be 1 or more")
    if worker not in (None, *get_args(Worker)):
        raise ValueError(f"worker {worker!r} is none of {', '.join(get_args(Worker))}")
    if not layers or not plan.num_runs:
        return
    if plan.view.device == "cpu" and plan.chunks.device != "cpu":
        raise ValueError(
            f"a view in host memory needs chunks there too, not on {plan.chunks.device}"
        )
    reached = plan.chunks.address_seen_from(plan.view.device) is not None
    if worker not in (None, "reference") and not reached:
        raise ValueError(
            f"worker {worker!r} needs chunks that {plan.view.device} can address; pin and "
            "map them, or use the reference"
        )
    worker = worker or _chosen(plan.view.device.partition(":")[0], reached)
    if plan.view.coding is not None:
        _copy_coded(plan, layers, to_arena, threads, worker)
    elif sums is not None and worker == "numba" and _least_layer(plan) > _SHORT_LAYER:
        _load_summed()(plan, layers, to_arena, threads, sums)
        return
    else:
        _load(worker)(plan, layers, to_arena, threads)
    if sums is not None:
        sum_layers(plan, layers, sums)


def _copy_coded(plan: Plan, layers: range, to_arena: bool, threads: int, worker: Worker) -> None:
    """Encode or decode on the way.

    Raises ValueError where nothing does so for that device, or scales would not lie at multiples of
    4.
    """
    if worker == "reference":
        raise ValueError(
            f"blocks on {plan.view.device} cannot be encoded: that takes numba in host "
            "memory, and Triton on a device"
        )
    if int(np.bitwise_or.reduce(plan.chunks.address + plan.chunk_starts[plan.chunk])) % 4:
        raise ValueError("chunks.offsets of coded chunks must be multiples of 4")
    _load_coded(worker)(plan, layers, to_arena, threads)


def _check_sums(plan: Plan, sums: Sums) -> None:
    wanted = (plan.chunk_starts.size, plan.view.layers)
    if sums.dtype != np.uint64 or sums.shape != wanted or not sums.flags.c_contiguous:
        raise ValueError(
            f"sums must be contiguous uint64 [chunks, layers] = {wanted}, not {sums.dtype} "
            f"{sums.shape}"
        )
    if plan.view.device != "cpu":
        raise ValueError(
            f"checksums are taken in host memory only; the view is on {plan.view.device}"
        )


def _least_layer(plan: Plan) -> int:
    """Bytes of a layer of the shortest chunk of which something is copied."""
    return int(plan.chunk_rows[plan.chunk].min()) * plan.view.planes * plan.view.row_bytes


@cache
def _chosen(device_type: str, reached: bool) -> Worker:
    """The fastest worker there is here for a kind of device; logged, with the reason, once for
    each.
    """
    worker: Worker = "reference"
    if not reached:
        reason = "the device cannot address the arena: not pinned, or not mapped"
    elif device_type == "cpu" and _imports("numba"):
        worker, reason = "numba", "host memory"
    elif device_type == "cuda" and _imports("triton"):
        worker, reason = "triton", "the device addresses the arena"
    else:
        reason = (
            f"{'numba' if device_type == 'cpu' else 'triton'} is not installed, or not for "
            f"{device_type}; expect a tenth of the speed"
        )
    _log.info("copies between %s and the arena: %s (%s)", device_type, worker, reason)
    return worker


def _imports(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True


@cache
def _load(worker: Worker) -> Copy:
    """Import a worker; the numba one compiles, or loads what was compiled before, as it is
    imported.
    """
    copy: Copy = import_module(f"kvhold.kernels.{worker}_copy").copy
    return copy


@cache
def _load_coded(worker: Worker) -> Copy:
    """The copy that encodes and decodes."""
    copy: Copy = import_module(f"kvhold.kernels.{worker}_coded_copy").copy
    return copy


@cache
def _load_summed() -> Callable[[Plan, range, bool, int, Sums], None]:
    """The compiled copy that takes checksums as it goes."""
    copy: Callable[[Plan, range, bool, int, Sums], None] = import_module(
        "kvhold.kernels.numba_summed_copy"
    ).copy
    return copy
