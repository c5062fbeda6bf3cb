"""kivi4, kivi2 and k8v4 on a GPU: ends, codes and values are numba's, bit by bit."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton in this environment")
groups = pytest.importorskip("kvhold.kernels.numba_groups", reason="no numba in this environment")
from kvhold.codecs import k8v4, kivi  # noqa: E402  # after the skips
from kvhold.core.layout import Group  # noqa: E402
from kvhold.kernels import numba_quantise  # noqa: E402
from tests.kernels.interpreted import interpreted, of_a_layer, standing_in, tensor  # noqa: E402
from tests.kernels.test_triton_quantise import CONTENTS, DTYPES, bits_of, content  # noqa: E402

pytestmark = pytest.mark.slow  # the interpreter takes a millisecond for each step

KINDS_OF_GROUPS = [*CONTENTS, "constant", "far ends", "near ends"]
FUNCTIONS = ["columns_encode", "columns_decode", "rows_encode", "rows_decode"]


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    with interpreted("groups") as module:
        yield module


def numbers(kind: str, dtype: str, rows: int, width: int) -> np.ndarray[Any, Any]:
    """[rows, width] finite numbers as bits. Tokens of a column, and columns of a token, differ as much."""
    rng = np.random.default_rng(rows * width)
    most = 65504.0 if dtype == "float16" else 3.38e38  # the largest of float16, and near it in the others
    if kind == "constant":
        return bits_of(np.full((rows, width), -0.7), dtype)
    if kind == "far ends":  # no float32 lies between them: their difference is infinite
        return bits_of(rng.choice([-most, most, 0.0, -0.0, most / 3], (rows, width)), dtype)
    if kind == "near ends":  # around the least range that has an inverse, and float16's least numbers; square by square apart or close
        row, column = np.indices((rows, width)) // groups.GROUP
        spread = np.where((row + column) % 2, 0.4, 4.0)
        return bits_of((2.0**-24 if dtype == "float16" else 2.0**-119) * (1 + spread * rng.integers(0, 4, (rows, width)) / 3), dtype)
    return content(kind, dtype, rows * width).reshape(rows, width)


def blank(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """What a kernel fills; a place that it leaves out does not look like any answer."""
    return np.full(shape, 0xA5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS_OF_GROUPS)
@pytest.mark.parametrize(("count", "width", "bits"), [(0, 5, 4), (1, 1, 2), (2, 7, 4), (2, 7, 2), (1, 300, 4)])
def test_groups_of_a_channel(twin: ModuleType, dtype: str, kind: str, count: int, width: int, bits: int) -> None:
    elements = numbers(kind, dtype, count * groups.GROUP, width)
    ends = blank((count, 2, width), elements.dtype)
    codes = blank((len(elements), groups.packed_width(width, bits)), np.uint8)
    found_ends, found_codes, back = tensor(ends), tensor(codes), tensor(blank(elements.shape, elements.dtype))
    groups.columns_encode(elements, dtype, bits=bits, ends=ends, codes=codes)
    twin.columns_encode(tensor(elements), dtype, bits=bits, ends=found_ends, codes=found_codes)
    np.testing.assert_array_equal(found_ends.numpy(), ends)
    np.testing.assert_array_equal(found_codes.numpy(), codes)
    decoded = np.empty_like(elements)
    groups.columns_decode(codes, ends, dtype, bits=bits, elements=decoded)
    twin.columns_decode(found_codes, found_ends, dtype, bits=bits, elements=back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS_OF_GROUPS)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "bits"),
    [(0, 1, 5, 4), (1, 1, 1, 4), (3, 3, 7, 2), (33, 2, 45, 4), (33, 2, 45, 2), (2, 1, 200, 4), (1, 70, 33, 2)],
)
def test_groups_of_a_token(twin: ModuleType, dtype: str, kind: str, tokens: int, heads: int, head_dim: int, bits: int) -> None:
    width = heads * head_dim
    elements = numbers(kind, dtype, tokens, width)
    ends = blank((tokens, 2, groups.num_groups(width, head_dim)), elements.dtype)
    codes = blank((tokens, groups.packed_width(width, bits)), np.uint8)
    found_ends, found_codes, back = tensor(ends), tensor(codes), tensor(blank(elements.shape, elements.dtype))
    groups.rows_encode(elements, dtype, head_dim=head_dim, bits=bits, ends=ends, codes=codes)
    twin.rows_encode(tensor(elements), dtype, head_dim=head_dim, bits=bits, ends=found_ends, codes=found_codes)
    np.testing.assert_array_equal(found_ends.numpy(), ends)
    np.testing.assert_array_equal(found_codes.numpy(), codes)
    decoded = np.empty_like(elements)
    groups.rows_decode(codes, ends, dtype, head_dim=head_dim, bits=bits, elements=decoded)
    twin.rows_decode(found_codes, found_ends, dtype, head_dim=head_dim, bits=bits, elements=back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_ends_that_no_encoder_writes_decode_to_the_same(twin: ModuleType, bits: int, dtype: str) -> None:
    """Any codes, in the places beyond a row too, between any two finite ends; what rounds to more than the largest is capped alike."""
    width, head_dim = 90, 45
    codes = np.random.default_rng(bits).integers(0, 256, (groups.GROUP, groups.packed_width(width, bits)), np.uint8)
    largest = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7F_FFFF}[dtype]
    for in_columns, shape in ((True, (1, 2, width)), (False, (groups.GROUP, 2, groups.num_groups(width, head_dim)))):
        ends = content("any finite", dtype, int(np.prod(shape))).reshape(shape)
        ends[:, :, ::4] = largest
        decoded = np.empty((groups.GROUP, width), ends.dtype)
        back = tensor(blank(decoded.shape, ends.dtype))
        with np.errstate(over="ignore"):
            if in_columns:
                groups.columns_decode(codes, ends, dtype, bits=bits, elements=decoded)
                twin.columns_decode(tensor(codes), tensor(ends), dtype, bits=bits, elements=back)
            else:
                groups.rows_decode(codes, ends, dtype, head_dim=head_dim, bits=bits, elements=decoded)
                twin.rows_decode(tensor(codes), tensor(ends), dtype, head_dim=head_dim, bits=bits, elements=back)
        np.testing.assert_array_equal(back.numpy(), decoded)


def layer(dtype: str, tokens: int) -> tuple[bytes, Group]:
    """K and V whose channels differ in size, in heads of two groups, the second of 8 channels."""
    rng = np.random.default_rng(tokens)
    values = rng.normal(0, 1, (2, tokens, 80)) * 2.0 ** rng.integers(-4, 5, 80)
    return bits_of(values, dtype).tobytes(), Group(layers=1, planes=2, heads=2, head_dim=40, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 37, 64])
@pytest.mark.parametrize("codec", [kivi.KIVI, kivi.KIVI2])
def test_a_layer_of_the_kivi_codecs(twin: ModuleType, codec: Any, tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec gives the same bytes, and the same values back, if all its arithmetic is done here; one token makes no group of keys."""
    plain, group = layer(dtype, tokens)
    expected = of_a_layer(codec(), plain, group, tokens)
    assert len(expected[0]) < len(plain)
    monkeypatch.setattr(kivi, "groups", standing_in(groups, twin, FUNCTIONS))
    assert of_a_layer(codec(), plain, group, tokens) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_layer_of_the_k8v4_codec(twin: ModuleType, tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are int8's, values kivi4's."""
    plain, group = layer(dtype, tokens)
    expected = of_a_layer(k8v4.K8V4(), plain, group, tokens)
    assert len(expected[0]) < len(plain)
    monkeypatch.setattr(kivi, "groups", standing_in(groups, twin, FUNCTIONS))
    with interpreted("quantise") as of_keys:
        monkeypatch.setattr(k8v4, "quantise", standing_in(numba_quantise, of_keys, ["all_finite", "int8_encode", "int8_decode"]))
    assert of_a_layer(k8v4.K8V4(), plain, group, tokens) == expected
