"""Copies between an engine's paged KV (a view) and chunks in the arena: gather takes KV out, scatter puts it back.

    plan = plan_blocks(view, block_ids, Chunks(arena, offsets, num_tokens))
    gather(plan)                                    # all layers, one call
    scatter(plan, layers=range(4, 5), threads=2)    # one layer, two threads

Three workers stand behind the two doors and give the same bytes: numba for host memory, Triton for a GPU that reaches the arena, and the
reference (numpy on the host, torch on a device) for the rest. Which one is decided once for each kind of device and logged with the
reason. On the host a call returns when the bytes are there; on a device it returns at once and the copy is in the current stream's order.
Any thread may call; two calls at a time must not write the same bytes. Quantising and other arithmetic are not here.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Literal, TypeAlias, get_args

from kvhold.kernels.plan import Chunks, Plan, plan_blocks, plan_slots
from kvhold.kernels.view import View

__all__ = ["Chunks", "Plan", "View", "Worker", "gather", "plan_blocks", "plan_slots", "scatter", "warm_up"]

Worker: TypeAlias = Literal["numba", "triton", "reference"]
Copy: TypeAlias = Callable[[Plan, range, bool, int], None]  # plan, layers, to_arena, threads

_log = logging.getLogger(__name__)


def gather(plan: Plan, *, layers: range | None = None, threads: int = 1, worker: Worker | None = None) -> None:
    """Copy the plan's rows of the view into its chunks.

    layers:  consecutive layers of the group, all by default; each layer's place in a chunk is the same either way
    threads: how many threads may share the work (host memory only); the caller is one of them, and the GIL is released
    worker:  overrides the choice, for tests

    Bytes of a chunk whose slot was negative, or whose layer was not asked for, stay as they were. Raises ValueError for bad arguments.
    """
    if not plan.chunks.writable:
        raise ValueError("gather would write chunks.base, which is read-only")
    _copy(plan, layers, True, threads, worker)


def scatter(plan: Plan, *, layers: range | None = None, threads: int = 1, worker: Worker | None = None) -> None:
    """Copy the plan's chunks into the view's rows. Arguments as for `gather`; nothing but the rows named by slots is written."""
    if not plan.view.writable:
        raise ValueError("scatter would write a view of read-only tensors")
    _copy(plan, layers, False, threads, worker)


def warm_up(device: str = "cpu") -> None:
    """Choose and load the worker for a device now, so that the first copy does not pay for it (numba: 0.3 s, or seconds uncached)."""
    _load(_chosen(device.partition(":")[0], True))


def _copy(plan: Plan, layers: range | None, to_arena: bool, threads: int, worker: Worker | None) -> None:
    layers = range(plan.view.layers) if layers is None else layers
    if layers and (layers.step != 1 or layers.start < 0 or layers.stop > plan.view.layers):
        raise ValueError(f"layers {layers} must be consecutive and among the {plan.view.layers} of the view")
    if threads < 1:
        raise ValueError(f"threads is {threads}; it must be 1 or more")
    if worker not in (None, *get_args(Worker)):
        raise ValueError(f"worker {worker!r} is none of {', '.join(get_args(Worker))}")
    if not layers or not plan.num_runs:
        return
    if plan.view.device == "cpu" and plan.chunks.device != "cpu":
        raise ValueError(f"a view in host memory needs chunks there too, not on {plan.chunks.device}")
    reached = plan.chunks.address_seen_from(plan.view.device) is not None
    if worker not in (None, "reference") and not reached:
        raise ValueError(f"worker {worker!r} needs chunks that {plan.view.device} can address; pin and map them, or use the reference")
    _load(worker or _chosen(plan.view.device.partition(":")[0], reached))(plan, layers, to_arena, threads)


@cache
def _chosen(device_type: str, reached: bool) -> Worker:
    """The fastest worker there is here for a kind of device; logged, with the reason, once for each."""
    worker: Worker = "reference"
    if not reached:
        reason = "the device cannot address the arena: not pinned, or not mapped"
    elif device_type == "cpu" and _imports("numba"):
        worker, reason = "numba", "host memory"
    elif device_type == "cuda" and _imports("triton"):
        worker, reason = "triton", "the device addresses the arena"
    else:
        reason = f"{'numba' if device_type == 'cpu' else 'triton'} is not installed, or not for {device_type}; expect a tenth of the speed"
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
    """Import a worker; the numba one compiles, or loads what was compiled before, as it is imported."""
    copy: Copy = import_module(f"kvhold.kernels.{worker}_copy").copy
    return copy
