"""rANS on a GPU: the words, counts, verdicts and bytes are numba's."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton in this environment")
rans = pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")
from kvhold.codecs import lossless  # noqa: E402  # after the skips
from kvhold.core.layout import Group  # noqa: E402
from tests.kernels.interpreted import interpreted, of_a_layer, standing_in, tensor  # noqa: E402

pytestmark = pytest.mark.slow  # the interpreter takes a millisecond for each step

SIZES = [2, 31, 32, 33, 500]


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    with interpreted("rans") as module:
        yield module


def content(kind: str, size: int) -> np.ndarray[Any, Any]:
    """At least two bytes occur, as coding wants."""
    rng = np.random.default_rng(size)
    if kind == "random":
        plane = rng.integers(0, 256, size)
    elif kind == "skewed":
        plane = np.clip(np.rint(rng.normal(120, 2, size)), 0, 255)
    elif kind == "nearly constant":
        plane = np.full(size, 7)
    else:
        plane = np.arange(size) // 32 % 2 * 255  # all lanes want the same at a time
    plane = plane.astype(np.uint8)
    plane[-1] = plane[0] ^ 1
    return plane


@pytest.mark.parametrize("kind", ["random", "skewed", "nearly constant", "in step"])
@pytest.mark.parametrize("size", SIZES)
def test_words_and_bytes_are_numbas(twin: ModuleType, kind: str, size: int) -> None:
    plane = content(kind, size)
    freq = rans.frequencies(rans.histogram(plane))
    expected, counts = rans.encode(plane, freq)
    words, found = twin.encode(tensor(plane), tensor(freq))
    np.testing.assert_array_equal(words.numpy(), expected)
    np.testing.assert_array_equal(found.numpy(), counts)
    out = tensor(np.zeros_like(plane))
    assert twin.decode(words, found, tensor(freq), out)
    np.testing.assert_array_equal(out.numpy(), plane)


def test_planes_and_segments_are_coded_each_by_itself(twin: ModuleType) -> None:
    """What many planes of several segments give is what each segment gives alone; segments are of full size in the slow test."""
    planes = np.stack([content("skewed", 150), content("random", 150)])
    freq = np.stack([rans.frequencies(rans.histogram(plane)) for plane in planes])
    alone = [rans.encode(plane[begin : begin + 64], table) for plane, table in zip(planes, freq, strict=True) for begin in (0, 64, 128)]
    words, counts = twin.encode(tensor(planes), tensor(freq), segment_size=64)
    np.testing.assert_array_equal(words.numpy(), np.concatenate([each[0] for each in alone]))
    np.testing.assert_array_equal(counts.numpy(), np.concatenate([each[1] for each in alone]))
    out = tensor(np.zeros_like(planes))
    assert twin.decode(words, counts, tensor(freq), out, segment_size=64)
    np.testing.assert_array_equal(out.numpy(), planes)
    # One word of the last segment changed: all are refused.
    words.numpy()[-1] ^= 1
    assert not twin.decode(words, counts, tensor(freq), out, segment_size=64)


@pytest.mark.slow
def test_segments_of_full_size(twin: ModuleType) -> None:
    plane = content("skewed", rans.SEGMENT + 70)
    freq = rans.frequencies(rans.histogram(plane))
    expected, counts = rans.encode(plane, freq)
    words, found = twin.encode(tensor(plane), tensor(freq))
    np.testing.assert_array_equal(words.numpy(), expected)
    np.testing.assert_array_equal(found.numpy(), counts)
    out = tensor(np.zeros_like(plane))
    assert twin.decode(words, found, tensor(freq), out)
    np.testing.assert_array_equal(out.numpy(), plane)


@pytest.mark.parametrize("seed", range(12))
def test_what_no_encoder_wrote_gets_numbas_verdict(twin: ModuleType, seed: int) -> None:
    """Changed, cut, lengthened, and all zeros, ones or noise; where numba accepts it, which a flip may be, the bytes are the same."""
    rng = np.random.default_rng(seed)
    plane = content("skewed", 200)
    freq = rans.frequencies(rans.histogram(plane))
    words, counts = rans.encode(plane, freq)
    words = words.copy()
    how = seed % 6
    if how == 0:
        words[rng.integers(words.size)] ^= np.uint16(1 << rng.integers(16))
    elif how == 1:
        words = words[: rng.integers(rans.STATE_WORDS, words.size)]
    elif how == 2:
        words = np.append(words, rng.integers(0, 1 << 16, 5).astype(np.uint16))
    else:
        words[:] = {3: np.zeros(words.size), 4: np.full(words.size, 0xFFFF), 5: rng.integers(0, 1 << 16, words.size)}[how]
    counts = np.array([words.size])
    expected, out = np.empty_like(plane), tensor(np.zeros_like(plane))
    verdict = rans.decode(words, counts, freq, expected)
    assert twin.decode(tensor(words), tensor(counts), tensor(freq), out) is verdict
    if verdict:
        np.testing.assert_array_equal(out.numpy(), expected)


def test_nothing_beyond_a_segment_is_read(twin: ModuleType) -> None:
    """Words of a segment that lacks one do not come from the next, which begins where it ends."""
    plane = content("random", 256)
    freq = rans.frequencies(rans.histogram(plane))
    words = rans.encode(plane[:128], freq)[0]
    shifted = tensor(np.concatenate([words, words]))
    out = tensor(np.zeros_like(plane))
    assert twin.decode(shifted, tensor(np.array([words.size, words.size])), tensor(freq), out, segment_size=128)
    assert not twin.decode(shifted, tensor(np.array([words.size - 1, words.size + 1])), tensor(freq), out, segment_size=128)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [1, 1023, 1032])
def test_split_and_merge(twin: ModuleType, dtype: type[np.unsignedinteger[Any]], size: int) -> None:
    elements = np.random.default_rng(size).integers(0, np.iinfo(dtype).max, size, dtype, endpoint=True)
    planes = twin.split(tensor(elements))
    np.testing.assert_array_equal(planes.numpy(), rans.split(elements))
    biases: list[np.ndarray[Any, Any] | None] = [None]
    if size == 1032:
        biases.append(np.arange(250, 274, dtype=np.uint8))
    for bias in biases:
        expected, out = np.empty_like(elements), tensor(np.zeros_like(elements))
        rans.merge(list(rans.split(elements)), bias, expected)
        twin.merge(planes, None if bias is None else tensor(bias), out)
        np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("size", [1, 1024, 2999])
def test_histogram_and_channel_sums(twin: ModuleType, size: int) -> None:
    plane = content("skewed", size)
    np.testing.assert_array_equal(twin.histogram(tensor(plane)).numpy(), rans.histogram(plane))
    both = np.stack([plane, ~plane])
    np.testing.assert_array_equal(twin.histogram(tensor(both)).numpy(), np.stack([rans.histogram(each) for each in both]))
    if size == 1024:
        np.testing.assert_array_equal(twin.channel_sums(tensor(plane), 16).numpy(), rans.channel_sums(plane, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_of_the_lossless_codec(twin: ModuleType, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec gives the same bytes if all its arithmetic is done here."""
    group = Group(layers=1, planes=2, heads=2, head_dim=8, dtype=dtype)
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, (2, 96, 16)) * 2.0 ** rng.integers(-6, 6, 16)
    bits = values.astype(np.float32).view(np.uint32)
    plain = (bits if dtype == "float32" else (bits >> 16).astype(np.uint16)).tobytes()
    encoded, decoded = of_a_layer(lossless.Lossless(), plain, group, 96)
    assert len(encoded) < len(plain) and decoded == plain

    names = ["split", "histogram", "channel_sums", "encode", "decode", "merge"]
    monkeypatch.setattr(lossless, "rans", standing_in(rans, twin, names))
    assert of_a_layer(lossless.Lossless(), plain, group, 96) == (encoded, decoded)
