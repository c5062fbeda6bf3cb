"""rANS with several kinds of symbols: what goes in comes out, in bounded room, and a wrong end is
noticed.
"""

import numpy as np
import pytest

rans = pytest.importorskip("kvhold.kernels.numba_rans_kinds", reason="no numba in this environment")

SHAPES = [
    (1, 1),
    (1, 31),
    (3, 32),
    (7, 33),
    (5, 64),
    (40, 127),
    (2, 1000),
    (3, 70_000),
    (1, 200_000),
]


def probabilities(kinds: int, rng: np.random.Generator) -> np.ndarray:
    """[kinds, 256] of all sorts: one symbol alone, two, few, all that there are."""
    freq = np.zeros((kinds, 256), np.uint16)
    for row in freq:
        occur = rng.choice(256, int(rng.choice([1, 2, 9, 256])), replace=False)
        row[occur] = 1
        row[occur[0]] += rng.integers(rans.SCALE - occur.size + 1) if occur.size > 1 else 0
        row[occur[-1]] += rans.SCALE - row.sum()
    return freq


def drawn(freq: np.ndarray, kinds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    symbols = np.empty(kinds.size, np.uint8)
    for kind, row in enumerate(freq):
        symbols[kinds == kind] = rng.choice(256, int((kinds == kind).sum()), p=row / rans.SCALE)
    return symbols


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_kinds", [1, 5, 16])
def test_what_goes_in_comes_out(shape: tuple[int, int], num_kinds: int) -> None:
    rows, width = shape
    rng = np.random.default_rng(rows * width + num_kinds)
    freq = probabilities(num_kinds, rng)
    kinds = rng.integers(num_kinds, size=rows * width).astype(np.uint8)
    symbols = drawn(freq, kinds, rng)
    words, counts = rans.encode(symbols, kinds, width, freq)
    assert (
        counts.size
        == rans.num_segments(symbols.size, width)
        == -(-rows // max(1, rans.SEGMENT // width))
    )
    for wide in (False, True):
        out = np.empty_like(symbols)
        assert rans.decode(words, counts, kinds, width, freq, out, wide=wide)
        np.testing.assert_array_equal(out, symbols)


def test_it_takes_what_the_odds_say() -> None:
    rng = np.random.default_rng(1)
    freq = probabilities(8, rng)
    kinds = rng.integers(8, size=200 * 512).astype(np.uint8)
    symbols = drawn(freq, kinds, rng)
    words, counts = rans.encode(symbols, kinds, 512, freq)
    entropy = np.log2(rans.SCALE / freq[kinds, symbols]).sum()
    assert (
        0
        <= 16 * (words.size - rans.STATE_WORDS * counts.size) - entropy + 16 * 32
        <= 0.001 * entropy + 2 * 16 * 32
    )


def test_a_kind_of_one_symbol_costs_nothing() -> None:
    freq = np.zeros((1, 256), np.uint16)
    freq[0, 7] = rans.SCALE
    words, _ = rans.encode(np.full(6400, 7, np.uint8), np.zeros(6400, np.uint8), 64, freq)
    assert words.size == rans.STATE_WORDS


@pytest.mark.parametrize("wide", [False, True])
def test_a_wrong_word_is_noticed_or_gives_some_symbols(wide: bool) -> None:
    rng = np.random.default_rng(2)
    freq = probabilities(5, rng)
    kinds = rng.integers(5, size=50 * 96).astype(np.uint8)
    symbols = drawn(freq, kinds, rng)
    words, counts = rans.encode(symbols, kinds, 96, freq)
    noticed = 0
    for at in range(0, words.size, 7):
        wrong = words.copy()
        wrong[at] ^= 1 << rng.integers(16)
        noticed += not rans.decode(
            wrong, counts, kinds, 96, freq, np.empty_like(symbols), wide=wide
        )
    assert noticed > words.size // 7 * 0.7
    assert not rans.decode(
        words[:-1], counts - 1, kinds, 96, freq, np.empty_like(symbols), wide=wide
    )
    longer = np.append(words, np.uint16(0))
    assert not rans.decode(longer, counts + 1, kinds, 96, freq, np.empty_like(symbols), wide=wide)


def test_sizes_are_asserted_before_compiled_code() -> None:
    freq = np.zeros((2, 256), np.uint16)
    freq[:, 0] = rans.SCALE
    symbols, kinds = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    words, counts = rans.encode(symbols, kinds, 32, freq)
    for wrong in (
        (words, counts, kinds[:-1], 32, freq, symbols),
        (words, counts, kinds, 33, freq, symbols),
        (words, counts, kinds + np.uint8(2), 32, freq, symbols),
        (words, counts, kinds, 32, freq // 2, symbols),
        (words[:-1], counts, kinds, 32, freq, symbols),
        (words, counts[:0], kinds, 32, freq, symbols),
        (words, counts - 1, kinds, 32, freq, symbols),
    ):
        with pytest.raises(AssertionError):
            rans.decode(*wrong)
