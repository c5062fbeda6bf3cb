"""What `lossless` promises beyond the contract: sizes, both decoders alike, and what its planes
become.
"""

import random

import numpy as np
import pytest

from kvhold.codecs import make_codec
from kvhold.core.layout import DTYPE_BYTES, Group, Layout
from kvhold.testing.codec import Case, decode, encode_layer
from kvhold.testing.values import from_float64
from tests.codecs.independent import decode_lossless

rans = pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")
from kvhold.codecs.lossless import Lossless  # noqa: E402 - it wants numba


def case(
    dtype: str = "bfloat16",
    *,
    tokens: int = 128,
    planes: int = 2,
    heads: int = 2,
    head_dim: int = 64,
    **group: object,
) -> Case:
    place = Group(layers=1, planes=planes, heads=heads, head_dim=head_dim, dtype=dtype, **group)  # type: ignore[arg-type]
    return Case(
        Layout(groups=(place,), tokens_per_chunk=256, tail_tokens=place.block_tokens or 1),
        0,
        tokens,
    )


def normal(place: Case, *, outliers: bool = False, seed: int = 0) -> memoryview:
    """A layer of normal numbers; with `outliers`, channels of very different sizes."""
    group, rng = place.layout.groups[0], np.random.default_rng(seed)
    values = rng.standard_normal((group.planes, place.num_tokens, group.heads, group.head_dim))
    if outliers:
        values *= 2.0 ** rng.integers(-6, 7, (group.heads, group.head_dim))
    return memoryview(from_float64(values.reshape(-1), group.dtype))


def encoded(place: Case, plain: memoryview) -> bytes:
    found = encode_layer(make_codec("lossless"), place, 0, plain)
    assert decode(make_codec("lossless"), place, 0, found) == plain
    return found


@pytest.mark.parametrize(
    ("dtype", "least"),
    [("bfloat16", 1.45), ("float16", 1.15), ("float32", 1.18), ("float8_e4m3fn", 1.15)],
)
@pytest.mark.parametrize("outliers", [False, True], ids=["even", "outliers"])
def test_numbers_become_smaller(dtype: str, least: float, outliers: bool) -> None:
    place = case(dtype, tokens=256, heads=8, head_dim=64)
    # 13 octaves do not fit into four bits of exponent
    scale_down = dtype == "float8_e4m3fn" and outliers
    plain = normal(place, outliers=outliers and not scale_down)
    assert len(plain) / len(encoded(place, plain)) > least


def test_channels_of_unlike_sizes_cost_little_more_than_like_ones() -> None:
    place = case(tokens=256)
    even, uneven = (
        len(encoded(place, normal(place, outliers=outliers))) for outliers in (False, True)
    )
    # a bias for each channel of K and V; without it, thousands more
    assert uneven < even + 2 * 128 + 200


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_what_repeats_one_value_takes_almost_nothing(dtype: str) -> None:
    place = case(dtype)
    size = DTYPE_BYTES[dtype]
    assert len(encoded(place, memoryview(bytes(place.layer_bytes)))) == 1 + 2 * 2 * size
    element = random.Random(2).randbytes(size)
    assert (
        len(encoded(place, memoryview(element * (place.layer_bytes // size)))) == 1 + 2 * 2 * size
    )


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("tokens", [1, 5, 128, 256])
def test_noise_grows_by_one_byte(dtype: str, tokens: int) -> None:
    place = case(dtype, tokens=tokens)
    plain = memoryview(random.Random(3).randbytes(place.layer_bytes))
    assert len(encoded(place, plain)) == 1 + len(plain)


def test_a_bias_that_helps_but_not_enough_is_not_taken() -> None:
    """The plane goes as it came, not as it would have been without its channels' means."""
    place = case("float8_e4m3fn", tokens=256, heads=8, head_dim=64)
    rng = np.random.default_rng(11)
    turned = rng.integers(0, 235, (256, 512)) + 16 * (np.arange(512) % 2)
    keys = (turned >> 1 | (turned & 1) << 7).astype(np.uint8)
    assert 0.98 < entropy(np.bincount((turned - 16 * (np.arange(512) % 2)).reshape(-1))) / 8 < 0.99
    found = encoded(place, memoryview(keys.tobytes() + bytes(keys.size)))
    assert found == b"\1\0" + keys_turned(keys) + b"\1\0"


def keys_turned(keys: np.ndarray) -> bytes:
    """Plane 0 of bytes."""
    return bytes((keys << 1 | keys >> 7).astype(np.uint8).reshape(-1))


def entropy(counts: np.ndarray) -> float:
    """Bits a symbol."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def test_a_state_in_an_opaque_packing_is_bytes_and_comes_back() -> None:
    place = case(
        "bfloat16", tokens=128, attention="state", packing="ssm", block_tokens=16, block_bytes=8195
    )
    dice = np.random.default_rng(4)
    plain = memoryview(dice.binomial(255, 0.02, place.layer_bytes).astype(np.uint8).tobytes())
    assert len(encoded(place, plain)) < len(plain) * 0.6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("shape", [(1, 128, 1, 300), (2, 130, 2, 67), (2, 9, 1, 33)], ids=str)
def test_a_reader_written_from_the_page_reads_it(
    dtype: str, shape: tuple[int, int, int, int]
) -> None:
    planes, tokens, heads, head_dim = shape
    place = case(dtype, tokens=tokens, planes=planes, heads=heads, head_dim=head_dim)
    plain = normal(place, outliers=dtype in ("bfloat16", "float32"))
    if dtype == "uint8":
        plain = memoryview(
            np.random.default_rng(5)
            .binomial(255, 0.02, place.layer_bytes)
            .astype(np.uint8)
            .tobytes()
        )
    found = encoded(place, plain)
    assert found[0] == (1 if tokens > 9 else found[0])
    assert (decode_lossless(found, dtype, list(shape)) if found[0] else found[1:]) == plain


def planes_to_code() -> list[np.ndarray]:
    """Skewed in all ways, of every awkward length."""
    rng = np.random.default_rng(6)
    found = [
        rng.geometric(p, size).clip(1, 256).astype(np.uint8) - 1
        for p in (0.999, 0.9, 0.4, 0.05)
        for size in (
            2,
            31,
            32,
            33,
            63,
            1000,
            rans.SEGMENT - 1,
            rans.SEGMENT,
            rans.SEGMENT + 1,
            3 * rans.SEGMENT + 17,
        )
    ]
    found.append(rng.integers(0, 256, 50_000, dtype=np.uint8))
    rare = np.zeros(100_000, np.uint8)
    rare[77] = 255
    return [plane for plane in [*found, rare] if len(np.unique(plane)) > 1]


@pytest.mark.parametrize("wide", [False, True], ids=["lane by lane", "16 lanes"])
def test_planes_come_back_and_take_no_more_than_their_entropy_and_a_little(wide: bool) -> None:
    planes = planes_to_code()
    assert len(planes) > 30
    for plane in planes:
        counts = rans.histogram(plane)
        assert np.array_equal(counts, np.bincount(plane, minlength=256))
        freq = rans.frequencies(counts)
        assert (
            freq.sum() == rans.SCALE
            and ((freq > 0) == (counts > 0)).all()
            and freq.max() < rans.SCALE
        )
        words, segments = rans.encode(plane, freq)
        found = np.full(plane.size, 0xEE, np.uint8)
        assert rans.decode(words, segments, freq, found, wide=wide)
        assert np.array_equal(found, plane)
        # Frequencies of 1/4096 at least cost what is rarer a bit, and what it takes them from.
        assert (
            words.nbytes
            <= 1.02 * entropy(counts) * plane.size / 8
            + len(segments) * 2 * rans.STATE_WORDS
            + plane.size * 0.01
            + 16
        )


def test_both_decoders_say_the_same_of_damaged_words() -> None:
    rng = np.random.default_rng(7)
    plane = rng.geometric(0.4, 3000).clip(1, 256).astype(np.uint8)
    freq = rans.frequencies(rans.histogram(plane))
    words, segments = rans.encode(plane, freq)
    verdicts = []
    for number in range(500):
        damaged = words.copy()
        # Cut short; or whole, with a wrong word so near the end that only the states can show it.
        at, cut = int(rng.integers(len(words))), int(rng.integers(rans.STATE_WORDS, len(words) + 1))
        if number % 2:
            at, cut = len(words) - 1 - number % 30, len(words)
        damaged[at] ^= 1 << rng.integers(16)
        damaged, counts = damaged[:cut].copy(), np.array([cut], np.int64)
        one, other = np.zeros(plane.size, np.uint8), np.zeros(plane.size, np.uint8)
        verdict = rans.decode(damaged, counts, freq, one, wide=False)
        assert rans.decode(damaged, counts, freq, other, wide=True) == verdict
        verdicts.append(verdict)
    assert not any(verdicts)
    assert rans.decode(words, segments, freq, np.zeros(plane.size, np.uint8))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_what_is_cut_into_planes_is_put_together_again(size: int, width: int) -> None:
    rng = np.random.default_rng(8)
    elements = np.frombuffer(rng.bytes(size * 640), f"<u{size}")
    planes = rans.split(elements)
    top = 8 * size - 1
    turned = [(int(x) << 1 | int(x) >> top) % 2 ** (8 * size) for x in elements]
    assert [bytes(column) for column in planes.T] == [x.to_bytes(size, "big") for x in turned]
    for bias in (None, rng.integers(0, 256, width, dtype=np.uint8)):
        lowered = planes.copy()
        if bias is not None:
            lowered[0] = (planes[0].reshape(-1, width) - bias).reshape(-1)
            assert np.array_equal(
                rans.channel_sums(planes[0], width),
                planes[0].reshape(-1, width).astype(np.int64).sum(axis=0),
            )
        out = np.empty_like(elements)
        rans.merge(list(lowered), bias, out)
        assert np.array_equal(out, elements)


def test_it_can_be_made_by_its_class_too() -> None:
    assert type(make_codec("lossless")) is Lossless
