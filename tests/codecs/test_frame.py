"""A frame is read as it was written, says no more than it is asked, and fits where it is put."""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.codecs import (
    FrameHeader,
    Raw,
    check_identity,
    encode_header,
    frame_chunk,
    header_size,
    max_frame_bytes,
    read_header,
    read_size,
    unframe_chunk,
    unframe_layer,
    unframe_payload,
    verify,
    verify_layer,
)
from kvhold.codecs.frame import MAX_LAYERS, PREFIX_BYTES, checksum
from kvhold.codecs.raw import copy
from kvhold.core.errors import FrameError, LayoutError
from kvhold.core.keys import KEY_BYTES, make_key
from kvhold.core.layout import DTYPE_BYTES, Group, Layout
from tests.codecs.make_vectors import GQA, HASH, HYBRID, NAMESPACE, OPAQUE, content, framed
from tests.codecs.sample_codecs import Boastful

KEY = make_key(NAMESPACE, HASH, 0, 0)
NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=16)


def example(**changes: object) -> FrameHeader:
    header = FrameHeader(
        key=KEY,
        layout=bytes(16),
        num_tokens=4,
        first_token=0,
        codec="example",
        packing="canonical",
        dtype="bfloat16",
        shape=(2, 4, 2, 4),
        lengths=(100, 90),
        checksums=(1, 2),
        header_bytes=320,
    )
    return replace(header, **changes)  # type: ignore[arg-type]


@st.composite
def headers(draw: st.DrawFn) -> FrameHeader:
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=8)))
    lengths = tuple(draw(st.lists(st.integers(0, 2**30), min_size=1, max_size=40)))
    return FrameHeader(
        key=draw(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)),
        layout=draw(st.binary(min_size=16, max_size=16)),
        num_tokens=draw(st.integers(1, 2**32 - 1)),
        first_token=draw(st.integers(0, 2**63 - 1)),
        codec=draw(NAMES.filter(lambda name: name != "raw")),
        packing=draw(NAMES),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        shape=shape[:5],
        lengths=lengths,
        checksums=tuple(draw(st.integers(0, 2**64 - 1)) for _ in lengths),
        header_bytes=header_size(
            rank=len(shape[:5]),
            num_layers=len(lengths),
            align=draw(st.sampled_from([8, 64, 512, 4096])),
        ),
        expires_at=draw(st.integers(0, 2**63 - 1)),
    )


@given(headers(), st.binary(max_size=20))
def test_a_header_is_read_as_it_was_written_whatever_follows_it(
    header: FrameHeader, behind: bytes
) -> None:
    head = encode_header(header)
    assert len(head) == header.header_bytes
    assert read_header(head + behind) == header
    assert read_header(memoryview(bytearray(head)), frame_bytes=header.frame_bytes) == header
    assert vars(read_size(head[:PREFIX_BYTES])) == {
        "header_bytes": len(head),
        "payload_bytes": sum(header.lengths),
    }


@pytest.mark.parametrize(
    "shape", [(7,), (4, 6), (4, 2, 6), (2, 4, 1, 6), (1, 2, 4, 1, 6), (4, 0 + 1, 8, 1), (1,) * 8]
)
@pytest.mark.parametrize("dtype", ["float8_e4m3fnuz", "int8", "bfloat16", "float32"])
def test_every_rank_and_dtype_is_stated_and_none_is_guessed(
    shape: tuple[int, ...], dtype: str
) -> None:
    header = example(shape=shape, dtype=dtype)
    found = read_header(encode_header(header))
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.layer_bytes == int(np.prod(shape)) * DTYPE_BYTES[dtype]


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"),
    [
        (0, 9),
        (208, 9),
        (260, 9),
        (1 << 17 | 8, 9),
        (2**32 - 8, 9),
        (320, 2**36 + 1),
        (320, 2**64 - 1),
    ],
)
def test_lengths_out_of_bounds_are_refused_before_anything_is_fetched(
    header_bytes: int, payload_bytes: int
) -> None:
    prefix = (
        encode_header(example())[:12]
        + header_bytes.to_bytes(4, "little")
        + payload_bytes.to_bytes(8, "little")
    )
    with pytest.raises(FrameError, match="length"):
        read_size(prefix)


def test_a_header_that_did_not_arrive_whole_is_refused() -> None:
    head = encode_header(example())
    for arrived in range(len(head)):
        with pytest.raises(FrameError) as caught:
            read_header(head[:arrived])
        assert caught.value.reason == "length"


def test_a_payload_length_that_the_layers_do_not_fill_is_refused_though_nobody_knows_the_size() -> (
    None
):
    head = encode_header(example())
    for wrong in (189, 191, 0, 2**36):
        body = head[:16] + wrong.to_bytes(8, "little") + head[24:-8]
        with pytest.raises(FrameError, match="end to end"):
            read_header(body + checksum(body).to_bytes(8, "little"))


def test_writing_twice_gives_the_same_bytes_and_changes_nothing() -> None:
    header = example()
    assert encode_header(header) == encode_header(header)
    assert header == example()


def test_groups_of_one_model_with_their_own_dtypes_come_back_each_by_its_key() -> None:
    for group, dtype in enumerate(("bfloat16", "float32")):
        key = make_key(NAMESPACE, HASH, group, 0)
        frame = framed(HYBRID, group=group, num_tokens=4, first_token=0)
        into = bytearray(HYBRID.chunk_bytes(group, 4))
        header = unframe_chunk(
            memoryview(frame), memoryview(into), key=key, layout=HYBRID, num_tokens=4
        )
        assert header.dtype == dtype and into == content(len(into))
        with pytest.raises(FrameError, match="identity"):
            unframe_chunk(
                memoryview(frame),
                memoryview(into),
                key=make_key(NAMESPACE, HASH, 1 - group, 0),
                layout=HYBRID,
                num_tokens=4,
            )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 0}, "tokens"),
        ({"num_tokens": 2**32}, "tokens"),
        ({"first_token": -1}, "tokens"),
        ({"first_token": 2**63}, "tokens"),
        ({"expires_at": -1}, "expires"),
        ({"expires_at": 2**63}, "expires"),
        ({"dtype": "bfloat17"}, "dtype"),
        ({"codec": ""}, "codec"),
        ({"codec": "a" * 17}, "codec"),
        ({"packing": "p" * 33}, "packing"),
        ({"packing": "two words"}, "packing"),
        ({"key": KEY[1:]}, "key"),
        ({"layout": b""}, "layout"),
        ({"shape": ()}, "rank"),
        ({"shape": (1,) * 9}, "rank"),
        ({"shape": (2, 0)}, "layers of"),
        ({"shape": (2**40,)}, "layers of"),
        ({"lengths": (), "checksums": ()}, "layers"),
        ({"lengths": (1,)}, "checksums"),
        ({"lengths": (1,) * (MAX_LAYERS + 1), "checksums": (1,) * (MAX_LAYERS + 1)}, "layers"),
        ({"lengths": (-1, 2)}, "payload"),
        ({"lengths": (2**36, 1)}, "payload"),
        ({"checksums": (1, 2**64)}, "payload"),
        ({"codec": "raw"}, "raw"),
        ({"header_bytes": 256}, "header"),
        ({"header_bytes": 321}, "header"),
        ({"header_bytes": 1 << 18}, "header"),
    ],
)
def test_no_header_is_written_that_no_reader_would_accept(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        encode_header(example(**changes))


def test_the_largest_header_is_within_the_bounds_of_readers() -> None:
    many = (0,) * MAX_LAYERS
    header = example(
        shape=(1,) * 8,
        lengths=many,
        checksums=many,
        header_bytes=header_size(rank=8, num_layers=MAX_LAYERS, align=4096),
    )
    assert read_header(encode_header(header)) == header


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"key": make_key(NAMESPACE, HASH[::-1], 0, 0)}, "key"),
        ({"key": make_key(NAMESPACE[::-1], HASH, 0, 0)}, "key"),
        ({"key": make_key(NAMESPACE, HASH, 0, 1)}, "key"),
        ({"layout": replace(GQA, tail_tokens=2)}, "layout"),
        ({"num_tokens": 3}, "tokens"),
        ({"first_token": 4}, "first token"),
    ],
)
def test_a_good_frame_of_something_else_is_refused(asked: dict[str, Any], words: str) -> None:
    header = read_header(framed(GQA, num_tokens=4, first_token=8))
    right: dict[str, Any] = {"key": KEY, "layout": GQA, "num_tokens": 4}
    check_identity(header, **right)
    check_identity(header, **right, first_token=8)
    with pytest.raises(FrameError, match=words) as caught:
        check_identity(header, **right | asked)
    assert caught.value.reason == "identity"


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (2, 4, 4, 2)},
        {"shape": (4, 2, 2, 4)},
        {"shape": (64,)},
        {"dtype": "float16"},
        {"packing": "other"},
        {"lengths": (64,), "checksums": (0,)},
    ],
)
def test_a_writer_that_names_our_layout_but_describes_another_is_refused(
    wrong: dict[str, Any],
) -> None:
    header = example(layout=GQA.fingerprint)
    check_identity(header, key=KEY, layout=GQA, num_tokens=4)
    with pytest.raises(FrameError, match="identity"):
        check_identity(
            read_header(encode_header(replace(header, **wrong))), key=KEY, layout=GQA, num_tokens=4
        )


def test_asking_for_what_cannot_be_is_the_callers_error() -> None:
    header = example(layout=GQA.fingerprint)
    with pytest.raises(ValueError, match="40 bytes"):
        check_identity(header, key=KEY[1:], layout=GQA, num_tokens=4)
    with pytest.raises(LayoutError, match="group 1"):
        check_identity(header, key=make_key(NAMESPACE, HASH, 1, 0), layout=GQA, num_tokens=4)


def test_a_raw_frame_is_the_chunk_itself_and_one_piece_only_if_wanted() -> None:
    chunk = np.frombuffer(content(GQA.chunk_bytes(0, 4)), np.uint8).copy()
    place: dict[str, Any] = {"key": KEY, "layout": GQA, "num_tokens": 4, "first_token": 0}
    frame = frame_chunk(chunk.data, Raw(), **place)
    assert np.shares_memory(np.frombuffer(frame.payload, np.uint8), chunk)
    out = memoryview(bytearray(max_frame_bytes(Raw(), GQA, 0, 4, align=4096)))
    whole = frame_chunk(chunk.data, Raw(), **place, out=out, align=4096)
    assert len(whole.header) == 4096 and whole.nbytes == len(out)
    assert out == b"".join(whole.parts)
    assert whole.payload == frame.payload == chunk.data
    with pytest.raises(ValueError, match="out has"):
        frame_chunk(chunk.data, Raw(), **place, out=out[1:], align=4096)
    for align in (12, 4, 0, -8):
        with pytest.raises(ValueError, match="align is"):
            frame_chunk(chunk.data, Raw(), **place, align=align)


@pytest.mark.parametrize(
    ("nbytes", "num_tokens"), [(255, 4), (257, 4), (256, 3), (0, 4), (320, 5), (0, 0)]
)
def test_a_chunk_that_does_not_fit_its_layout_is_not_framed(nbytes: int, num_tokens: int) -> None:
    with pytest.raises(LayoutError):
        frame_chunk(
            memoryview(bytes(nbytes)),
            Raw(),
            key=KEY,
            layout=GQA,
            num_tokens=num_tokens,
            first_token=0,
        )


def test_a_codec_that_overruns_its_own_bound_is_found_before_a_frame_is_made() -> None:
    with pytest.raises(ValueError, match="reports 193 bytes for layer 0"):
        frame_chunk(
            memoryview(bytes(256)), Boastful(), key=KEY, layout=GQA, num_tokens=4, first_token=0
        )


def test_one_layer_is_read_by_its_range_and_trusted_alone() -> None:
    frame = memoryview(framed(OPAQUE, num_tokens=4, first_token=0))
    header = read_header(
        frame[: read_size(frame[:PREFIX_BYTES]).header_bytes], frame_bytes=len(frame)
    )
    offset, length = header.layer_range(1)
    layer, into = frame[offset : offset + length], memoryview(bytearray(header.layer_bytes))
    unframe_layer(header, 1, layer, into, layout=OPAQUE)
    assert into == content(144)[72:]
    for reason, wrong in (
        ("checksum", frame[header.header_bytes :][:length]),
        ("length", layer[1:]),
        ("length", b""),
    ):
        with pytest.raises(FrameError, match=reason):
            verify_layer(header, 1, wrong)
        with pytest.raises(FrameError, match=reason):
            unframe_layer(header, 1, memoryview(wrong), into, layout=OPAQUE)
    with pytest.raises(ValueError, match="into has"):
        unframe_layer(header, 1, layer, into[1:], layout=OPAQUE)


def test_a_payload_that_landed_in_its_place_needs_no_copy() -> None:
    frame = framed(GQA, num_tokens=4, first_token=0)
    size = header_size(rank=4, num_layers=2)
    landed = memoryview(bytearray(frame[size:]))
    header = read_header(frame[:size], frame_bytes=len(frame))
    verify(header, landed)
    landed[200] ^= 1
    with pytest.raises(FrameError, match=r"checksum.*layer 1"):
        verify(header, landed)
    for wrong in (landed[:-1], bytes(landed) + b"\0", b""):
        with pytest.raises(FrameError, match="length"):
            verify(header, wrong)


def test_a_destination_of_the_wrong_size_is_not_written_to() -> None:
    frame = memoryview(framed(GQA, num_tokens=4, first_token=0))
    for size in (255, 257):
        into = memoryview(bytearray(size))
        with pytest.raises(ValueError, match="into has"):
            unframe_chunk(frame, into, key=KEY, layout=GQA, num_tokens=4)
        assert not any(into)
    with pytest.raises(FrameError, match="length"):
        unframe_payload(read_header(frame), frame[321:], memoryview(bytearray(256)), layout=GQA)


def test_a_frame_of_an_unknown_codec_is_refused_and_not_decoded() -> None:
    head = encode_header(
        example(layout=GQA.fingerprint, lengths=(1, 1), checksums=(checksum(b"a"), checksum(b"b")))
    )
    with pytest.raises(FrameError, match="'example' is unknown") as caught:
        unframe_chunk(
            memoryview(head + b"ab"), memoryview(bytearray(256)), key=KEY, layout=GQA, num_tokens=4
        )
    assert caught.value.reason == "version"


def test_nothing_of_numpy_leaks_from_a_header() -> None:
    header = read_header(framed(GQA, num_tokens=4, first_token=0))
    for value in (
        header.num_tokens,
        header.first_token,
        header.header_bytes,
        header.payload_bytes,
        header.layer_bytes,
    ):
        assert type(value) is int
    assert {
        type(value)
        for row in (header.shape, header.lengths, header.checksums, header.offsets)
        for value in row
    } == {int}
    assert type(header.key) is bytes and type(header.layout) is bytes


def test_other_threads_run_while_a_large_chunk_is_framed_and_unframed() -> None:
    # 8 MiB a layer
    layout = Layout(
        (Group(layers=2, planes=2, heads=64, head_dim=64, dtype="float32"),), tokens_per_chunk=256
    )
    chunk = np.ones(layout.chunk_bytes(0, 256), np.uint8)
    out, into = np.zeros(max_frame_bytes(Raw(), layout, 0, 256), np.uint8), np.zeros_like(chunk)
    place: dict[str, Any] = {"key": KEY, "layout": layout, "num_tokens": 256}
    steps, interval = [0], sys.getswitchinterval()
    done: list[bool] = []

    def count() -> None:
        while not done:
            steps[0] += 1
            time.sleep(0)

    def others_ran(work: Callable[[], object]) -> bool:
        before = steps[0]
        work()
        return steps[0] > before

    frame = frame_chunk(chunk.data, Raw(), **place, first_token=0, out=out.data)
    whole = out[: frame.nbytes].data
    other = threading.Thread(target=count)
    sys.setswitchinterval(100)
    try:
        # on a busy machine it may miss a chance, but where there is none it misses all of them
        other.start()
        assert any(
            others_ran(lambda: frame_chunk(chunk.data, Raw(), **place, first_token=0))
            for _ in range(200)
        ), "hashing"
        assert any(others_ran(lambda: copy(chunk.data, into.data)) for _ in range(200)), "copying"
        assert any(others_ran(lambda: unframe_chunk(whole, into.data, **place)) for _ in range(200))
    finally:
        sys.setswitchinterval(interval)
        done.append(True)
        other.join()
    assert np.array_equal(into, chunk)
