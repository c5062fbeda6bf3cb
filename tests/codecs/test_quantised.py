"""int8 and fp8: their bounds on whatever comes, their special layers, and e4m3 as torch has it."""

from collections.abc import Callable

import numpy as np
import pytest

from kvhold.codecs import Codec, make_codec
from kvhold.core.errors import FrameError
from kvhold.core.layout import Group, Layout
from kvhold.testing.codec import Case, decode, encode_layer
from kvhold.testing.values import as_float64, from_float64

quantise = pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

DTYPES = ("bfloat16", "float16", "float32")
LARGEST = {"bfloat16": (2 - 2**-7) * 2.0**127, "float16": 65504.0, "float32": float(np.finfo(np.float32).max)}
SMALLEST = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
LEAST_NORMAL = {"bfloat16": 2.0**-126, "float16": 2.0**-14, "float32": 2.0**-126}
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SHAPES = [(1, 1, 1, 64), (2, 33, 2, 24), (1, 40, 1, 576), (2, 7, 3, 129), (2, 64, 1, 16)]


def case(dtype: str, shape: tuple[int, int, int, int]) -> Case:
    planes, tokens, heads, head_dim = shape
    group = Group(layers=1, planes=planes, heads=heads, head_dim=head_dim, dtype=dtype)
    return Case(Layout(groups=(group,), tokens_per_chunk=64), 0, tokens)


Maker = Callable[[np.random.Generator, int, str], np.ndarray]


def _bits(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Any finite numbers at all: every exponent is as likely as any other."""
    values = as_float64(rng.bytes(count * (4 if dtype == "float32" else 2)), dtype)
    return np.where(np.isfinite(values), values, 0)


CONTENTS: dict[str, Maker] = {
    "normal": lambda rng, count, _: rng.standard_normal(count),
    "zeros": lambda rng, count, _: np.zeros(count),
    "one": lambda rng, count, _: np.eye(1, count, int(rng.integers(count)))[0] * rng.standard_normal(),
    "constant": lambda rng, count, _: np.full(count, rng.standard_normal() * 10.0 ** rng.integers(-4, 4)),
    "largest": lambda rng, count, dtype: LARGEST[dtype] * rng.choice([-1, 1, 0.5, 0], count),
    "denormal": lambda rng, count, dtype: SMALLEST[dtype] * rng.integers(-3, 4, count),
    "few denormals": lambda rng, count, dtype: SMALLEST[dtype] * rng.integers(-20, 21, count),
    "denormals": lambda rng, count, dtype: SMALLEST[dtype] * rng.integers(-200, 200, count),
    "near normal": lambda rng, count, dtype: LEAST_NORMAL[dtype] * rng.uniform(-1.5, 1.5, count),
    "wide": lambda rng, count, _: rng.standard_normal(count) * 10.0 ** rng.integers(-30, 30, count),
    "outliers": lambda rng, count, _: np.where(rng.random(count) < 0.02, 1000, 1) * rng.standard_normal(count),
    "bits": _bits,
}


def check(codec: Codec, place: Case, plain: bytes) -> None:
    """The bound of the class for the layer, and that of the docstring for each run or element."""
    group = place.layout.groups[0]
    encoded = encode_layer(codec, place, 0, memoryview(plain))
    before, after = as_float64(plain, group.dtype), as_float64(decode(codec, place, 0, encoded), group.dtype)
    assert np.isfinite(after).all()
    error, most = np.abs(after - before), np.abs(before).max()
    assert error.max() <= codec.error_bound * most
    assert not after[before == 0].any()
    if not encoded[0]:
        assert not error.any()
        return
    if codec.name == "int8":
        rows = before.reshape(-1, group.head_dim)
        for begin in range(0, group.head_dim, 128):
            peak = np.abs(rows[:, begin : begin + 128]).max(axis=1, keepdims=True)
            run = error.reshape(rows.shape)[:, begin : begin + 128]
            assert (run <= peak / 127).all()
            assert (run[np.abs(rows[:, begin : begin + 128]) == peak] == 0).all()
    else:
        columns = before.reshape(group.planes, place.num_tokens, -1)
        peak = np.abs(columns).max(axis=1, keepdims=True)
        if encoded[0] == 2:
            heads = peak.reshape(group.planes, 1, group.heads, group.head_dim)
            peak = np.broadcast_to(heads.max(axis=3, keepdims=True), heads.shape).reshape(peak.shape)
        rounding = np.maximum(HALF_ULP[group.dtype] * np.abs(columns) * 17 / 16, SMALLEST[group.dtype] / 2)
        allowed = np.maximum(np.abs(columns) / 16, peak * (2.0**-10 / 448)) * (1 + 1e-6) + rounding
        assert (error.reshape(columns.shape) <= allowed).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", CONTENTS)
def test_the_bound_holds(name: str, dtype: str, content: str) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        check(make_codec(name), case(dtype, shape), from_float64(CONTENTS[content](rng, int(np.prod(shape)), dtype), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_bound_holds_on_ten_thousand_layers(name: str) -> None:
    codec, rng = make_codec(name), np.random.default_rng(2)
    for number in range(10_000):
        dtype = DTYPES[number % 3]
        shape = (int(rng.integers(1, 3)), int(rng.integers(1, 65)), int(rng.integers(1, 4)), int(rng.integers(1, 200)))
        shape = shape if number % 10 == 0 else (shape[0], min(shape[1], 34), 1, min(shape[3], 24))
        count = int(np.prod(shape))
        contents = [CONTENTS[name](rng, count, dtype) for name in rng.choice(list(CONTENTS), 2)]
        mixed = np.where(rng.random(count) < rng.random(), *contents)
        check(codec, case(dtype, shape), from_float64(mixed, dtype))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_layer_with_something_that_is_not_finite_is_kept_bit_by_bit(name: str, dtype: str, odd: float) -> None:
    place = case(dtype, (2, 33, 2, 24))
    values = np.random.default_rng(3).standard_normal(2 * 33 * 2 * 24)
    plain = bytearray(from_float64(values, dtype))
    finite = encode_layer(make_codec(name), place, 0, memoryview(bytes(plain)))
    assert len(finite) < len(plain) and finite[0]
    size = len(plain) // values.size
    wild = np.array([odd], np.float16 if dtype == "float16" else np.float32).tobytes()
    plain[-size:] = wild[-size:] if dtype == "bfloat16" else wild
    assert not np.isfinite(as_float64(plain, dtype)[-1])
    encoded = encode_layer(make_codec(name), place, 0, memoryview(bytes(plain)))
    assert encoded == b"\0" + plain
    assert decode(make_codec(name), place, 0, encoded) == plain


def test_sizes() -> None:
    plain = memoryview(bytes(2 * 64 * 2 * 128 * 2))
    place = case("bfloat16", (2, 64, 2, 128))
    elements = len(plain) // 2
    assert len(encode_layer(make_codec("int8"), place, 0, plain)) == 1 + elements + 4 * elements // 128
    assert len(encode_layer(make_codec("fp8"), place, 0, plain)) == 1 + elements + 4 * 2 * 2 * 128
    tail = case("bfloat16", (2, 1, 2, 128))
    assert len(encode_layer(make_codec("fp8"), tail, 0, plain[: tail.layer_bytes])) == 1 + 512 + 4 * 2 * 2
    narrow = case("bfloat16", (2, 5, 2, 3))  # scales would outweigh what they save
    assert encode_layer(make_codec("int8"), narrow, 0, plain[: narrow.layer_bytes]) == bytes(1 + narrow.layer_bytes)


def test_channels_of_unlike_sizes_do_not_cost_each_other_precision() -> None:
    place, rng = case("bfloat16", (1, 64, 1, 64)), np.random.default_rng(4)
    values = rng.standard_normal((64, 64)) * np.where(np.arange(64) == 5, 1e6, 1)
    plain = from_float64(values.reshape(-1), "bfloat16")
    before = as_float64(plain, "bfloat16").reshape(64, 64)
    found = decode(make_codec("fp8"), place, 0, encode_layer(make_codec("fp8"), place, 0, memoryview(plain)))
    after = as_float64(found, "bfloat16").reshape(64, 64)
    assert (np.abs(after - before) <= 0.07 * np.abs(before) + 1e-4).all()  # a scale for all 64 would make zeros of 63


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_may_not_be_changed_is_not_accepted(name: str) -> None:
    codec = make_codec(name)
    plain = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="bfloat16")
    sliding = Group(layers=1, planes=2, heads=1, head_dim=64, dtype="float16", attention="sliding", window=8)
    state = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="float32", attention="state")
    opaque = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="bfloat16", packing="own", block_tokens=16, block_bytes=2048)
    small = Group(layers=1, planes=1, heads=1, head_dim=64, dtype="float8_e4m3fn")
    layout = Layout(groups=(plain, sliding, state, opaque, small), tokens_per_chunk=16, tail_tokens=16)
    assert [codec.accepts(layout, group) for group in range(5)] == [True, True, False, False, False]


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_no_encoder_writes_is_refused(name: str, scale: float) -> None:
    place = case("bfloat16", (2, 64, 1, 16))
    plain = memoryview(from_float64(np.ones(2 * 64 * 16), "bfloat16"))
    encoded = bytearray(encode_layer(make_codec(name), place, 0, plain))
    encoded[5:9] = np.array([scale], "<f4").tobytes()
    with pytest.raises(FrameError, match="a scale that is negative or not finite"):
        decode(make_codec(name), place, 0, bytes(encoded))


def test_e4m3_is_what_torch_makes_of_it() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(quantise.e4m3_to_float(codes), theirs)
    known = np.unique(theirs[np.isfinite(theirs)])
    middles = ((known[1:].astype(np.float64) + known[:-1]) / 2).astype(np.float32)  # every tie
    near = [np.nextafter(values, direction) for values in (known, middles) for direction in (np.float32(-1e9), np.float32(1e9))]
    any_bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    some = (rng.standard_normal(100_000) * 100).astype(np.float32)
    values = np.concatenate([known, middles, *near, any_bits, some])
    values = values[np.isnan(values) | (np.abs(values) < 464)]  # beyond, torch has changed its mind: NaN once, 448 now
    ours = quantise.float_to_e4m3(values)
    assert np.array_equal(ours, torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    assert quantise.float_to_e4m3(np.array([464, 1e30, np.inf, -np.inf], np.float32)).tolist() == [126, 126, 126, 254]


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_layers_are_what_torch_would_make_of_them(dtype: str) -> None:
    """Where scales are powers of two, scaling is exact, and so is the comparison."""
    torch = pytest.importorskip("torch")
    place = case(dtype, (2, 64, 2, 16))
    values = np.clip(np.random.default_rng(6).standard_normal((2, 64, 32)) * 100, -448, 448)
    values[:, 0] = 448  # so that each scale is one
    plain = from_float64(values.reshape(-1), dtype)
    found = decode(make_codec("fp8"), place, 0, encode_layer(make_codec("fp8"), place, 0, memoryview(plain)))
    theirs = torch.frombuffer(bytearray(plain), dtype=getattr(torch, dtype)).to(torch.float8_e4m3fn).to(torch.float32).double().numpy()
    np.testing.assert_allclose(as_float64(found, dtype), theirs, rtol=3e-7 if dtype == "float32" else 0)
