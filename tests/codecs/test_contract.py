"""Our codecs keep the contract, and the suite that says so finds codecs that do not."""

import inspect
import random
from collections.abc import Callable

import numpy as np
import pytest

from kvhold.codecs import Codec, Raw, make_codec
from kvhold.core.layout import DTYPE_BYTES, Group, Layout
from kvhold.testing.codec import CASES, Case, CodecContract
from kvhold.testing.values import as_float64, from_float64
from tests.codecs import sample_codecs


def _case(group: Group, num_tokens: int) -> Case:
    return Case(
        Layout(groups=(group,), tokens_per_chunk=128, tail_tokens=group.block_tokens or 1),
        0,
        num_tokens,
    )


class TestRaw(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return Raw()


LARGE = {
    **{
        f"{dtype}-large": _case(Group(layers=2, planes=2, heads=2, head_dim=64, dtype=dtype), 128)
        for dtype in DTYPE_BYTES
    },
    "mla-large": _case(
        Group(layers=1, planes=1, heads=1, head_dim=576, dtype="bfloat16"), 128
    ),  # several segments of a plane
    "tail-large": _case(Group(layers=2, planes=2, heads=2, head_dim=64, dtype="bfloat16"), 1),
    "odd-large": _case(Group(layers=2, planes=2, heads=3, head_dim=129, dtype="float16"), 37),
    "state-large": _case(
        Group(layers=1, planes=1, heads=4, head_dim=64, dtype="float32", attention="state"), 128
    ),
    "opaque-large": _case(
        Group(
            layers=1,
            planes=2,
            heads=2,
            head_dim=64,
            dtype="bfloat16",
            packing="engine-own",
            block_tokens=16,
            block_bytes=8195,
        ),
        128,
    ),
}


class _OurCodec(CodecContract):
    """Layers long enough to be coded at all, besides the suite's own small ones."""

    @pytest.fixture(params=[*CASES, *LARGE])
    def case(self, request: pytest.FixtureRequest) -> Case:
        return {**CASES, **LARGE}[request.param]


class TestLossless(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("lossless")


class TestInt8(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("int8")


class TestFP8(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("fp8")


class TestCacheGen(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("cachegen")


@pytest.mark.slow
class TestLevelsOfCacheGen(CodecContract):
    @pytest.fixture(params=["cachegen-fine", "cachegen-small"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return make_codec(request.param)


@pytest.mark.slow
class TestKIVI(_OurCodec):
    @pytest.fixture(params=["kivi4", "kivi2"])
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return make_codec(request.param)


@pytest.mark.slow
class TestK8V4(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("k8v4")


@pytest.mark.slow
class TestTurboQuant(_OurCodec):
    @pytest.fixture
    def codec(self) -> Codec:
        return make_codec("turboquant4")


class TestALosslessPlugin(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return sample_codecs.Deflate()


class TestALossyPlugin(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return sample_codecs.Int8()


Behaviour = Callable[..., None]
CASE = CASES["bfloat16"]


@pytest.mark.parametrize(
    ("careless", "behaviour"),
    [
        (
            sample_codecs.Forgetful,
            CodecContract.test_any_bytes_are_encoded_and_a_lossless_codec_gives_them_back,
        ),
        (
            sample_codecs.Greedy,
            CodecContract.test_any_bytes_are_encoded_and_a_lossless_codec_gives_them_back,
        ),
        (
            sample_codecs.Numpyish,
            CodecContract.test_any_bytes_are_encoded_and_a_lossless_codec_gives_them_back,
        ),
        (
            sample_codecs.Chained,
            CodecContract.test_a_layer_gives_the_same_bytes_whatever_was_encoded_before_and_beside_it,
        ),
        (sample_codecs.Trusting, CodecContract.test_damaged_bytes_are_a_frame_error_or_some_values),
        (sample_codecs.Bomb, CodecContract.test_damaged_bytes_cost_bounded_memory),
        (sample_codecs.Overpromising, CodecContract.test_values_come_back_within_the_error_bound),
        (
            sample_codecs.Vain,
            CodecContract.test_it_has_a_name_that_fits_a_frame_and_states_its_error,
        ),
    ],
)
def test_the_suite_finds_a_careless_codec(careless: type[Codec], behaviour: Behaviour) -> None:
    given = {"codec": careless(), "case": CASE, "content": "normal", "in_one_piece": True}
    wanted = list(inspect.signature(behaviour).parameters)[1:]
    # an assertion, or an error of the codec itself
    with pytest.raises(Exception):  # noqa: B017, PT011
        behaviour(CodecContract(), **{name: given[name] for name in wanted})


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPE_BYTES if name.startswith(("float", "bfloat"))]
)
def test_the_suite_reads_numbers_as_torch_does(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    data = random.Random(0).randbytes(4096) if kind.itemsize > 1 else bytes(range(256))
    ours = as_float64(data, dtype)
    theirs = torch.frombuffer(bytearray(data), dtype=kind).double().numpy()
    np.testing.assert_array_equal(ours, theirs)
    finite = ours[np.isfinite(ours)]
    np.testing.assert_array_equal(as_float64(from_float64(finite, dtype), dtype), finite)
    values = np.random.default_rng(0).standard_normal(1000)
    largest = torch.finfo(kind).max
    expected = (
        torch.from_numpy(np.clip(values * 100, -largest, largest))
        .to(torch.float32)
        .to(kind)
        .double()
        .numpy()
    )
    rounded = as_float64(from_float64(values * 100, dtype), dtype)
    steps = np.abs(rounded - values * 100), np.abs(expected - values * 100)
    assert (steps[0] <= steps[1] + 1e-12).all()  # ours is never farther; a tie may go either way
