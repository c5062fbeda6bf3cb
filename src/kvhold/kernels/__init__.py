"""Copy KV between an engine's blocks (a view) and chunks in the arena.

All implementations give the same bytes. On a device a copy follows the current stream, and may end
after the call. Any thread; concurrent calls must not write the same bytes.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvhold.kernels.plan import Chunks, Plan, plan_blocks, plan_slots
from kvhold.kernels.ranges import Ranges
from kvhold.kernels.view import Int64s, View

__all__ = [
    "Chunks",
    "Plan",
    "Ranges",
    "RunningSums",
    "Sums",
    "View",
    "Worker",
    "begin_sums",
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

# bytes of a layer; the xxhash library hashes shorter ones
_SHORT_LAYER = 240

_log = logging.getLogger(__name__)


def gather(
    plan: Plan,
    *,
    layers: range | None = None,
    threads: int = 1,
    sums: Sums | None = None,
    worker: Worker | None = None,
) -> None:
    """Copy the plan's rows of the view into its chunks; encode if the view has a `coding`.

    layers:  consecutive, default all
    threads: number, the caller included; host memory only. The GIL is released
    sums:    receives xxh3_64 by chunk and layer; host memory only

    Raises ValueError. Bytes of negative slots and of other layers do not change.
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
    """As `gather`. sums: of all bytes of the layers, after the copy"""
    if not plan.view.writable:
        raise ValueError("scatter would write a view of read-only tensors")
    _copy(plan, layers, False, threads, sums, worker)


def warm_up(device: str = "cpu", views: Sequence[View] = ()) -> None:
    """Takes up to seconds."""
    worker = _chosen(device.partition(":")[0], True)
    _load(worker)
    if _imports("numba"):
        _load_sums()
    if worker == "numba":
        _load_summed()
        if any(view.coding is not None for view in views):
            _load_coded(worker)
    elif worker == "triton":
        for view in views:
            import_module(
                f"kvhold.kernels.triton_{'copy' if view.coding is None else 'coded_copy'}"
            ).prepare(view)


class RunningSums(Protocol):
    def read(self) -> Sums:
        """[ranges], after the stream has passed."""


def begin_sums(ranges: Ranges, device: str) -> RunningSums:
    """On the device's current stream. Raises ValueError for ranges that do not suit the device."""
    if not ranges.suits(device):
        raise ValueError(f"{device} cannot take the checksums of these ranges; the host can")
    of_device = "triton" if device.startswith("cuda") else "reference"
    begin: Callable[[Ranges, str], RunningSums] = import_module(
        f"kvhold.kernels.{of_device}_sums"
    ).begin_sums
    return begin(ranges, device)


def sum_layers(
    plan: Plan,
    layers: range,
    sums: Sums,
    chunks: "npt.NDArray[np.int64] | None" = None,
    *,
    threads: int = 1,
) -> None:
    """Write checksums of chunks in host memory to `sums` [chunks, layers of the view].

    chunks: default: those with a copied row
    """
    chunks = np.unique(plan.chunk) if chunks is None else chunks
    of_layer = (plan.chunk_rows[chunks] * (plan.view.planes * plan.view.row_bytes))[:, None]
    starts = plan.chunk_starts[chunks][:, None] + np.arange(layers.start, layers.stop) * of_layer
    sums[chunks, layers.start : layers.stop] = _sums_of_ranges(
        plan.chunks, starts.reshape(-1), np.repeat(of_layer, len(layers)), threads
    ).reshape(starts.shape)


def _sums_of_ranges(chunks: Chunks, starts: Int64s, nbytes: Int64s, threads: int) -> Sums:
    if _imports("numba") and (nbytes > _SHORT_LAYER).all():
        return _load_sums()(starts + chunks.address, nbytes, threads)
    base = np.asarray(chunks.base)
    return np.array(
        [
            xxh3_64_intdigest(base[start : start + length].data)
            for start, length in zip(starts.tolist(), nbytes.tolist(), strict=True)
        ],
        np.uint64,
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
        raise ValueError(f"worker {worker!r} is not one of {', '.join(get_args(Worker))}")
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
        sum_layers(plan, layers, sums, threads=threads)


def _copy_coded(plan: Plan, layers: range, to_arena: bool, threads: int, worker: Worker) -> None:
    if worker == "reference":
        raise ValueError(
            f"blocks on {plan.view.device} cannot be encoded: encoding needs numba in host "
            "memory, or Triton on a device"
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
    return int(plan.chunk_rows[plan.chunk].min()) * plan.view.planes * plan.view.row_bytes


@cache
def _chosen(device_type: str, reached: bool) -> Worker:
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
    copy: Copy = import_module(f"kvhold.kernels.{worker}_copy").copy
    return copy


@cache
def _load_coded(worker: Worker) -> Copy:
    copy: Copy = import_module(f"kvhold.kernels.{worker}_coded_copy").copy
    return copy


@cache
def _load_summed() -> Callable[[Plan, range, bool, int, Sums], None]:
    copy: Callable[[Plan, range, bool, int, Sums], None] = import_module(
        "kvhold.kernels.numba_summed_copy"
    ).copy
    return copy


@cache
def _load_sums() -> Callable[[Int64s, Int64s, int], Sums]:
    sums: Callable[[Int64s, Int64s, int], Sums] = import_module(
        "kvhold.kernels.numba_sums"
    ).sum_ranges
    return sums
