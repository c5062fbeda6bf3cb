"""Chunks with 8 bits per element in memory: `memory_codec = "int8"`.

Each `run` of consecutive elements of a block shares a scale. The packing's name contains the codec.
States, and KV with 8 bits, are not coded.
"""

from dataclasses import replace
from math import gcd

import numpy as np

from kvhold.core.errors import LayoutError
from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group, packing_name
from kvhold.kernels.view import Coding, View
from kvhold.memory.copy import PlannedCopy

ERROR_BOUND = 1 / 127  # |decoded - original| over the largest magnitude of a run
_DTYPES = ("bfloat16", "float16", "float32")
_MOST_RUN, _LEAST_RUN = (
    128,
    16,
)


def coded_group(group: Group, codec: str) -> Group:
    """The group as chunks store it. Raises LayoutError for blocks that cannot be coded."""
    coding = _coding(group, codec)
    if coding is None:
        return group
    return replace(
        group,
        dtype="int8",
        packing=packing_name(f"{group.packing}+{codec}"),
        block_bytes=coding.nbytes,
    )


def coded_view(view: View, codec: str) -> View:
    """Raises the errors of `coded_group`."""
    coding = _coding(view.group, codec)
    if coding is None:
        return view
    return replace(view, group=coded_group(view.group, codec), coding=coding)


def coded_block(view: View, plain: bytes) -> tuple[bytes, bytes]:
    from kvhold.kernels import numba_quantise as quantise

    coding = view.coding
    assert coding is not None
    elements = np.frombuffer(plain, f"<u{DTYPE_BYTES[coding.dtype]}")
    codes, scales, back = (
        np.empty(coding.elements, np.int8),
        np.empty(coding.scales, np.float32),
        np.empty_like(elements),
    )
    quantise.int8_encode(elements, coding.dtype, coding.run, coding.run, codes, scales)
    quantise.int8_decode(codes, scales, coding.dtype, coding.run, coding.run, back)
    return codes.tobytes() + scales.tobytes(), back.tobytes()


def infinite_chunks(planned: PlannedCopy) -> set[int]:
    """Chunks with an infinity or a NaN, which cannot be decoded. Call it after the gather."""
    plan = planned.plan
    coding = plan.view.coding
    if coding is None:
        return set()
    base, found = np.asarray(plan.chunks.base), set[int]()
    for chunk in planned.moved:
        start, num_rows = (
            int(plan.chunk_starts[chunk]),
            int(plan.chunk_rows[chunk]) * plan.view.layers,
        )
        rows = base[start : start + num_rows * coding.nbytes].reshape(num_rows, coding.nbytes)
        if not np.isfinite(rows[:, coding.elements :].view(np.float32)).all():
            found.add(int(planned.numbers[chunk]))
    return found


def _coding(group: Group, codec: str) -> Coding | None:
    if codec == "none" or group.attention == "state" or DTYPE_BYTES[group.dtype] == 1:
        return None
    if group.packing == CANONICAL:
        raise LayoutError(
            f"memory_codec is {codec}; it needs whole blocks, but the group's packing is canonical"
        )
    if group.dtype not in _DTYPES:
        raise LayoutError(
            f"memory_codec is {codec}; the KV is {group.dtype}, and {', '.join(_DTYPES)} "
            "are supported"
        )
    run = gcd(group.head_dim, _MOST_RUN)
    elements, rest = divmod(group.block_bytes, DTYPE_BYTES[group.dtype])
    if run < _LEAST_RUN or rest or elements % run:
        raise LayoutError(
            f"memory_codec is {codec}; a block of {group.block_bytes} bytes with heads of "
            f"{group.head_dim} {group.dtype} "
            f"cannot be divided into runs of {_LEAST_RUN} elements or more"
        )
    return Coding(group.dtype, elements, run)
