"""Whole prompts as numpy arrays: `cache.store(prompt, kv)` and `cache.load(prompt)`.

    prompt = namespace.prompt(tokens)
    cache.store(prompt, [kv])                    # kv: [layers, planes, tokens, heads, head_dim]
    found = cache.load(prompt)                   # found.kv[0]: the first found.num_tokens tokens

bfloat16 and float8, which numpy lacks, are bits in uint16 and uint8.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvhold.core.errors import DamagedChunks, LayoutError
from kvhold.core.holdings import ABSENT, Lease
from kvhold.core.keys import Prompt
from kvhold.core.layout import CANONICAL, Group, Layout
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions

if TYPE_CHECKING:
    from kvhold.core.api import Cache

_NUMPY = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e4m3fnuz": np.uint8,
    "float8_e5m2": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
}
_ATTEMPTS = 3


@dataclass(frozen=True)
class LoadedKV:
    """KV of a prompt: for each group [layers, planes, num_tokens, heads, head_dim]."""

    num_tokens: int
    kv: list[npt.NDArray[Any]]


class WholePrompts:
    """`store` and `load`, for every class that is a `Cache`."""

    def store(
        self: "Cache",
        prompt: Prompt,
        kv: Sequence[npt.NDArray[Any]],
        *,
        store_options: StoreOptions = DEFAULT_OPTIONS,
        deadline_s: float | None = None,
    ) -> int:
        """Store a prompt's missing KV. Return the number of written tokens.

        kv: for each group [layers, planes, tokens, heads, head_dim], with all tokens of the prompt

        Fewer are written if memory is full, or reserved by another writer. Raises LayoutError for
        unfit arrays, several shards, or an engine's packing.
        """
        layout = prompt.namespace.layout
        _check(prompt, layout)
        _check_arrays(kv, layout, prompt.num_tokens)
        self.register(prompt.namespace)
        names = prompt.chunks()
        with self.reserve(
            layout, names, store_options=store_options, deadline_s=deadline_s
        ) as reservation:
            for number, group in enumerate(layout.groups):
                places, first = reservation.chunks(number), names.first_token
                for at, length in zip(places.offsets, places.num_tokens, strict=True):
                    if at != ABSENT:
                        chunk = _chunk(reservation.buffer, int(at), group, int(length))
                        chunk[...] = kv[number][:, :, first : first + length]
                    first += int(length)
            granted = reservation.granted
            reservation.commit()
            return int(sum(reservation.num_tokens[chunk] for chunk in granted))

    def load(
        self: "Cache",
        prompt: Prompt,
        *,
        wait_s: float | None = None,
        deadline_s: float | None = None,
    ) -> LoadedKV:
        """Return a copy of the KV of the longest cached prefix. wait_s: as in `lookup`

        Raises LayoutError for several shards, an engine's packing, or groups that a hit needs only
        in part (sliding windows, states).
        """
        layout = prompt.namespace.layout
        _check(prompt, layout)
        if any(group.attention != "full" for group in layout.groups):
            raise LayoutError(
                "load: a hit has only a part of a group with sliding attention or a state; use "
                "lookup and claim"
            )
        self.register(prompt.namespace)
        for _ in range(_ATTEMPTS):
            with (
                suppress(DamagedChunks),
                self.lookup(prompt.query(), wait_s=wait_s, deadline_s=deadline_s) as hit,
            ):
                lease = self.claim(hit.ticket, deadline_s=deadline_s) if hit.ticket else None
                if lease is None:
                    break
                with lease:
                    return LoadedKV(hit.num_tokens, _read(lease, layout, hit.num_tokens))
        return LoadedKV(0, [_empty(group, 0) for group in layout.groups])


def _read(lease: Lease, layout: Layout, num_tokens: int) -> list[npt.NDArray[Any]]:
    kv = [_empty(group, num_tokens) for group in layout.groups]
    for number, group in enumerate(layout.groups):
        places, first = lease.chunks(number), 0
        for at, length in zip(places.offsets, places.num_tokens, strict=True):
            chunk = _chunk(lease.buffer, int(at), group, int(length))
            kv[number][:, :, first : first + length] = chunk
            first += int(length)
    lease.verify(layout)
    return kv


def _empty(group: Group, num_tokens: int) -> npt.NDArray[Any]:
    shape = (group.layers, group.planes, num_tokens, group.heads, group.head_dim)
    return np.empty(shape, _NUMPY[group.dtype])


def _chunk(
    buffer: npt.NDArray[np.uint8], at: int, group: Group, num_tokens: int
) -> npt.NDArray[Any]:
    """[layers, planes, tokens, heads, head_dim]; a view of the arena"""
    nbytes = group.layers * group.layer_bytes(num_tokens)
    shape = (group.layers, group.planes, num_tokens, group.heads, group.head_dim)
    return buffer[at : at + nbytes].view(_NUMPY[group.dtype]).reshape(shape)


def _check(prompt: Prompt, layout: Layout) -> None:
    if prompt.namespace.shards != 1:
        raise LayoutError(
            f"a namespace of {prompt.namespace.shards} shards: each shard stores its own part; use "
            "reserve and claim"
        )
    for number, group in enumerate(layout.groups):
        if group.packing != CANONICAL:
            raise LayoutError(
                f"group {number} has an engine's opaque packing, {group.packing!r}; use reserve "
                "and claim"
            )


def _check_arrays(kv: Sequence[npt.NDArray[Any]], layout: Layout, num_tokens: int) -> None:
    if not isinstance(kv, list | tuple) or len(kv) != len(layout.groups):
        given = f"{len(kv)} arrays" if isinstance(kv, list | tuple) else type(kv).__name__
        raise LayoutError(
            f"kv is {given}; it must be a list of {len(layout.groups)}, one for each group"
        )
    for number, (array, group) in enumerate(zip(kv, layout.groups, strict=True)):
        wanted = (group.layers, group.planes, num_tokens, group.heads, group.head_dim)
        dtype = np.dtype(_NUMPY[group.dtype])
        if array.shape != wanted or array.dtype != dtype:
            raise LayoutError(
                f"kv[{number}] is {array.dtype} {array.shape}; it must be {dtype} [layers, planes, "
                f"tokens, heads, head_dim] = {wanted}"
            )
