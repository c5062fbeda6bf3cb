"""The order in which codecs are tried, and what is measured of a chunk."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")

from kvhold.codecs import (
    check_loss,
    codec_names,
    frame_chunk,
    frame_within,
    make_codec,
    unframe_payload,
)
from kvhold.codecs.budget import LADDER, measured_error
from kvhold.core.errors import FrameError
from kvhold.core.keys import Namespace, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.testing.values import from_float64

LAYOUT = Layout(
    groups=(Group(layers=2, planes=2, heads=2, head_dim=64, dtype="bfloat16"),), tokens_per_chunk=64
)
EXACT = Namespace("model", LAYOUT)
KEY = make_key(EXACT.allowing_loss(max_error=1).digest, bytes(20), 0, 0)
EXACT_KEY = make_key(EXACT.digest, bytes(20), 0, 0)


def bits(values: list[float]) -> np.ndarray:
    """All of them exact in bfloat16."""
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_the_ladder_goes_down_by_what_codecs_state() -> None:
    bounds = [make_codec(name).error_bound for name in LADDER]
    assert bounds == sorted(bounds, reverse=True)
    assert len(set(LADDER)) == len(LADDER)
    assert set(LADDER) <= set(codec_names())


def test_the_error_is_that_of_the_layer_s_largest() -> None:
    before = bits([1, -4, 0.5])
    assert measured_error(before, bits([1, -4, 0.5]), "bfloat16") == 0
    assert measured_error(before, bits([1, -4, 0.25]), "bfloat16") == 0.0625
    assert measured_error(before, bits([1, np.inf, 0.5]), "bfloat16") == np.inf
    assert measured_error(bits([0, 0, 0]), bits([0, 0, 1]), "bfloat16") == np.inf
    wild = bits([np.inf, 1, 2])
    assert measured_error(wild, bits([np.inf, 1, 1]), "bfloat16") == 0.5
    assert measured_error(wild, bits([1, 1, 2]), "bfloat16") == np.inf


@pytest.mark.parametrize("content", ["normal", "outlier", "infinite"])
@pytest.mark.parametrize("max_error", [0.3, 0.1, 0.03, 0.005, 0])
@pytest.mark.parametrize("codec", LADDER)
def test_whatever_the_budget_it_is_kept(codec: str, max_error: float, content: str) -> None:
    values = np.random.default_rng(1).standard_normal(LAYOUT.chunk_bytes(0, 64) // 2)
    if content == "outlier":
        values[5] = 1000
    data = bytearray(from_float64(values, "bfloat16"))
    if content == "infinite":
        data[10:12] = b"\x80\x7f"
    chunk = memoryview(bytes(data))
    frame = frame_within(
        chunk,
        make_codec(codec),
        StoreOptions(max_error=max_error),
        key=KEY,
        layout=LAYOUT,
        num_tokens=64,
        first_token=0,
    )
    into = bytearray(len(chunk))
    unframe_payload(frame.fields, frame.payload, memoryview(into), layout=LAYOUT)
    pairs = zip(
        np.frombuffer(chunk, np.uint16).reshape(2, -1),
        np.frombuffer(into, np.uint16).reshape(2, -1),
        strict=True,
    )
    assert max(measured_error(one, other, "bfloat16") for one, other in pairs) <= max_error
    free = frame_within(
        chunk,
        make_codec(codec),
        DEFAULT_OPTIONS,
        key=KEY,
        layout=LAYOUT,
        num_tokens=64,
        first_token=0,
    )
    check_loss(free.fields)
    assert free.fields.codec == codec
    assert content == "infinite" or len(free.payload) <= len(frame.payload)


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("store_options", [DEFAULT_OPTIONS, StoreOptions(max_error=1, max_bits=1)])
def test_no_lossy_codec_encodes_a_chunk_whose_name_allows_no_loss(
    codec: str, store_options: StoreOptions
) -> None:
    values = np.random.default_rng(1).standard_normal(LAYOUT.chunk_bytes(0, 64) // 2)
    chunk = memoryview(from_float64(values, "bfloat16"))
    place: dict[str, Any] = {"key": EXACT_KEY, "layout": LAYOUT, "num_tokens": 64, "first_token": 0}
    frame = frame_within(chunk, make_codec(codec), store_options, **place)
    check_loss(frame.fields)
    into = bytearray(len(chunk))
    unframe_payload(frame.fields, frame.payload, memoryview(into), layout=LAYOUT)
    assert into == chunk
    assert frame.fields.codec == (codec if codec in ("raw", "lossless") else "lossless")


@pytest.mark.parametrize("codec", codec_names())
def test_a_lossy_frame_is_valid_only_under_a_name_that_allows_it(codec: str) -> None:
    chunk = memoryview(bytes(LAYOUT.chunk_bytes(0, 64)))
    place: dict[str, Any] = {"layout": LAYOUT, "num_tokens": 64, "first_token": 0}
    check_loss(frame_chunk(chunk, make_codec(codec), key=KEY, **place).fields)
    exact = frame_chunk(chunk, make_codec(codec), key=EXACT_KEY, **place).fields
    if make_codec(codec).lossless:
        check_loss(exact)
    else:
        with pytest.raises(FrameError, match=rf"codec '{codec}' is lossy") as raised:
            check_loss(exact)
        assert raised.value.reason == "lossy"
