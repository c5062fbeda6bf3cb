"""Frames through every tier: layer by layer for any layout, with explicit metadata, and with exact
sizes (field reports R1 and R3).
"""

import os
from collections.abc import Iterator

import pytest

from kvhold.codecs import (
    FrameHeader,
    Raw,
    encode_header,
    frame_chunk,
    header_size,
    read_header,
    unframe_layer,
    verify,
)
from kvhold.codecs.frame import checksum
from kvhold.core.keys import HASH_BYTES, Namespace, make_key
from kvhold.core.layout import Group, Layout
from kvhold.tiers.base import Tier
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.places import PLACES, BenchPlace, open_place
from kvhold_lab.servers.base import NotInstalled
from tests.tiers.conftest import opened

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

LAYOUTS = {
    "gqa": Layout(
        groups=(Group(layers=5, planes=2, heads=2, head_dim=32, dtype="bfloat16"),),
        tokens_per_chunk=64,
    ),
    "mla": Layout(
        groups=(Group(layers=3, planes=1, heads=1, head_dim=576, dtype="bfloat16"),),
        tokens_per_chunk=64,
    ),
    "hybrid": Layout(
        groups=(
            Group(layers=2, planes=2, heads=2, head_dim=64, dtype="float16"),
            Group(
                layers=4,
                planes=2,
                heads=1,
                head_dim=48,
                dtype="float8_e4m3fn",
                attention="sliding",
                window=100,
            ),
            Group(layers=1, planes=1, heads=1, head_dim=500, dtype="float32", attention="state"),
        ),
        tokens_per_chunk=64,
    ),
}


@pytest.fixture(scope="module", params=list(PLACES))
def place(request: pytest.FixtureRequest) -> Iterator[BenchPlace]:
    try:
        with open_place(request.param) as place:
            yield place
    except NotInstalled as error:
        pytest.skip(str(error))


def a_key(group: int = 0) -> bytes:
    return make_key(
        Namespace(model="layerwise", layout=LAYOUTS["gqa"]).digest, os.urandom(HASH_BYTES), group, 0
    )


async def read_range(tier: Tier, key: bytes, start: int, nbytes: int) -> memoryview:
    into = memoryview(bytearray(nbytes))
    assert await tier.get([key], [[into]], starts=[start]) == [nbytes]
    return into


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [64, 17, 1])
async def test_any_layer_is_read_alone_and_checked(
    place: BenchPlace, name: str, num_tokens: int
) -> None:
    """R3: whole chunks and tails, each group with its own dtype and shape; the size that a probe
    tells is the frame's, to the byte.
    """
    layout = LAYOUTS[name]
    tier = opened(make_tier(place.url())[0])
    for group, geometry in enumerate(layout.groups):
        key, chunk = a_key(group), memoryview(os.urandom(layout.chunk_bytes(group, num_tokens)))
        frame = frame_chunk(
            chunk, Raw(), key=key, layout=layout, num_tokens=num_tokens, first_token=128
        )
        assert await tier.put([(key, frame.parts)]) == [None]
        assert await tier.probe([key]) == [frame.nbytes]
        assert frame.nbytes == frame.fields.header_bytes + geometry.layers * geometry.layer_bytes(
            num_tokens
        )
        header = read_header(
            await read_range(tier, key, 0, frame.fields.header_bytes), frame_bytes=frame.nbytes
        )
        size = geometry.layer_bytes(num_tokens)
        for layer in reversed(range(geometry.layers)):
            encoded = await read_range(tier, key, *header.layer_range(layer))
            plain = memoryview(bytearray(size))
            unframe_layer(header, layer, encoded, plain, layout=layout)
            assert plain == chunk[layer * size : (layer + 1) * size]
        assert await tier.delete([key]) == [True]
    await tier.close()


@pytest.mark.parametrize("shape", [(40,), (4, 8), (3, 2, 8), (2, 1, 4, 8), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32"])
async def test_shapes_of_any_rank_and_dtype_are_stated_and_come_back(
    place: BenchPlace, shape: tuple[int, ...], dtype: str
) -> None:
    """R1, R3: no axis, dtype or length is guessed, and writing a header twice gives the
    same bytes.
    """
    lengths = (100, 0, 64)
    payload = os.urandom(sum(lengths))
    layers = [payload[:100], b"", payload[100:]]
    header = FrameHeader(
        key=a_key(),
        layout=os.urandom(16),
        num_tokens=5,
        first_token=7,
        codec="example",
        packing="canonical",
        dtype=dtype,
        shape=shape,
        lengths=lengths,
        checksums=tuple(map(checksum, layers)),
        header_bytes=header_size(rank=len(shape), num_layers=3),
    )
    assert encode_header(header) == encode_header(header)
    tier = opened(make_tier(place.url())[0])
    assert await tier.put(
        [(header.key, [memoryview(encode_header(header)), memoryview(payload)])]
    ) == [None]
    back = bytearray(header.frame_bytes)
    assert await tier.get([header.key], [[memoryview(back)]]) == [header.frame_bytes]
    assert read_header(back, frame_bytes=len(back)) == header
    verify(header, memoryview(back)[header.header_bytes :])
    await tier.close()
