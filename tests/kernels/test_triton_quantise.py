"""int8 and fp8 on a GPU: codes, scales and values are numba's, bit by bit."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton in this environment")
quantise = pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")
from tests.kernels.interpreted import interpreted, tensor  # noqa: E402  # after the skips

pytestmark = pytest.mark.slow  # the interpreter takes a millisecond for each step

DTYPES = ["bfloat16", "float16", "float32"]
CONTENTS = ["normal", "any finite", "tiny", "zeros", "ties"]


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    with interpreted("quantise") as module:
        yield module


def bits_of(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Cut to a bfloat16, rounded to the others."""
    values = values.astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint32) if dtype == "float32" else values.astype(np.float16).view(np.uint16)


def content(kind: str, dtype: str, size: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(size)
    if kind == "normal":
        return bits_of(rng.normal(0, 1, size) * 2.0 ** rng.integers(-5, 5, size), dtype)
    if kind == "any finite":  # denormals, the largest, both signs of zero
        bits = rng.integers(0, 1 << 32, size, np.uint32)
        bits = bits if dtype == "float32" else (bits >> 16).astype(np.uint16)
        mask = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}[dtype]
        return np.where(bits & mask == mask, bits & ~np.asarray(mask, bits.dtype), bits)
    if kind == "tiny":  # denormals of float32 and what lies just above; of float16, its own
        return bits_of(rng.normal(0, 1, size) * (2.0**-24 if dtype == "float16" else 2.0**-126), dtype)
    if kind == "zeros":
        return bits_of(rng.choice([0.0, -0.0], size), dtype)
    # Halves: beside the largest, 127 or 448, they fall between two codes.
    values = rng.integers(-256, 257, size) / 2
    values[:: size // 3 + 1] = rng.choice([127.0, 448.0])
    return bits_of(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize(("rows", "head_dim", "run"), [(3, 7, 128), (9, 128, 128), (2, 200, 128), (5, 1, 1)])
def test_int8(twin: ModuleType, dtype: str, kind: str, rows: int, head_dim: int, run: int) -> None:
    elements = content(kind, dtype, rows * head_dim)
    codes, largest = np.empty(elements.size, np.int8), np.empty(rows * -(-head_dim // run), np.float32)
    quantise.int8_encode(elements, dtype, head_dim, run, codes, largest)
    found, peaks = tensor(np.zeros_like(codes)), tensor(np.zeros_like(largest))
    twin.int8_encode(tensor(elements), dtype, head_dim, run, found, peaks)
    np.testing.assert_array_equal(found.numpy(), codes)
    np.testing.assert_array_equal(peaks.numpy().view(np.uint32), largest.view(np.uint32))
    decoded, back = np.empty_like(elements), tensor(np.zeros_like(elements))
    quantise.int8_decode(codes, largest, dtype, head_dim, run, decoded)
    twin.int8_decode(found, peaks, dtype, head_dim, run, back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize(("planes", "tokens", "width"), [(1, 1, 3), (2, 9, 130)])
def test_fp8(twin: ModuleType, dtype: str, kind: str, planes: int, tokens: int, width: int) -> None:
    elements = content(kind, dtype, planes * tokens * width)
    largest = quantise.column_largest(elements, dtype, planes, width)
    peaks = twin.column_largest(tensor(elements), dtype, planes, width)
    np.testing.assert_array_equal(peaks.numpy().view(np.uint32), largest.view(np.uint32))
    largest[:, ::3] = np.minimum(largest[:, ::3], np.float32(1e38)) * np.float32(1.5)  # a head's largest may be above a channel's
    largest = np.maximum(largest, peaks.numpy())
    codes, found = np.empty(elements.size, np.uint8), tensor(np.zeros(elements.size, np.uint8))
    quantise.fp8_encode(elements, dtype, largest, codes)
    twin.fp8_encode(tensor(elements), dtype, tensor(largest), found)
    np.testing.assert_array_equal(found.numpy(), codes)
    decoded, back = np.empty_like(elements), tensor(np.zeros_like(elements))
    quantise.fp8_decode(codes, largest, dtype, decoded)
    twin.fp8_decode(found, tensor(largest), dtype, back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_that_no_encoder_writes_decode_to_the_same(twin: ModuleType, dtype: str) -> None:
    """Every code beside scales from zero to the largest; what is out of the dtype's range is capped alike."""
    codes = np.tile(np.arange(256, dtype=np.uint8), 3)
    largest = np.repeat(np.array([[0], [1.7], [np.finfo(np.float32).max]], np.float32), 256, axis=1)
    kind = np.uint32 if dtype == "float32" else np.uint16
    decoded, back = np.empty(codes.size, kind), tensor(np.zeros(codes.size, kind))
    with np.errstate(over="ignore"):
        quantise.fp8_decode(codes, largest, dtype, decoded)
        twin.fp8_decode(tensor(codes), tensor(largest), dtype, back)
        np.testing.assert_array_equal(back.numpy(), decoded)
        scales = largest[:, :2].reshape(-1).copy()
        quantise.int8_decode(codes.view(np.int8), scales, dtype, 256, 128, decoded)
        twin.int8_decode(tensor(codes.view(np.int8)), tensor(scales), dtype, 256, 128, back)
        np.testing.assert_array_equal(back.numpy(), decoded)


def test_every_bfloat16_and_every_code_through_e4m3(twin: ModuleType) -> None:
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # the interpreter's numpy says of a NaN that it is one
        found = twin.float_to_e4m3(tensor(values)).numpy()
    np.testing.assert_array_equal(found, quantise.float_to_e4m3(values))
    codes = np.arange(256, dtype=np.uint8)
    expected = quantise.e4m3_to_float(codes)
    np.testing.assert_array_equal(twin.e4m3_to_float(tensor(codes)).numpy().view(np.uint32), expected.view(np.uint32))
    # Between two bfloat16s lie the ties of normal e4m3s.
    ties = (expected[:-1][np.isfinite(expected[:-1])] + expected[1:][np.isfinite(expected[:-1])]) / 2
    ties = ties[np.isfinite(ties)]
    around = np.concatenate([np.nextafter(ties, np.float32(np.inf)), ties, np.nextafter(ties, np.float32(-np.inf))])
    np.testing.assert_array_equal(twin.float_to_e4m3(tensor(around)).numpy(), quantise.float_to_e4m3(around))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, np.inf, -np.inf, np.nan])
def test_all_finite(twin: ModuleType, dtype: str, value: float) -> None:
    elements = content("normal", dtype, 40)
    elements[17] = bits_of(np.array([value]), dtype)[0]
    assert twin.all_finite(tensor(elements), dtype) is quantise.all_finite(elements, dtype)
