"""XXH3-64 for compiled loops, of more than SHORT_BYTES bytes."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvhold.kernels import xxh3
from kvhold.kernels.numba_copy import LEAD_BYTES, prefetch, stream
from kvhold.kernels.xxh3 import SHORT_BYTES, STRIPE_BYTES, words_of_secret

__all__ = ["SHORT_BYTES", "START", "STRIPE_BYTES", "finish", "fold", "fold_and_stream"]

START = np.array(xxh3.START, np.uint64)
_SECRET, _STRIPES_PER_BLOCK = xxh3.SECRET, xxh3.STRIPES_PER_BLOCK

_WORD = ir.IntType(64)
_LANES = ir.VectorType(_WORD, 8)
_NUMBER = ir.IntType(32)


def _lanes(values: tuple[int, ...]) -> ir.Constant:
    return ir.Constant(_LANES, [ir.Constant(_WORD, value) for value in values])


def _load(builder: Any, address: Any) -> Any:
    """The host must be little-endian."""
    return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=1)


def _accumulate(builder: Any, acc: Any, data: Any, secret: Any) -> Any:
    order = ir.Constant(
        ir.VectorType(_NUMBER, 8), [ir.Constant(_NUMBER, lane ^ 1) for lane in range(8)]
    )
    swapped = builder.shuffle_vector(data, data, order)
    keyed = builder.xor(data, secret)
    low = builder.and_(keyed, _lanes((0xFFFFFFFF,) * 8))
    high = builder.lshr(keyed, _lanes((32,) * 8))
    return builder.add(acc, builder.add(swapped, builder.mul(low, high)))


def _scramble(builder: Any, acc: Any) -> Any:
    mixed = builder.xor(
        builder.xor(acc, builder.lshr(acc, _lanes((47,) * 8))),
        _lanes(words_of_secret(xxh3.SCRAMBLE_AT)),
    )
    return builder.mul(mixed, _lanes((xxh3.PRIME32_1,) * 8))


def _fold(
    builder: Any, at: Any, origin: Any, number: Any, stripes: Any, target: Any = None
) -> None:
    """target: where the stripes are written past the caches, too"""
    kind = ir.ArrayType(ir.IntType(8), len(_SECRET))
    table = cgutils.global_constant(
        builder, "kvhold_xxh3_secret", ir.Constant(kind, bytearray(_SECRET))
    )
    secret = builder.ptrtoint(table, _WORD)
    place = builder.inttoptr(at, _LANES.as_pointer())
    acc = cgutils.alloca_once_value(builder, builder.load(place, align=8))
    with cgutils.for_range(builder, stripes) as loop:
        nth = builder.and_(
            builder.add(number, loop.index), ir.Constant(_WORD, _STRIPES_PER_BLOCK - 1)
        )
        offset = builder.mul(loop.index, ir.Constant(_WORD, STRIPE_BYTES))
        here = builder.add(origin, offset)
        data = _load(builder, here)
        if target is not None:
            prefetch(builder, builder.add(here, ir.Constant(_WORD, LEAD_BYTES)))
            stream(builder, data, builder.add(target, offset))
        key = _load(builder, builder.add(secret, builder.mul(nth, ir.Constant(_WORD, 8))))
        builder.store(_accumulate(builder, builder.load(acc), data, key), acc)
        with builder.if_then(
            builder.icmp_unsigned("==", nth, ir.Constant(_WORD, _STRIPES_PER_BLOCK - 1)),
            likely=False,
        ):
            builder.store(_scramble(builder, builder.load(acc)), acc)
    builder.store(builder.load(acc), place, align=8)


@intrinsic
def fold(_: Any, state: Any, data: Any, first: Any, count: Any) -> Any:
    """From address `data` on. The first stripe is number `first`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fold(builder, *args)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), emit


@intrinsic
def fold_and_stream(_: Any, state: Any, data: Any, first: Any, count: Any, to: Any) -> Any:
    """`fold`, and copy the stripes to the address `to`, a multiple of LINE."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _fold(builder, *args)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), emit


@intrinsic
def finish(_: Any, state: Any, last: Any, nbytes: Any) -> Any:
    """Fold the last stripe, which may overlap, and merge all lanes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at, last_at, length = args
        acc = builder.load(builder.inttoptr(at, _LANES.as_pointer()), align=8)
        acc = _accumulate(
            builder, acc, _load(builder, last_at), _lanes(words_of_secret(xxh3.LAST_AT))
        )
        keyed = builder.xor(acc, _lanes(words_of_secret(xxh3.MERGE_AT)))
        wide = ir.IntType(128)
        result = builder.mul(length, ir.Constant(_WORD, xxh3.PRIME64_1))
        for lane in range(0, 8, 2):
            one, other = (
                builder.zext(builder.extract_element(keyed, ir.Constant(_NUMBER, number)), wide)
                for number in (lane, lane + 1)
            )
            product = builder.mul(one, other)
            folded = builder.xor(
                builder.trunc(product, _WORD),
                builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD),
            )
            result = builder.add(result, folded)
        result = builder.xor(result, builder.lshr(result, ir.Constant(_WORD, 37)))
        result = builder.mul(result, ir.Constant(_WORD, xxh3.PRIME_MX1))
        return builder.xor(result, builder.lshr(result, ir.Constant(_WORD, 32)))

    return types.uint64(types.int64, types.int64, types.int64), emit
