"""turboquant4 on a GPU: codes, scales and values are numba's, bit by bit."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="no Triton in this environment")
turns = pytest.importorskip("kvhold.kernels.numba_turns", reason="no numba in this environment")
from kvhold.codecs import turboquant  # noqa: E402  # after the skips
from kvhold.core.layout import Group  # noqa: E402
from tests.kernels.interpreted import interpreted, of_a_layer, standing_in, tensor  # noqa: E402
from tests.kernels.test_triton_quantise import CONTENTS, DTYPES, bits_of, content  # noqa: E402

pytestmark = pytest.mark.slow  # the interpreter takes a millisecond for each step

SHAPES = [(0, 5), (5, 1), (3, 2), (3, 45), (9, 128), (2, 200), (1, 257)]
# A limit above which some vectors are kept as they are; and one for nearly all, one for none.
LIMITS = [(*shape, 0.145) for shape in SHAPES] + [(9, 128, 0.0), (9, 128, 1e38)]


@pytest.fixture(scope="module")
def twin() -> Iterator[ModuleType]:
    with interpreted("turns") as module:
        yield module


def numbers(kind: str, dtype: str, heads: int, head_dim: int) -> np.ndarray[Any, Any]:
    """[heads * head_dim] finite numbers as bits."""
    size = heads * head_dim
    if kind == "one of a vector":  # which turning spreads over all places, alike but for the sign
        return bits_of(np.where(np.arange(size) % head_dim == head_dim // 3, -3.0, 0.0), dtype)
    if kind == "alike":  # all of one size, as no bell has them: an error that is KEPT for a limit below it
        return bits_of(np.random.default_rng(size).choice([-1.0, 1.0], size), dtype)
    if kind == "largest":
        return bits_of(np.full(size, 65504.0 if dtype == "float16" else 3.38e38), dtype)
    return content(kind, dtype, size)


def blank(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """What a kernel fills; a place that it leaves out does not look like any answer."""
    return np.full(shape, 0xA5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*CONTENTS, "one of a vector", "alike", "largest"])
@pytest.mark.parametrize(("heads", "head_dim", "limit"), LIMITS)
def test_codes_scales_and_values(twin: ModuleType, dtype: str, kind: str, heads: int, head_dim: int, limit: float) -> None:
    elements = numbers(kind, dtype, heads, head_dim)
    codes = blank((heads, turns.head_bytes(head_dim)), np.uint8)
    scales = blank((heads, len(turns.run_sizes(head_dim))), np.float32)
    found_codes, found_scales, back = tensor(codes), tensor(scales), tensor(blank(elements.shape, elements.dtype))
    turns.encode(elements, dtype, head_dim=head_dim, limit=limit, codes=codes, scales=scales)
    with np.errstate(over="ignore"):  # the interpreter's numpy says so of an error beyond any limit
        twin.encode(tensor(elements), dtype, head_dim=head_dim, limit=limit, codes=found_codes, scales=found_scales)
    np.testing.assert_array_equal(found_scales.numpy().view(np.uint32), scales.view(np.uint32))
    np.testing.assert_array_equal(found_codes.numpy(), codes)
    decoded = np.empty_like(elements)
    turns.decode(codes, scales, dtype, head_dim=head_dim, elements=decoded)
    with np.errstate(over="ignore"):
        twin.decode(found_codes, found_scales, dtype, head_dim=head_dim, elements=back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_that_no_encoder_writes_decode_to_the_same(twin: ModuleType, dtype: str) -> None:
    """Any codes beside any finite scale; negative ones, -0 and KEPT give zeros, and what is too large becomes the largest."""
    head_dim = 200
    scales = np.array([[0, -0.0], [turns.KEPT, 1e-45], [3e38, -3e38], [0.3, 1e-39], [1e3, 2.0**-126]], np.float32)
    codes = np.random.default_rng(0).integers(0, 256, (len(scales), turns.head_bytes(head_dim)), np.uint8)
    decoded = np.empty(len(scales) * head_dim, np.uint32 if dtype == "float32" else np.uint16)
    back = tensor(blank(decoded.shape, decoded.dtype))
    turns.decode(codes, scales, dtype, head_dim=head_dim, elements=decoded)
    with np.errstate(over="ignore"):
        twin.decode(tensor(codes), tensor(scales), dtype, head_dim=head_dim, elements=back)
    np.testing.assert_array_equal(back.numpy(), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 128), (7, 128), (5, 72)])
def test_a_layer_of_the_turboquant_codec(twin: ModuleType, dtype: str, tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec gives the same bytes, and the same values back, if all its arithmetic is done here; of like numbers, some are KEPT."""
    rng = np.random.default_rng(tokens)
    values = rng.normal(0, 1, (2, tokens, 2, head_dim))
    values[0] = rng.choice([-4.0, 4.0], values[0].shape)
    plain = bits_of(values, dtype).tobytes()
    group = Group(layers=1, planes=2, heads=2, head_dim=head_dim, dtype=dtype)
    expected = of_a_layer(turboquant.TurboQuant4(), plain, group, tokens)
    assert len(expected[0]) < len(plain)
    scales = np.frombuffer(expected[0][1 : 1 + 16 * tokens], "<f4")
    assert (scales == turns.KEPT).any() and (scales > 0).any()
    monkeypatch.setattr(turboquant, "turns", standing_in(turns, twin, ["encode", "decode"]))
    assert of_a_layer(turboquant.TurboQuant4(), plain, group, tokens) == expected
