"""CacheGen's arithmetic on a GPU: sums, bins, symbols, words and values are numba's."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton in this environment")
bins = pytest.importorskip("kvhold.kernels.numba_bins", reason="no numba in this environment")
from kvhold.codecs import cachegen  # noqa: E402  # after the skips
from kvhold.core.layout import Group  # noqa: E402
from kvhold.kernels import numba_rans_kinds as kinds_rans  # noqa: E402
from tests.kernels.interpreted import interpreted, of_a_layer, standing_in, tensor  # noqa: E402
from tests.kernels.test_triton_quantise import DTYPES, bits_of  # noqa: E402

pytestmark = pytest.mark.slow  # the interpreter takes a millisecond for each step

TOKENS, WIDTH = 9, 140
BOUNDS = np.array([0, 70, 140])


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    with interpreted("bins") as module:
        yield module


@pytest.fixture(scope="module")
def rans_twin() -> Iterator[ModuleType]:
    with interpreted("rans_kinds") as module:
        yield module


def numbers(dtype: str, tokens: int = TOKENS, width: int = WIDTH) -> np.ndarray[Any, Any]:
    """Channels of unlike sizes off zero; one of them all zeros, some numbers far out."""
    rng = np.random.default_rng(5)
    values = (rng.normal(0, 1, (tokens, width)) + rng.normal(0, 2, width)) * 2.0 ** rng.integers(-3, 4, width)
    values[:, 4] = 0
    values[rng.random(values.shape) < 0.02] *= 9
    return bits_of(values.reshape(-1), dtype)


def steps_and_offsets(elements: np.ndarray[Any, Any], dtype: str, width: int = WIDTH) -> tuple[Any, Any]:
    """Steps of a third of the mean distance, but a 127th of the largest at least."""
    tokens = elements.size // width
    channels = bins.measure(elements, dtype, tokens, width)
    means = channels.sums / tokens
    spread = bins.distances(elements, dtype, tokens, means) / tokens
    steps = np.maximum(spread / 3, channels.largest / 126).astype(np.float32)
    offsets = np.rint(np.divide(means, steps, out=np.zeros(width), where=steps > 0)).astype(np.int8)
    return steps, offsets


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_the_same_to_the_last_bit(twin: ModuleType, dtype: str) -> None:
    elements = numbers(dtype)
    expected, found = bins.measure(elements, dtype, TOKENS, WIDTH), twin.measure(tensor(elements), dtype, TOKENS, WIDTH)
    np.testing.assert_array_equal(found.sums.numpy().view(np.uint64), expected.sums.view(np.uint64))
    np.testing.assert_array_equal(found.largest.numpy(), expected.largest)
    means = expected.sums / TOKENS
    np.testing.assert_array_equal(
        twin.distances(tensor(elements), dtype, TOKENS, tensor(means)).numpy(), bins.distances(elements, dtype, TOKENS, means)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_bins_and_back(twin: ModuleType, dtype: str) -> None:
    """Every step of an encoder, each with what numba makes of the one before; then the decoder's."""
    elements = numbers(dtype)
    steps, offsets = steps_and_offsets(elements, dtype)
    deviations = bins.quantise(elements, dtype, steps, offsets)
    np.testing.assert_array_equal(twin.quantise(tensor(elements), dtype, tensor(steps), tensor(offsets)).numpy(), deviations)

    sizes, found = bins.magnitudes(deviations, WIDTH, BOUNDS), twin.magnitudes(tensor(deviations), WIDTH, tensor(BOUNDS))
    np.testing.assert_array_equal(found.of_columns.numpy(), sizes.of_columns)
    np.testing.assert_array_equal(found.of_runs.numpy(), sizes.of_runs)

    classes = np.arange(WIDTH, dtype=np.uint8) % 5
    shifts = np.random.default_rng(0).integers(-8, 8, (TOKENS, 2)).astype(np.int8)
    kinds = bins.spread_kinds(classes, shifts, BOUNDS, TOKENS, 6)
    np.testing.assert_array_equal(twin.spread_kinds(tensor(classes), tensor(shifts), tensor(BOUNDS), TOKENS, 6).numpy(), kinds)
    np.testing.assert_array_equal(twin.count(tensor(deviations), tensor(kinds), 6).numpy(), bins.count(deviations, kinds, 6))

    reach = np.array([0, 1, 3, 7, 20, 63])
    symbols, exceptions = bins.to_symbols(deviations, kinds, offsets, reach)
    assert exceptions.size > 50
    ours = twin.to_symbols(tensor(deviations), tensor(kinds), tensor(offsets), tensor(reach))
    np.testing.assert_array_equal(ours[0].numpy(), symbols)
    np.testing.assert_array_equal(ours[1].numpy(), exceptions)

    expected, back = np.empty_like(elements), tensor(np.zeros_like(elements))
    assert bins.dequantise(symbols, offsets, steps, exceptions, dtype, expected)
    assert twin.dequantise(*(tensor(each) for each in (symbols, offsets, steps, exceptions)), dtype, back)
    np.testing.assert_array_equal(back.numpy(), expected)
    for wrong in (exceptions[1:], np.append(exceptions, exceptions[:1])):
        assert not bins.dequantise(symbols, offsets, steps, wrong, dtype, expected)
        assert not twin.dequantise(*(tensor(each) for each in (symbols, offsets, steps, wrong)), dtype, back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_symbols_and_steps_dequantise_to_the_same(twin: ModuleType, dtype: str) -> None:
    """What a hostile frame may hold: every symbol beside any offset, steps up to the largest float32; rows wider than a tile."""
    rng = np.random.default_rng(1)
    symbols = rng.integers(0, 256, 2 * 1030).astype(np.uint8)
    offsets = rng.integers(-128, 128, 1030).astype(np.int8)
    steps = rng.choice(np.array([0, 1e-45, 0.7, 3e36, np.finfo(np.float32).max], np.float32), 1030)
    exceptions = rng.integers(-128, 128, int((symbols == bins.ESCAPE).sum())).astype(np.int8)
    expected = np.empty(symbols.size, np.uint32 if dtype == "float32" else np.uint16)
    back = tensor(np.zeros_like(expected))
    assert bins.dequantise(symbols, offsets, steps, exceptions, dtype, expected)
    with np.errstate(over="ignore"):
        assert twin.dequantise(*(tensor(each) for each in (symbols, offsets, steps, exceptions)), dtype, back)
    np.testing.assert_array_equal(back.numpy(), expected)


def coded(width: int, rows: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Symbols of three kinds, and their frequencies: of the first, one symbol alone."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3, rows * width).astype(np.uint8)
    symbols = np.where(kinds == 0, 0, np.where(kinds == 1, rng.integers(0, 4, kinds.size), rng.integers(0, 256, kinds.size)))
    freq = np.zeros((3, 256), np.uint16)
    freq[0, 0] = kinds_rans.SCALE
    freq[1, :4] = 1000, 1, 20, 3
    freq[2] = 4
    return symbols.astype(np.uint8), kinds, freq


@pytest.mark.parametrize(("width", "rows"), [(1, 5), (31, 3), (32, 4), (70, 6)])
def test_words_of_many_kinds(rans_twin: ModuleType, width: int, rows: int) -> None:
    symbols, kinds, freq = coded(width, rows)
    expected, counts = kinds_rans.encode(symbols, kinds, width, freq)
    words, found = rans_twin.encode(tensor(symbols), tensor(kinds), width, tensor(freq))
    np.testing.assert_array_equal(words.numpy(), expected)
    np.testing.assert_array_equal(found.numpy(), counts)
    out = tensor(np.zeros_like(symbols))
    assert rans_twin.decode(words, found, tensor(kinds), width, tensor(freq), out)
    np.testing.assert_array_equal(out.numpy(), symbols)


def test_planes_and_segments_of_many_kinds(rans_twin: ModuleType) -> None:
    """Two planes in segments of two rows, the last of one: what each segment gives alone."""
    both = [coded(40, 5, seed) for seed in (1, 2)]
    both[1][2][1, :4] = 20, 4, 500, 500
    alone = [
        kinds_rans.encode(symbols[begin : begin + 80], kinds[begin : begin + 80], 40, freq)
        for symbols, kinds, freq in both
        for begin in (0, 80, 160)
    ]
    symbols, kinds, freq = (tensor(np.stack(each)) for each in zip(*both, strict=True))
    words, counts = rans_twin.encode(symbols, kinds, 40, freq, most=90)
    np.testing.assert_array_equal(words.numpy(), np.concatenate([each[0] for each in alone]))
    np.testing.assert_array_equal(counts.numpy(), np.concatenate([each[1] for each in alone]))
    out = tensor(np.zeros_like(symbols.numpy()))
    assert rans_twin.decode(words, counts, kinds, 40, freq, out, most=90)
    np.testing.assert_array_equal(out.numpy(), symbols.numpy())


@pytest.mark.parametrize("seed", range(8))
def test_words_no_encoder_wrote_get_numbas_verdict(rans_twin: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbols, kinds, freq = coded(70, 4)
    words = kinds_rans.encode(symbols, kinds, 70, freq)[0].copy()
    if seed % 4 == 0:
        words[rng.integers(words.size)] ^= np.uint16(1 << rng.integers(16))
    elif seed % 4 == 1:
        words = words[: rng.integers(64, words.size)]
    elif seed % 4 == 2:
        words = np.append(words, words[:3])
    else:
        words[:] = rng.integers(0, 1 << 16, words.size)
    counts, expected, out = np.array([words.size]), np.empty_like(symbols), tensor(np.zeros_like(symbols))
    verdict = kinds_rans.decode(words, counts, kinds, 70, freq, expected)
    assert rans_twin.decode(tensor(words), tensor(counts), tensor(kinds), 70, tensor(freq), out) is verdict
    if verdict:
        np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_of_the_cachegen_codec(twin: ModuleType, rans_twin: ModuleType, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec gives the same bytes, and the same values back, if all its arithmetic is done here."""
    group = Group(layers=1, planes=2, heads=2, head_dim=16, dtype=dtype)
    plain = numbers(dtype, 48, 32).tobytes()
    expected = of_a_layer(cachegen.CacheGen(), plain, group, 24)
    assert len(expected[0]) < len(plain)

    names = ["measure", "distances", "quantise", "magnitudes", "spread_kinds", "count", "to_symbols", "dequantise"]
    monkeypatch.setattr(cachegen, "bins", standing_in(bins, twin, names))
    monkeypatch.setattr(cachegen, "rans", standing_in(kinds_rans, rans_twin, ["encode", "decode"]))
    assert of_a_layer(cachegen.CacheGen(), plain, group, 24) == expected
