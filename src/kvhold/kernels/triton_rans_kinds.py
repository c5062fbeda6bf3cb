"""rANS for rows of symbols of many kinds on a GPU: what numba_rans_kinds.py does, with the same words and the same refusals.

    words, counts = encode(symbols, kinds, width, freq)        # kinds[i] is the row of freq that symbol i is coded with
    intact = decode(words, counts, kinds, width, freq, found)  # False: no encoder can have written this

What triton_rans.py says of itself is true here too: its kernels do this as well. All of symbols, kinds and freq may have a first axis
more, of planes that share a launch; their segments are end to end then.
"""

import torch

from kvhold.kernels.numba_rans_kinds import SCALE, SCALE_BITS, SEGMENT
from kvhold.kernels.triton_launch import Tensor
from kvhold.kernels.triton_rans import decode_segments, encode_segments


def encode(symbols: Tensor, kinds: Tensor, width: int, freq: Tensor, *, most: int = SEGMENT) -> tuple[Tensor, Tensor]:
    """All segments end to end as uint16, and int64 [segments] the words of each.

    symbols: uint8 [rows * width]
    kinds:   uint8 [rows * width], each less than freq's rows (asserted)
    freq:    uint16 [kinds, 256], each row of sum SCALE (asserted); not 0 for any symbol of that kind
    most:    symbols of a segment, if a row has no more; another number is for tests
    """
    symbols, kinds, tables = _planes(symbols, kinds, width, freq)
    return encode_segments(symbols, kinds, tables, width=width, segment_size=_segment(width, most), scale_bits=SCALE_BITS)


def decode(words: Tensor, counts: Tensor, kinds: Tensor, width: int, freq: Tensor, out: Tensor, *, most: int = SEGMENT) -> bool:
    """Fill `out` uint8 [rows * width] from all segments. False if any does not end as an encoder ends it; `out` then holds anything.

    words, counts: as `encode` gives them; counts of sum `words.numel()`, each at least STATE_WORDS (asserted)
    kinds, freq, most: as for `encode`
    """
    found, kinds, tables = _planes(out, kinds, width, freq)
    return decode_segments(words, counts, kinds, tables, found, width=width, segment_size=_segment(width, most), scale_bits=SCALE_BITS)


def _segment(width: int, most: int) -> int:
    return max(most // width, 1) * width


def _planes(symbols: Tensor, kinds: Tensor, width: int, freq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """symbols and kinds [planes, n], and freq int64 [planes * kinds, 256]."""
    if symbols.ndim == 1:
        symbols, kinds, freq = symbols[None], kinds[None], freq[None]
    assert width > 0 and symbols.shape[1] % width == 0 and kinds.shape == symbols.shape and kinds.dtype == symbols.dtype == torch.uint8
    assert freq.ndim == 3 and freq.shape[::2] == (symbols.shape[0], 256)
    assert not kinds.numel() or int(kinds.max()) < freq.shape[1]
    tables = freq.to(torch.int64).view(-1, 256)
    assert bool((tables.sum(dim=1) == SCALE).all())
    return symbols, kinds, tables
