"""Attacks on the reader: whatever the bytes are, the answer is the chunk that was written, or a
FrameError, and little memory.
"""

import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold.codecs import encode_header, read_header, read_size, unframe_chunk
from kvhold.codecs.frame import MAX_HEADER_BYTES, checksum
from kvhold.core.errors import FrameError
from kvhold.core.keys import make_key
from kvhold.core.layout import Layout
from tests.codecs.make_vectors import GQA, HASH, MLA, NAMESPACE, OPAQUE, content, framed

KEY = make_key(NAMESPACE, HASH, 0, 0)
SMALL = {
    "gqa": (framed(GQA, num_tokens=4, first_token=8), GQA, 4),
    "mla-tail": (framed(MLA, num_tokens=3, first_token=0, align=8), MLA, 3),
    "opaque": (framed(OPAQUE, num_tokens=2, first_token=4, align=512), OPAQUE, 2),
}
GOOD, _, TOKENS = SMALL["gqa"]
START = read_size(GOOD).header_bytes
OTHER_PAYLOAD = GOOD[:START] + bytes(256)  # of the same sizes; not a frame, but a source of splices
OTHER_KEY = framed(GQA, shard=1, num_tokens=4, first_token=8)
EXTREMES = [
    0,
    1,
    7,
    8,
    2**31,
    2**32 - 1,
    2**32,
    2**36,
    2**36 + 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def read(frame: bytes | bytearray, layout: Layout = GQA, num_tokens: int = TOKENS) -> bytes:
    into = bytearray(layout.chunk_bytes(0, num_tokens))
    unframe_chunk(
        memoryview(frame), memoryview(into), key=KEY, layout=layout, num_tokens=num_tokens
    )
    return bytes(into)


def is_refused(frame: bytes | bytearray, layout: Layout = GQA, num_tokens: int = TOKENS) -> bool:
    try:
        read(frame, layout, num_tokens)
    except FrameError:
        return True
    return False


def sealed(head: bytes, payload: bytes) -> bytes:
    """A frame with a header whose checksum is right, as a hostile or broken writer
    could make it.
    """
    return head[:-8] + checksum(head[:-8]).to_bytes(8, "little") + payload


@pytest.mark.parametrize("name", SMALL)
def test_every_single_bit_flip_is_detected(name: str) -> None:
    frame, layout, num_tokens = SMALL[name]
    assert read(frame, layout, num_tokens) == content(layout.chunk_bytes(0, num_tokens))
    flipped = bytearray(frame)
    for at in range(len(frame)):
        for bit in range(8):
            flipped[at] ^= 1 << bit
            assert is_refused(flipped, layout, num_tokens), f"byte {at}, bit {bit}"
            flipped[at] ^= 1 << bit


@pytest.mark.parametrize("name", SMALL)
def test_every_other_length_is_detected(name: str) -> None:
    frame, layout, num_tokens = SMALL[name]
    for keep in range(len(frame)):
        assert is_refused(frame[:keep], layout, num_tokens)
        # a hole to the end
        assert is_refused(frame[:keep] + bytes(len(frame) - keep), layout, num_tokens) or not any(
            frame[keep:]
        )
    for more in (b"\0", b"\xff" * 8, frame):
        assert is_refused(frame + more, layout, num_tokens)
        assert is_refused(more + frame, layout, num_tokens)


def test_parts_of_two_frames_make_no_frame() -> None:
    other = content(512)[256:]
    assert is_refused(GOOD[:START] + other)
    assert is_refused(OTHER_KEY)  # whole and valid, but not what was asked for
    # its payload happens to be the same: the key still is not
    assert is_refused(OTHER_KEY[:START] + GOOD[START:])
    for cut in range(1, START):
        assert is_refused(GOOD[:cut] + OTHER_KEY[cut:]) or OTHER_KEY[cut:] == GOOD[cut:]
    for cut in range(START, len(GOOD)):
        assert is_refused(GOOD[:cut] + OTHER_PAYLOAD[cut:]) or not any(GOOD[cut:])
    for block in range(0, len(GOOD), 8):  # any eight bytes moved to any other place
        for to in range(0, len(GOOD), 8):
            moved = GOOD[:to] + GOOD[block : block + 8] + GOOD[to + 8 :]
            assert moved == GOOD or is_refused(moved)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    frame = bytearray(GOOD)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(frame) - 1, 0)))
        count = draw(st.integers(0, 64))
        match draw(st.sampled_from(["flip", "write", "number", "cut", "insert", "drop", "splice"])):
            case "flip" if frame:
                frame[at] ^= 1 << draw(st.integers(0, 7))
            case "write":
                frame[at : at + count] = draw(st.binary(min_size=count, max_size=count))
            case "number":
                frame[at : at + 8] = draw(st.sampled_from(EXTREMES)).to_bytes(8, "little")
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = draw(st.binary(max_size=64))
            case "drop":
                del frame[at : at + count]
            case "splice":
                frame[at:] = OTHER_KEY[at:]
    return bytes(frame)


@settings(max_examples=1000)
@given(mutations())
def test_a_mutated_frame_is_refused_or_the_same_chunk(frame: bytes) -> None:
    assert is_refused(frame) or frame == GOOD


@settings(max_examples=1000)
@given(
    st.binary(max_size=2 * START) | st.binary(max_size=2 * START).map(lambda tail: GOOD[:24] + tail)
)
def test_garbage_is_refused(garbage: bytes) -> None:
    assert is_refused(garbage) or garbage == GOOD


def hostile(seed: int, count: int) -> Iterator[bytes]:
    """Headers with right checksums and wild contents."""
    dice = random.Random(seed)
    for _ in range(count):
        head = bytearray(GOOD[:START])
        for _ in range(dice.randint(1, 3)):
            at = dice.choice(
                [12, 16, 80, 88, 92, 96, 168, *range(176, 256, 8), dice.randrange(START)]
            )
            size = dice.choice([1, 2, 4, 8])
            number = dice.choice(EXTREMES) if dice.random() < 0.6 else dice.getrandbits(64)
            head[at : at + size] = (number % 256**size).to_bytes(size, "little")
        yield sealed(bytes(head[:START]), GOOD[START:])


def test_a_header_with_a_right_checksum_is_refused_or_says_exactly_what_its_bytes_are() -> None:
    accepted = 0
    for frame in hostile(seed=1, count=20_000):
        try:
            header = read_header(frame, frame_bytes=len(frame))
        except FrameError:
            continue
        accepted += 1
        assert encode_header(header) == frame[: header.header_bytes]
        assert sum(header.lengths) == len(frame) - header.header_bytes
    # another key, another position: such headers are fine, or this would test nothing
    assert accepted > 100


def test_whatever_is_read_costs_no_more_memory_than_a_header() -> None:
    frames = [
        *hostile(seed=2, count=500),
        *(random.Random(3).randbytes(400) for _ in range(100)),
        GOOD[:24] + bytes(1000),
    ]
    is_refused(GOOD[:-1])
    into = memoryview(bytearray(GQA.chunk_bytes(0, TOKENS)))
    tracemalloc.start()
    try:
        for frame in frames:
            try:
                unframe_chunk(memoryview(frame), into, key=KEY, layout=GQA, num_tokens=TOKENS)
            except FrameError:
                continue
        assert tracemalloc.get_traced_memory()[1] < MAX_HEADER_BYTES
    finally:
        tracemalloc.stop()


def test_a_seeded_storm_of_mutations_finds_nothing() -> None:
    dice = random.Random(4)
    for _ in range(20_000):
        frame = bytearray(GOOD)
        for _ in range(dice.randint(1, 4)):
            match dice.randrange(4):
                case 0:
                    frame[dice.randrange(len(frame))] = dice.randrange(256)
                case 1:
                    a, b = dice.randrange(len(frame)), dice.randrange(len(frame))
                    frame[a], frame[b] = frame[b], frame[a]
                case 2:
                    at, size = dice.randrange(len(frame)), dice.randrange(1, 40)
                    frame[at : at + size] = bytes([dice.choice((0, 255))]) * len(
                        frame[at : at + size]
                    )
                case _:
                    at = dice.randrange(len(frame))
                    frame[at : at + 8] = OTHER_KEY[at : at + 8]
        assert is_refused(frame) or frame == GOOD
