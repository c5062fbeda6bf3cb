"""XXH3-64 on a GPU, on the current stream."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvhold.kernels import xxh3
from kvhold.kernels.ranges import Ranges

PROGRAMS = 264  # two for each multiprocessor of an H100
_WARPS = 1  # a block has 128 words


class _StartedSums:
    """Valid after the stream has passed."""

    def __init__(self, found: torch.Tensor, table: torch.Tensor) -> None:
        self._found = found
        self._table = table  # until the kernel has read it

    def read(self) -> npt.NDArray[np.uint64]:
        found: npt.NDArray[np.uint64] = self._found.numpy().view(np.uint64)
        return found


def begin_sums(ranges: Ranges, device: str) -> _StartedSums:
    """The ranges must suit GPUs."""
    on_host = device == "cpu"
    if on_host and not INTERPRETED:
        raise ValueError("the kernel sums host memory only under TRITON_INTERPRET=1")
    parts = (ranges.first, ranges.addresses, ranges.nbytes)
    of_host = torch.empty(
        sum(part.size for part in parts), dtype=torch.int64, pin_memory=not on_host
    )
    np.concatenate(parts, out=of_host.numpy())
    table = of_host if on_host else of_host.to(device, non_blocking=True)
    found = torch.empty(ranges.count, dtype=torch.int64, pin_memory=not on_host)
    _launch(table, ranges.count, ranges.nbytes.size, found, device)
    return _StartedSums(found, table)


def prepare(device: str) -> None:
    found = torch.empty(1, dtype=torch.int64, pin_memory=device != "cpu")
    _launch(torch.zeros(1, dtype=torch.int64, device=device), 0, 0, found, device)


def _launch(
    table: torch.Tensor, num_ranges: int, num_pieces: int, found: torch.Tensor, device: str
) -> None:
    with nullcontext() if device == "cpu" else torch.cuda.device(device):
        _sum_ranges[(max(1, min(PROGRAMS, num_ranges)),)](
            table,
            num_ranges,
            num_pieces,
            found.data_ptr(),
            _constants(device),
            num_warps=_WARPS,
        )


@cache
def _constants(device: str) -> torch.Tensor:
    """Words: 0 secret, 24 scrambling, 32 last stripe, 40 merging, 48 start, 56 primes."""
    words = np.array(
        (
            *xxh3.words_of_secret(0, 23),
            0,
            *xxh3.words_of_secret(xxh3.SCRAMBLE_AT),
            *xxh3.words_of_secret(xxh3.LAST_AT),
            *xxh3.words_of_secret(xxh3.MERGE_AT),
            *xxh3.START,
            xxh3.PRIME32_1,
            xxh3.PRIME64_1,
            xxh3.PRIME_MX1,
        ),
        np.uint64,
    )
    return torch.from_numpy(words.view(np.int64)).to(device)


@triton.jit
def _sum(values):  # type: ignore[no-untyped-def]
    """Over the first axis. `tl.sum` would be compiled where this module is interpreted."""
    return tl.reduce(values, 0, tl.standard._sum_combine)


@triton.jit
def _products(data, other, key):  # type: ignore[no-untyped-def]
    keyed = data ^ key
    return other + (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _scrambled(acc, key, prime):  # type: ignore[no-untyped-def]
    return (acc ^ (acc >> 47) ^ key) * prime


@triton.jit
def _fold(acc, words, blocks, own, swapped, key, scramble_key, prime):  # type: ignore[no-untyped-def]
    """Fold whole blocks. The loads of four do not wait for each other."""
    in_fours = blocks // 4 * 4
    for block in range(0, in_fours, 4):
        at = words + block * 128
        first = _products(tl.load(at + own), tl.load(at + swapped), key)
        second = _products(tl.load(at + 128 + own), tl.load(at + 128 + swapped), key)
        third = _products(tl.load(at + 256 + own), tl.load(at + 256 + swapped), key)
        fourth = _products(tl.load(at + 384 + own), tl.load(at + 384 + swapped), key)
        acc = _scrambled(acc + _sum(first), scramble_key, prime)
        acc = _scrambled(acc + _sum(second), scramble_key, prime)
        acc = _scrambled(acc + _sum(third), scramble_key, prime)
        acc = _scrambled(acc + _sum(fourth), scramble_key, prime)
    for block in range(in_fours, blocks):
        products = _products(
            tl.load(words + block * 128 + own), tl.load(words + block * 128 + swapped), key
        )
        acc = _scrambled(acc + _sum(products), scramble_key, prime)
    return acc


@triton.jit(do_not_specialize=["num_ranges", "num_pieces", "found"])
def _sum_ranges(  # type: ignore[no-untyped-def]  # Triton reads annotations itself and knows few
    table,
    num_ranges,
    num_pieces,
    found,
    constants,
):
    """A program takes every n-th range. Lane i of a stripe also adds word i ^ 1 of the stripe.

    table: `Ranges`, as int64. found: the address of uint64 [ranges]
    """
    word = tl.pointer_type(tl.uint64)
    constants = constants.to(word)
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)[:, None]
    own, swapped = stripe * 8 + lane[None, :], stripe * 8 + (lane ^ 1)[None, :]
    key = tl.load(constants + stripe + lane[None, :])
    scramble_key = tl.load(constants + 24 + lane)
    prime32 = tl.load(constants + 56)

    for number in range(tl.program_id(0), num_ranges, tl.num_programs(0)):
        first = tl.load(table + number)
        last = tl.load(table + number + 1) - 1
        addresses = table + num_ranges + 1
        acc = tl.load(constants + 48 + lane)
        total = first - first
        for piece in range(first, last):
            nbytes = tl.load(addresses + num_pieces + piece)
            words = tl.load(addresses + piece).to(word)
            total += nbytes
            acc = _fold(acc, words, nbytes // 1024, own, swapped, key, scramble_key, prime32)

        nbytes = tl.load(addresses + num_pieces + last)
        words = tl.load(addresses + last).to(word)
        total += nbytes
        stripes = (nbytes - 1) // 64
        acc = _fold(acc, words, stripes // 16, own, swapped, key, scramble_key, prime32)

        words += stripes // 16 * 128
        is_there = (stripe < stripes % 16) & (lane[None, :] >= 0)
        data = tl.load(words + own, mask=is_there, other=0)
        other = tl.load(words + swapped, mask=is_there, other=0)
        acc += _sum(tl.where(is_there, _products(data, other, key), 0))

        words = (tl.load(addresses + last) + nbytes - 64).to(word)
        acc += _products(
            tl.load(words + lane), tl.load(words + (lane ^ 1)), tl.load(constants + 32 + lane)
        )
        keyed = acc ^ tl.load(constants + 40 + lane)
        one, other_half = tl.split(tl.reshape(keyed, (4, 2)))
        folded = (one * other_half) ^ tl.umulhi(one, other_half)
        result = total.to(tl.uint64) * tl.load(constants + 57) + _sum(folded)
        result = (result ^ (result >> 37)) * tl.load(constants + 58)
        tl.store(found.to(word) + number, result ^ (result >> 32))


INTERPRETED = not isinstance(_sum_ranges, triton.runtime.JITFunction)
