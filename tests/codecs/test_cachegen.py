"""cachegen: what its size, its steps and its odds promise.

Bounds are in test_quantised.py, attacks in test_codec_fuzz.py.
"""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.codecs import header_size, make_codec
from kvhold.core.errors import FrameError
from kvhold.core.layout import Group, Layout
from kvhold.testing.codec import Case, decode, encode_layer
from kvhold.testing.values import as_float64, from_float64
from kvhold_lab.bench.codecs import synthetic
from tests.codecs.independent import decode_cachegen
from tests.codecs.make_vectors import vectors

bins = pytest.importorskip("kvhold.kernels.numba_bins", reason="no numba in this environment")

CODEC = make_codec("cachegen")
HEAD = struct.Struct("<fBBB")  # of a plane: step, sharing, whether shifts follow, kinds


def case(
    tokens: int, *, planes: int = 1, heads: int = 2, head_dim: int = 64, layers: int = 8
) -> Case:
    group = Group(layers=layers, planes=planes, heads=heads, head_dim=head_dim, dtype="bfloat16")
    return Case(Layout(groups=(group,), tokens_per_chunk=max(tokens, 1)), 0, tokens)


def coded(
    values: np.ndarray, place: Case, *, layer: int = 7
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """The layer's bytes, what went in and what came out, in the shape of `values`."""
    plain = from_float64(values.reshape(-1), "bfloat16")
    encoded = encode_layer(CODEC, place, layer, memoryview(plain))
    before, after = (
        as_float64(data, "bfloat16").reshape(values.shape)
        for data in (plain, decode(CODEC, place, layer, encoded))
    )
    return encoded, before, after


@pytest.mark.parametrize(
    ("name", "tokens", "least"), [("", 128, 7), ("", 256, 7), ("-fine", 256, 5), ("-small", 256, 9)]
)
def test_how_much_smaller(name: str, tokens: int, least: float) -> None:
    codec = make_codec(f"cachegen{name}")
    bits = synthetic().bits[:, :, :tokens]
    layers, planes, _, heads, head_dim = bits.shape
    place = case(tokens, planes=planes, heads=heads, head_dim=head_dim, layers=layers)
    some = (0, 5, 10, 15)  # one of the early quarter
    taken = sum(
        len(encode_layer(codec, place, layer, memoryview(bits[layer].tobytes()))) for layer in some
    )
    assert least * taken < len(some) * place.layer_bytes


def test_a_tail_of_one_token_is_smaller_too() -> None:
    place = case(1, planes=2, heads=8, head_dim=128)
    encoded, *_ = coded(np.random.default_rng(1).standard_normal((2, 1, 1024)), place)
    assert encoded[0] == 1 and 3 * len(encoded) < place.layer_bytes
    assert HEAD.unpack_from(encoded, 1)[1] == 5  # 32 channels share


@pytest.mark.parametrize(
    ("tokens", "share"), [(256, 0), (32, 0), (31, 1), (16, 1), (15, 2), (2, 4)]
)
def test_in_a_tail_channels_share_so_that_32_elements_tell(tokens: int, share: int) -> None:
    encoded, *_ = coded(
        np.random.default_rng(2).standard_normal((tokens, 1024)), case(tokens, heads=16)
    )
    assert HEAD.unpack_from(encoded, 1)[1] == share


def test_layers_of_zeros_and_of_one_number_cost_next_to_nothing() -> None:
    place = case(128)
    for value in (0.0, 3.25):
        encoded, before, after = coded(np.full((128, 128), value), place)
        assert len(encoded) < 600
        assert (np.abs(after - before) <= value / 50).all()


def test_early_layers_are_finer_than_late_ones_and_keys_finer_than_values() -> None:
    place = case(128, planes=2)
    plane = np.random.default_rng(3).standard_normal((128, 128))
    plane[0, 0] = 8  # the largest does not limit the steps then
    values = np.stack([plane, plane])

    def errors(layer: int) -> np.ndarray:
        _, before, after = coded(values, place, layer=layer)
        means: np.ndarray = np.square(after - before).mean(axis=(1, 2))
        return means

    early, late = errors(1), errors(2)
    assert (early < 0.9 * late).all() and early[0] < 0.8 * early[1] and late[0] < 0.9 * late[1]


def test_channels_of_unlike_sizes_and_means_do_not_cost_each_other_precision() -> None:
    rng = np.random.default_rng(4)
    sizes, means = np.ones(128), np.zeros(128)
    sizes[5], means[5] = 16, 40
    sizes[9], means[77] = 1 / 16, -3
    _, before, after = coded(rng.standard_normal((256, 128)) * sizes + means, case(256))
    half = 1.05 / 2 * sizes**0.25  # of a channel 16 times as wide: twice as wide
    errors = np.abs(after - before).max(axis=0)
    assert (errors <= 1.1 * half + np.abs(before).max(axis=0) / 256).all()
    assert (errors[sizes >= 1] >= 0.8 * half[sizes >= 1]).all()


def test_the_levels_differ_in_their_steps_and_not_in_their_bytes() -> None:
    values = np.random.default_rng(13).standard_normal((128, 128))
    values[0, 0] = 8
    place, sizes, errors = case(128), [], []
    plain = from_float64(values.reshape(-1), "bfloat16")
    for name in ("cachegen-fine", "cachegen", "cachegen-small"):
        encoded = encode_layer(make_codec(name), place, 7, memoryview(plain))
        found = decode(make_codec(name), place, 7, encoded)
        assert found == decode(CODEC, place, 7, encoded)
        sizes.append(len(encoded))
        errors.append(
            np.square(as_float64(found, "bfloat16") - as_float64(plain, "bfloat16")).mean()
        )
    assert sizes[0] > 1.3 * sizes[1] and sizes[1] > 1.2 * sizes[2]
    assert errors[0] < 0.3 * errors[1] and errors[1] < 0.5 * errors[2]


def test_a_mean_costs_little() -> None:
    noise = np.random.default_rng(5).standard_normal((256, 128))
    without, *_ = coded(noise, case(256))
    signs = np.where(np.arange(128) % 2, 1, -1)
    encoded, *_ = coded(noise + 5 * signs, case(256))
    assert len(encoded) < 1.05 * len(without) + 128


def test_a_number_far_off_costs_bits_and_not_precision() -> None:
    values = np.random.default_rng(6).standard_normal((256, 128))
    ordinary, *_ = coded(values, case(256))
    values[17, 3], values[200, 90] = 60, -45
    encoded, before, after = coded(values, case(256))
    assert len(encoded) < len(ordinary) + 100
    assert np.abs(after - before).max() < 1


def test_tokens_of_unlike_sizes_are_told_apart_where_that_pays() -> None:
    rng = np.random.default_rng(7)
    values = rng.standard_normal((256, 512))
    place = case(256, heads=4, head_dim=128)
    alike, *_ = coded(values, place)
    assert not HEAD.unpack_from(alike, 1)[2]
    scales = np.exp(0.6 * rng.standard_normal((256, 1)))
    unlike, before, after = coded(values * scales, place)
    assert HEAD.unpack_from(unlike, 1)[2]
    assert len(unlike) < 1.02 * len(alike) + 256 * 4 // 2
    assert np.abs(after - before).max() < 0.7 * np.sqrt(np.square(values * scales).mean())


def test_layers_too_small_for_float32s_inverses_are_kept_bit_by_bit() -> None:
    place = case(64)
    for largest, form in ((2.0**-98, 1), (2.0**-103, 0)):
        values = np.random.default_rng(8).standard_normal((64, 128))
        encoded, before, after = coded(values / np.abs(values).max() * largest, place)
        assert encoded[0] == form
        assert form or (before == after).all()


def frequencies(counts: list[int]) -> list[int]:
    lengths, found = bins.frequencies(np.array([counts]), 1024)
    assert not found[0, lengths[0] :].any()
    return [int(often) for often in found[0, : lengths[0]]]


@given(st.lists(st.integers(0, 10**6), min_size=65, max_size=65), st.integers(0, 64), st.booleans())
def test_frequencies_fit_whatever_occurs(
    counts: list[int], first_zero: int, is_peaked: bool
) -> None:
    counts[first_zero:] = [0] * (65 - first_zero)
    if is_peaked:
        counts[0] *= 10**4
    table = frequencies(counts)
    if counts[0] == sum(counts):
        assert table == []
        return
    escape = 1024 - table[0] - 2 * sum(table[1:])
    assert 1 <= len(table) <= 64 and min(table) >= 0 and escape >= 0
    assert all(
        probabilities or not often for probabilities, often in zip(table, counts, strict=False)
    )
    assert escape or not any(counts[len(table) :])


def test_frequencies_are_near_what_occurs() -> None:
    counts = [500, 600, 300, 80, 15, 2, 1, *[0] * 57, 1]
    table = frequencies(counts)
    total = sum(counts)
    assert len(table) == 6  # of what is beyond, two occur
    for count, probabilities, weight in zip(counts, table, [1, *[2] * 5], strict=False):
        assert abs(probabilities * weight - count * 1024 / total) <= 3


def test_what_no_encoder_writes_is_refused() -> None:
    place = case(64)
    encoded, *_ = coded(np.random.default_rng(9).standard_normal((64, 128)) + 2, place)
    base, share, shifted, kinds = HEAD.unpack_from(encoded, 1)
    assert (share, shifted) == (0, 0)
    channels = encoded[8 : 8 + 128]
    offsets = sum(channel >= 128 for channel in channels)
    tables = 8 + 128 + offsets

    def refused(at: int, data: bytes, match: str) -> None:
        with pytest.raises(FrameError, match=match) as caught:
            decode(CODEC, place, 0, encoded[:at] + data + encoded[at + len(data) :])
        assert caught.value.reason == "length"

    refused(0, b"\2", "the form 2")
    for wrong in (np.inf, np.nan, -1.0):
        refused(1, struct.pack("<f", wrong), "a plane that begins with")
    refused(1, HEAD.pack(base, 16, 0, kinds), "a plane that begins with")
    refused(1, HEAD.pack(base, 0, 2, kinds), "a plane that begins with")
    refused(1, HEAD.pack(base, 0, 0, 17), "a plane that begins with")
    refused(1, HEAD.pack(base, 0, 0, kinds - 1), "a class without frequencies")
    refused(8, bytes([channels[0] & 0xF0 | kinds]), "a class without frequencies")
    refused(tables + kinds, b"\xff\xff", "frequencies")
    refused(tables, b"\x41", "frequencies")
    at = tables + kinds + 2 * sum(encoded[tables : tables + kinds])
    (exceptions,) = struct.unpack_from("<I", encoded, at)
    refused(at, struct.pack("<I", 2**32 - 1), "bytes missing")
    refused(at + 4 + exceptions, struct.pack("<I", 63), "a segment shorter than its states")
    refused(at + 4 + exceptions, struct.pack("<I", 2**32 - 1), "bytes missing")
    (words,) = struct.unpack_from("<I", encoded, at + 4 + exceptions)
    refused(
        at + 4 + exceptions,
        struct.pack("<I", words - 1),
        "a segment that does not end|bytes too many",
    )
    start = at + 8 + exceptions
    refused(start, bytes([encoded[start] ^ 1]), "a segment that does not end|exceptions")


def test_exceptions_that_are_not_marked_are_refused() -> None:
    place = case(64)
    encoded, *_ = coded(np.random.default_rng(10).standard_normal((64, 128)), place)
    at = 8 + 128 + sum(channel >= 128 for channel in encoded[8 : 8 + 128])
    at += encoded[7] + 2 * sum(encoded[at : at + encoded[7]])
    (exceptions,) = struct.unpack_from("<I", encoded, at)
    more = encoded[:at] + struct.pack("<I", exceptions + 1) + b"\x55" + encoded[at + 4 :]
    with pytest.raises(FrameError, match="more or fewer exceptions"):
        decode(CODEC, place, 0, more)


def test_the_committed_frame_has_all_there_is() -> None:
    (vector,) = (vector for vector in vectors() if vector.name == "cachegen")
    assert vector.layout is not None
    layer = vector.frame[header_size(rank=4, num_layers=3) :]
    offsets = sum(channel >= 128 for channel in layer[8:88])
    at = 88 + offsets
    assert layer[0] == 1 and offsets
    at += layer[7] + 2 * sum(layer[at : at + layer[7]])
    exceptions, words = (
        struct.unpack_from("<I", layer, at)[0],
        struct.unpack_from("<I", layer, at + 4 + layer[at])[0],
    )
    assert exceptions and HEAD.unpack_from(layer, at + 8 + exceptions + 2 * words)[2], (
        "exceptions in the keys, shifts in the values"
    )


def test_a_layer_of_several_segments_is_read_by_the_page_alone() -> None:
    place = case(130, heads=8, head_dim=128)
    scales = np.exp(0.5 * np.random.default_rng(11).standard_normal((130, 1)))
    encoded, *_ = coded(np.random.default_rng(12).standard_normal((130, 1024)) * scales, place)
    assert decode_cachegen(encoded, "bfloat16", [1, 130, 8, 128]) == decode(
        CODEC, place, 0, encoded
    )
