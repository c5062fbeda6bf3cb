"""Keys turned to new positions, angles included, beside memcpy; one thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold.kernels.rope import Rope, RopeLayout, rotate
from kvhold_lab.bench.gather import memcpy, touched
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, rate_row

LAYERS, TOKENS, HEADS, HEAD_DIM = 32, 1024, 8, 128
LAYOUTS: tuple[RopeLayout, ...] = ("half", "interleaved")
DTYPES = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
ROUNDS = 9

_starts = count(1)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    measured: list[Row] = []
    for dtype, kind in DTYPES.items():
        shape = (LAYERS, TOKENS, HEADS, HEAD_DIM)
        nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        source, into = touched(nbytes), touched(nbytes)
        keys, out = (part.view(kind).reshape(shape) for part in (source, into))
        keys[...] = np.resize(_elements(dtype), shape)
        with ThreadPoolExecutor(1) as helpers:
            work: dict[str, Callable[[], object]] = {
                "memcpy": partial(memcpy, into, source, 1, helpers)
            }
            for layout, in_place in product(LAYOUTS, (False, True)):
                name = f"turn keys, {layout}, {dtype}{', in place' if in_place else ''}"
                work[name] = partial(_turn, keys, keys if in_place else out, layout)
            seconds = in_turn(work, rounds=ROUNDS)
        measured += [
            profiles.of(
                rate_row(name, nbytes, seconds[name], seconds["memcpy"]),
                partial(of_calls, call),
            )
            for name, call in work.items()
            if name != "memcpy"
        ]
    return measured


def _elements(dtype: str) -> npt.NDArray[Any]:
    """No subnormal numbers, which are slow."""
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(DTYPES[dtype])


def _turn(keys: object, out: object, layout: RopeLayout) -> None:
    positions = np.arange(TOKENS) + next(_starts)
    rotate(keys, np.arange(TOKENS), positions, Rope(HEAD_DIM, HEAD_DIM, layout=layout), out=out)
