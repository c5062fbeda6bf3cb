"""The contract of codecs as one test suite.

    class TestDeflate(CodecContract):
        @pytest.fixture
        def codec(self):
            return Deflate()

Cases that the codec does not accept are skipped.
"""

import random
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pytest

from kvhold.codecs import (
    Codec,
    find_codec,
    frame_chunk,
    max_frame_bytes,
    read_header,
    unframe_chunk,
    unframe_layer,
)
from kvhold.codecs.frame import CODEC_BYTES, FrameHeader, layer_shape
from kvhold.core.errors import FrameError, LayoutError
from kvhold.core.keys import make_key
from kvhold.core.layout import DTYPE_BYTES, Group, Layout
from kvhold.testing.values import Floats, as_float64, from_float64

_GUARD = 64
_CONTENTS = ("normal", "zeros", "constant", "outliers", "huge", "tiny", "positive")


@dataclass(frozen=True)
class Case:
    layout: Layout
    group: int
    num_tokens: int

    @property
    def layers(self) -> int:
        return self.layout.groups[self.group].layers

    @property
    def layer_bytes(self) -> int:
        return self.layout.groups[self.group].layer_bytes(self.num_tokens)

    @property
    def dtype(self) -> str:
        return layer_shape(self.layout, self.group, self.num_tokens)[0]

    @property
    def key(self) -> bytes:
        return make_key(bytes(range(16)), bytes(range(20)), self.group, 0)

    def chunk(self, content: str) -> memoryview:
        count = self.layers * self.layer_bytes // DTYPE_BYTES[self.dtype]
        return memoryview(from_float64(_values(content, count), self.dtype))

    def any_bytes(self) -> memoryview:
        """Random bytes, with infinities and NaN."""
        return memoryview(random.Random(1).randbytes(self.layers * self.layer_bytes))

    def layer_of(self, chunk: memoryview, layer: int) -> memoryview:
        return chunk[layer * self.layer_bytes : (layer + 1) * self.layer_bytes]


def _layout(*groups: Group, tail_tokens: int = 1) -> Layout:
    return Layout(groups=groups, tokens_per_chunk=16, tail_tokens=tail_tokens)


def _cases() -> Iterator[tuple[str, Case]]:
    for dtype in DTYPE_BYTES:
        yield (
            f"{dtype}",
            Case(_layout(Group(layers=2, planes=2, heads=2, head_dim=8, dtype=dtype)), 0, 16),
        )
    mla = _layout(Group(layers=3, planes=1, heads=1, head_dim=36, dtype="bfloat16"))
    odd = _layout(Group(layers=1, planes=2, heads=3, head_dim=5, dtype="float16"))
    hybrid = _layout(
        Group(layers=2, planes=2, heads=2, head_dim=16, dtype="bfloat16"),
        Group(
            layers=4, planes=2, heads=1, head_dim=8, dtype="float16", attention="sliding", window=8
        ),
        Group(layers=2, planes=1, heads=1, head_dim=24, dtype="float32", attention="state"),
    )
    opaque = Group(
        layers=2,
        planes=2,
        heads=2,
        head_dim=8,
        dtype="bfloat16",
        packing="engine-own",
        block_tokens=4,
        block_bytes=264,
    )
    for num_tokens in (16, 7, 1):
        yield f"mla-{num_tokens}", Case(mla, 0, num_tokens)
        yield f"odd-{num_tokens}", Case(odd, 0, num_tokens)
    for group in range(3):
        yield f"hybrid-group{group}", Case(hybrid, group, 16)
    for num_tokens in (16, 4, 3):
        yield f"opaque-{num_tokens}", Case(_layout(opaque, tail_tokens=4), 0, num_tokens)


CASES = dict(_cases())


def _values(content: str, count: int) -> Floats:
    rng = np.random.default_rng(3)
    normal = rng.standard_normal(count)
    if content == "zeros":
        return np.zeros(count)
    if content == "constant":
        return np.full(count, -3.25)
    if content == "outliers":
        return np.where(rng.random(count) < 0.02, normal * 1000, normal)
    if content == "huge":
        return normal * 1e300
    if content == "tiny":
        return normal * 1e-7
    return np.abs(normal) + 1 if content == "positive" else normal


class CodecContract:
    """Override the fixture `codec`."""

    @pytest.fixture
    def codec(self) -> Codec:
        raise NotImplementedError("override the fixture `codec`")

    @pytest.fixture(params=CASES)
    def case(self, request: pytest.FixtureRequest) -> Case:
        return CASES[request.param]

    def test_it_has_a_name_that_fits_a_frame_and_states_its_error(self, codec: Codec) -> None:
        name = codec.name
        assert (
            1 <= len(name) <= CODEC_BYTES
            and name.isascii()
            and name.isprintable()
            and " " not in name
        )
        assert (codec.error_bound == 0.0) if codec.lossless else (0.0 < codec.error_bound <= 1.0)

    def test_it_accepts_some_groups_and_the_others_are_refused(self, codec: Codec) -> None:
        accepted = [case for case in CASES.values() if codec.accepts(case.layout, case.group)]
        assert accepted
        for case in CASES.values():
            if case not in accepted:
                with pytest.raises(LayoutError):
                    frame_chunk(
                        case.chunk("normal"),
                        codec,
                        key=case.key,
                        layout=case.layout,
                        num_tokens=case.num_tokens,
                        first_token=0,
                    )

    @pytest.mark.parametrize("content", _CONTENTS)
    def test_values_come_back_within_the_error_bound(
        self, codec: Codec, case: Case, content: str
    ) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        chunk = case.chunk(content)
        for layer, encoded in enumerate(encode(codec, case, chunk)):
            decoded = decode(codec, case, layer, encoded)
            plain = case.layer_of(chunk, layer)
            if codec.lossless:
                assert decoded == plain
            else:
                before, after = as_float64(plain, case.dtype), as_float64(decoded, case.dtype)
                assert np.abs(after - before).max() <= codec.error_bound * np.abs(before).max()

    def test_any_bytes_are_encoded_and_a_lossless_codec_gives_them_back(
        self, codec: Codec, case: Case
    ) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        chunk = case.any_bytes()
        for layer, encoded in enumerate(encode(codec, case, chunk)):
            decoded = decode(codec, case, layer, encoded)
            assert not codec.lossless or decoded == case.layer_of(chunk, layer)

    def test_a_layer_gives_the_same_bytes_whatever_was_encoded_before_and_beside_it(
        self, codec: Codec, case: Case
    ) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        chunk, other = case.chunk("normal"), case.chunk("outliers")
        expected = encode(codec, case, chunk)
        encode(codec, case, other)
        last = case.layers - 1
        assert encode_layer(codec, case, last, case.layer_of(chunk, last)) == expected[last]
        with ThreadPoolExecutor(4) as pool:
            assert all(
                found == expected
                for found in pool.map(lambda _: encode(codec, case, chunk), range(8))
            )

    def test_a_fresh_codec_decodes_any_layer_alone_and_in_any_order(
        self, codec: Codec, case: Case
    ) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        encoded = encode(codec, case, case.chunk("normal"))
        expected = [decode(codec, case, layer, encoded[layer]) for layer in range(case.layers)]
        fresh = type(codec)()
        assert [
            decode(fresh, case, layer, encoded[layer]) for layer in reversed(range(case.layers))
        ] == expected[::-1]

    def test_damaged_bytes_are_a_frame_error_or_some_values(self, codec: Codec, case: Case) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        good = encode(codec, case, case.chunk("normal"))[0]
        dice = random.Random(5)
        for damaged in _damaged(good, dice):
            with suppress(FrameError):
                decode(codec, case, 0, damaged)

    def test_damaged_bytes_cost_bounded_memory(self, codec: Codec) -> None:
        case = next(case for case in CASES.values() if codec.accepts(case.layout, case.group))
        good = encode(codec, case, case.chunk("normal"))[0]
        damaged = list(_damaged(good, random.Random(6)))
        decode(codec, case, 0, good)
        tracemalloc.start()
        try:
            for bytes_ in damaged:
                with suppress(FrameError):
                    decode(codec, case, 0, bytes_)
                assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("in_one_piece", [False, True], ids=["parts", "one piece"])
    def test_a_chunk_goes_into_a_frame_and_comes_back(
        self, codec: Codec, case: Case, in_one_piece: bool
    ) -> None:
        if not codec.accepts(case.layout, case.group):
            return
        chunk = case.chunk("normal")
        frame, header = framed(codec, case, chunk, in_one_piece=in_one_piece)
        into, layerwise = bytearray(len(chunk)), bytearray(len(chunk))
        unframe_chunk(
            memoryview(frame),
            memoryview(into),
            key=case.key,
            layout=case.layout,
            num_tokens=case.num_tokens,
            find=lambda name: codec if name == codec.name else find_codec(name),
        )
        assert header.codec == codec.name and (not codec.lossless or into == chunk)
        for layer in reversed(range(case.layers)):
            offset, length = header.layer_range(layer)
            target = case.layer_of(memoryview(layerwise), layer)
            unframe_layer(
                header,
                layer,
                memoryview(frame)[offset : offset + length],
                target,
                layout=case.layout,
                find=lambda _: codec,
            )
        assert layerwise == into

    def test_a_damaged_frame_is_refused(self, codec: Codec) -> None:
        case = next(case for case in CASES.values() if codec.accepts(case.layout, case.group))
        frame, _ = framed(codec, case, case.chunk("normal"), in_one_piece=True)
        into = memoryview(bytearray(case.layers * case.layer_bytes))
        for damaged in _damaged(frame, random.Random(7)):
            with pytest.raises(FrameError):
                unframe_chunk(
                    memoryview(damaged),
                    into,
                    key=case.key,
                    layout=case.layout,
                    num_tokens=case.num_tokens,
                    find=lambda _: codec,
                )


def encode(codec: Codec, case: Case, chunk: memoryview) -> list[bytes]:
    return [
        encode_layer(codec, case, layer, case.layer_of(chunk, layer))
        for layer in range(case.layers)
    ]


def encode_layer(codec: Codec, case: Case, layer: int, plain: memoryview) -> bytes:
    before = bytes(plain)
    most = codec.max_size(case.layout, case.group, case.num_tokens)
    assert type(most) is int
    room, out = _guarded(most, fill=0x55)
    length = codec.encode(
        memoryview(before),
        out,
        layout=case.layout,
        group=case.group,
        layer=layer,
        num_tokens=case.num_tokens,
    )
    assert type(length) is int and 0 <= length <= most
    assert before == plain, "encode changed its input"
    _assert_guarded(room)
    return bytes(out[:length])


def decode(codec: Codec, case: Case, layer: int, encoded: bytes) -> bytes:
    """Check that the codec wrote its whole output and nothing else."""
    results = []
    for fill in (0x55, 0xAA):
        room, out = _guarded(case.layer_bytes, fill=fill)
        try:
            codec.decode(
                memoryview(encoded),
                out,
                layout=case.layout,
                group=case.group,
                layer=layer,
                num_tokens=case.num_tokens,
            )
        finally:
            _assert_guarded(room)
        results.append(bytes(out))
    assert results[0] == results[1], "decode left a part of its output unwritten"
    return results[0]


def framed(
    codec: Codec, case: Case, chunk: memoryview, *, in_one_piece: bool
) -> tuple[bytes, FrameHeader]:
    out = None
    if in_one_piece:
        out = memoryview(
            bytearray(max_frame_bytes(codec, case.layout, case.group, case.num_tokens))
        )
    frame = frame_chunk(
        chunk,
        codec,
        key=case.key,
        layout=case.layout,
        num_tokens=case.num_tokens,
        first_token=32,
        out=out,
    )
    whole = b"".join(frame.parts)
    assert len(whole) == frame.nbytes == frame.fields.frame_bytes
    assert out is None or out[: frame.nbytes] == whole
    header = read_header(whole, frame_bytes=len(whole))
    assert header == frame.fields
    return whole, header


def _guarded(size: int, *, fill: int) -> tuple[bytearray, memoryview]:
    room = bytearray(b"\xc3" * _GUARD + bytes([fill]) * size + b"\xc3" * _GUARD)
    return room, memoryview(room)[_GUARD : _GUARD + size]


def _assert_guarded(room: bytearray) -> None:
    guard = b"\xc3" * _GUARD
    assert room.startswith(guard) and room.endswith(guard), "written outside of the buffer"


def _damaged(good: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield cut, extended, flipped and random bytes, never `good` itself."""
    for keep in {0, 1, len(good) // 2, len(good) - 1} - {len(good)}:
        yield good[: max(keep, 0)]
    yield good + b"\0"
    yield good + good
    for _ in range(40 if good else 0):
        flipped = bytearray(good)
        flipped[dice.randrange(len(good))] ^= 1 << dice.randrange(8)
        yield bytes(flipped)
    for size in (len(good), len(good) // 3 + 1):
        yield dice.randbytes(size)
        yield b"\xff" * size
        yield b"\0" * (size + 1)
