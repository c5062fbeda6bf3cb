"""Blocks that are arranged as an engine does, in frames of codecs that want the canonical order."""

import numpy as np
import pytest

from kvhold.codecs import Raw, find_codec, frame_chunk, make_codec, unframe_chunk
from kvhold.codecs.packings import canonical_twin, from_canonical, is_known, to_canonical
from kvhold.core.errors import LayoutError
from kvhold.core.keys import make_key
from kvhold.core.layout import CANONICAL, DTYPE_BYTES, Group, Layout
from kvhold.testing.values import as_float64, from_float64

KEY = make_key(bytes(16), bytes(20), 0, 0)


def group(
    dtype: str = "bfloat16",
    packing: str = "vllm-0.32-cpu_attn-vec",
    heads: int = 2,
    block_bytes: int = 0,
) -> Group:
    size = 2 * 32 * heads * 24 * DTYPE_BYTES[dtype]
    return Group(
        layers=3,
        planes=2,
        heads=heads,
        head_dim=24,
        dtype=dtype,
        packing=packing,
        block_tokens=32,
        block_bytes=block_bytes or size,
    )


def layout(of: Group) -> Layout:
    return Layout(groups=(of,), tokens_per_chunk=128, tail_tokens=32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_k_is_turned_and_v_is_not(dtype: str) -> None:
    of, kind = group(dtype), f"<u{DTYPE_BYTES[dtype]}"
    packed = np.arange(4 * of.block_bytes // DTYPE_BYTES[dtype]).astype(kind)
    plain = np.frombuffer(to_canonical(packed.view(np.uint8).data, of), kind).reshape(2, 128, 2, 24)
    blocks = packed.reshape(4, 2, 2, 32 * 24)
    for token, head, channel in ((0, 0, 0), (33, 1, 7), (127, 1, 23)):
        block, at = divmod(token, 32)
        assert plain[0, token, head, channel] == blocks[block, head, 0].reshape(24, 32)[channel, at]
        assert plain[1, token, head, channel] == blocks[block, head, 1].reshape(32, 24)[at, channel]
    back = np.empty_like(packed)
    from_canonical(plain.reshape(-1).view(np.uint8).data, back.view(np.uint8).data, of)
    assert np.array_equal(back, packed)


@pytest.mark.parametrize(
    "of",
    [
        group(packing="vllm-0.99-cpu_attn-vec"),
        group(packing="vllm-0.32-cpu_attn-amx"),
        group(block_bytes=4096),
        group(packing="x"),
    ],
    ids=str,
)
def test_what_is_not_known_is_left_alone(of: Group) -> None:
    assert not is_known(of)
    assert canonical_twin(layout(of), 0) is None
    pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")
    chunk = memoryview(bytes(layout(of).chunk_bytes(0, 128)))
    with pytest.raises(LayoutError, match="does not accept"):
        frame_chunk(
            chunk, make_codec("int8"), key=KEY, layout=layout(of), num_tokens=128, first_token=0
        )


@pytest.mark.parametrize("num_tokens", [128, 100, 32, 1])
@pytest.mark.parametrize("codec", ["int8", "fp8", "lossless", "raw"])
def test_a_chunk_comes_back_in_its_own_order(codec: str, num_tokens: int) -> None:
    pytest.importorskip("kvhold.kernels.numba_quantise", reason="no numba in this environment")
    of = layout(group())
    twin = canonical_twin(of, 0)
    assert twin is not None
    assert twin.groups[0].packing == CANONICAL
    values = np.random.default_rng(1).standard_normal(of.chunk_bytes(0, num_tokens) // 2)
    chunk = memoryview(from_float64(values, "bfloat16"))
    frame = frame_chunk(
        chunk, find_codec(codec) or Raw(), key=KEY, layout=of, num_tokens=num_tokens, first_token=0
    )
    into = bytearray(len(chunk))
    whole = memoryview(b"".join(frame.parts))
    header = unframe_chunk(whole, memoryview(into), key=KEY, layout=of, num_tokens=num_tokens)
    assert (header.codec, header.packing) == (codec, "vllm-0.32-cpu_attn-vec")
    error = np.abs(as_float64(bytes(into), "bfloat16") - as_float64(bytes(chunk), "bfloat16"))
    assert error.max() <= (0 if codec in ("raw", "lossless") else 0.04 * np.abs(values).max())
    # runs of a token's channels have a scale each: elsewhere the bytes would be others
    if codec == "int8":
        size = of.groups[0].layer_bytes(num_tokens)
        canonical = b"".join(
            bytes(to_canonical(chunk[at : at + size], of.groups[0]))
            for at in range(0, len(chunk), size)
        )
        same = frame_chunk(
            memoryview(canonical),
            make_codec("int8"),
            key=KEY,
            layout=twin,
            num_tokens=-(-num_tokens // 32) * 32,
            first_token=0,
        )
        assert same.payload == frame.payload
