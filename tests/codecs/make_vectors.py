"""The committed frames, made anew: `python -m tests.codecs.make_vectors` writes them,
test_vectors.py compares.

A frame that is committed is never changed: a new version of the format gets new files, and the old
ones show what readers do with it.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvhold.codecs import (
    FrameHeader,
    Raw,
    encode_header,
    frame_chunk,
    header_size,
    make_codec,
    unframe_chunk,
)
from kvhold.codecs.frame import checksum
from kvhold.core.keys import make_key
from kvhold.core.layout import Group, Layout
from tests.codecs.independent import read_frame

FOLDER = Path(__file__).parent / "vectors"

NAMESPACE, HASH = bytes(range(0x10, 0x20)), bytes(range(0x40, 0x54))


@dataclass(frozen=True)
class Vector:
    """A frame, and the layout that it belongs to where there is one."""

    name: str
    says: str
    frame: bytes
    layout: Layout | None = None
    decoded: str = ""  # of a codec's frame: checksum of the chunk that comes out

    def description(self) -> dict[str, object]:
        """The JSON beside the frame."""
        layout = {"layout_is": asdict(self.layout)} if self.layout else {}
        decoded = {"decoded": self.decoded} if self.decoded else {}
        return {
            "says": self.says,
            "file": f"{self.name}.bin",
            **read_frame(self.frame),
            **layout,
            **decoded,
        }


@dataclass(frozen=True)
class Rejected:
    """A change to a frame, after which every reader refuses it, and why."""

    says: str
    reason: str
    frame: bytes


def content(nbytes: int) -> bytes:
    """Payload byte i is (131 * i + 7) mod 251."""
    return bytes((131 * i + 7) % 251 for i in range(nbytes))


def framed(
    layout: Layout,
    *,
    group: int = 0,
    shard: int = 0,
    num_tokens: int,
    first_token: int,
    align: int = 64,
) -> bytes:
    """A raw frame of `content`."""
    chunk = memoryview(content(layout.chunk_bytes(group, num_tokens)))
    key = make_key(NAMESPACE, HASH, group, shard)
    frame = frame_chunk(
        chunk,
        Raw(),
        key=key,
        layout=layout,
        num_tokens=num_tokens,
        first_token=first_token,
        align=align,
    )
    return b"".join(frame.parts)


def encoded(
    name: str, says: str, codec: str, layout: Layout, layers: list[bytes], *, num_tokens: int
) -> Vector:
    """A frame of a codec of ours."""
    key = make_key(NAMESPACE, HASH, 0, 0)
    chunk = b"".join(layers)
    frame = frame_chunk(
        memoryview(chunk),
        make_codec(codec),
        key=key,
        layout=layout,
        num_tokens=num_tokens,
        first_token=0,
    )
    whole = b"".join(frame.parts)
    into = bytearray(len(chunk))
    unframe_chunk(
        memoryview(whole), memoryview(into), key=key, layout=layout, num_tokens=num_tokens
    )
    return Vector(name, says, whole, layout, f"{checksum(bytes(into)):016x}")


def bfloat16s(tokens: int, width: int, *, sizes: bool) -> bytes:
    """[tokens, width] numbers, by integers alone: exponents near 120, mantissas and signs all over;
    with `sizes` each fourth channel is 64 times as large.
    """
    i = np.arange(tokens * width)
    exponent = 120 - (i * i % 61) % 7 % 5 + np.where(sizes & (i % width % 4 == 3), 6, 0)
    return bytes((exponent << 7 | i * 37 % 128 | i * 7 % 3 % 2 << 15).astype("<u2"))


def numbers(count: int, dtype: str) -> bytes:
    """Multiples of 1/64 from -8 to 8, each exact in float16 and float32."""
    values = ((np.arange(count) * 389 + 7) % 1021 - 510) / 64
    return bytes(values.astype({"float16": "<f2", "float32": "<f4"}[dtype]))


def bells(tokens: int, width: int, *, are_keys: bool) -> bytes:
    """[tokens, width] bfloat16 whole numbers, bell-shaped. Of keys, each fifth channel is wide and
    off zero, and one number far off; else each third token is wide.
    """
    found = (
        np.frombuffer(random.Random(3).randbytes(4 * tokens * width), np.uint8)
        .reshape(4, tokens, width)
        .sum(axis=0)
        .astype(np.int64)
        - 510
    )
    if are_keys:
        found[:, ::5] = found[:, ::5] * 8 + 3000
        found[tokens // 2, 1] = 20_000
    else:
        found[::3] *= 4
    return bytes((found.astype("<f4").view("<u4") >> 16).astype("<u2"))


def stated(
    *,
    shape: tuple[int, ...],
    dtype: str,
    lengths: tuple[int, ...],
    packing: str = "canonical",
    codec: str = "example",
    expires_at: int = 0,
) -> bytes:
    """A frame of a codec that does not exist: its layers are bytes like any others, and readers of
    headers need no codec.
    """
    payload, layers, at = content(sum(lengths)), [], 0
    for length in lengths:
        layers.append(payload[at : at + length])
        at += length
    header = FrameHeader(
        key=make_key(NAMESPACE, HASH, 0, 0),
        layout=bytes(range(0x80, 0x90)),
        num_tokens=5,
        first_token=0,
        codec=codec,
        packing=packing,
        dtype=dtype,
        shape=shape,
        lengths=lengths,
        checksums=tuple(map(checksum, layers)),
        header_bytes=header_size(rank=len(shape), num_layers=len(lengths)),
        expires_at=expires_at,
    )
    return encode_header(header) + payload


GQA = Layout(
    groups=(Group(layers=2, planes=2, heads=2, head_dim=4, dtype="bfloat16"),), tokens_per_chunk=4
)
MLA = Layout(
    groups=(Group(layers=3, planes=1, heads=1, head_dim=6, dtype="float16", rotary="yarn"),),
    tokens_per_chunk=8,
)
HYBRID = Layout(
    groups=(
        Group(layers=1, planes=2, heads=1, head_dim=4, dtype="bfloat16"),
        Group(
            layers=2, planes=2, heads=1, head_dim=2, dtype="float32", attention="sliding", window=8
        ),
    ),
    tokens_per_chunk=4,
    tail_tokens=2,
)
OPAQUE = Layout(
    groups=(
        Group(
            layers=2,
            planes=2,
            heads=1,
            head_dim=4,
            dtype="float16",
            packing="engine-1.0-own",
            block_tokens=2,
            block_bytes=36,
        ),
    ),
    tokens_per_chunk=4,
    tail_tokens=2,
)


WIDE = Layout(
    groups=(Group(layers=3, planes=2, heads=2, head_dim=16, dtype="bfloat16"),), tokens_per_chunk=64
)
RUNS = Layout(
    groups=(Group(layers=3, planes=2, heads=2, head_dim=160, dtype="float16"),), tokens_per_chunk=4
)
LONG = Layout(
    groups=(Group(layers=3, planes=2, heads=2, head_dim=40, dtype="bfloat16"),), tokens_per_chunk=64
)
SHORT = Layout(
    groups=(Group(layers=1, planes=2, heads=1, head_dim=150, dtype="float16"),), tokens_per_chunk=16
)
NARROW = Layout(
    groups=(Group(layers=1, planes=2, heads=1, head_dim=37, dtype="float32"),), tokens_per_chunk=64
)
SINGLE = Layout(
    groups=(Group(layers=2, planes=1, heads=2, head_dim=24, dtype="float32"),), tokens_per_chunk=32
)


def vectors() -> Iterator[Vector]:
    """Every frame that readers accept."""
    yield from _shapes()
    yield from _codecs_by_bytes()
    yield from _codecs_by_bits()


def _shapes() -> Iterator[Vector]:
    yield Vector("gqa", "a whole chunk, K and V", framed(GQA, num_tokens=4, first_token=8), GQA)
    yield Vector(
        "mla-tail",
        "a tail of one plane; no padding but to 8 bytes",
        framed(MLA, num_tokens=3, first_token=2**40, align=8),
        MLA,
    )
    yield Vector(
        "hybrid-group1",
        "the second group of a model, shard 3",
        framed(HYBRID, group=1, shard=3, num_tokens=4, first_token=0),
        HYBRID,
    )
    yield Vector(
        "opaque",
        "an engine's own packing; the payload begins at a page",
        framed(OPAQUE, num_tokens=4, first_token=4, align=4096),
        OPAQUE,
    )
    yield Vector(
        "rank1",
        "one axis, an unknown codec, a layer of no bytes",
        stated(shape=(40,), dtype="float8_e4m3fnuz", lengths=(3, 0, 11)),
    )
    yield Vector(
        "rank5",
        "five axes, layers longer than when decoded, not to be used from 2100 on",
        stated(
            shape=(1, 5, 2, 1, 3), dtype="float8_e5m2", lengths=(33, 31), expires_at=4_102_444_800
        ),
    )


def _codecs_by_bytes() -> Iterator[Vector]:
    both = bfloat16s(64, 32, sizes=True) + bfloat16s(64, 32, sizes=False)
    yield encoded(
        "lossless",
        "a layer of a biased and a coded exponent plane, one of zeros, one of noise, which "
        "stays as it is",
        "lossless",
        WIDE,
        [both, bytes(len(both)), random.Random(1).randbytes(len(both))],
        num_tokens=64,
    )
    half = numbers(2 * 4 * 2 * 160, "float16")
    yield encoded(
        "int8",
        "heads of two runs; a layer of numbers, one of zeros, one with an infinity, which "
        "stays as it is",
        "int8",
        RUNS,
        [half, bytes(len(half)), half[:-2] + b"\x00\x7c"],
        num_tokens=4,
    )
    yield encoded(
        "fp8",
        "a scale for each channel",
        "fp8",
        WIDE,
        [both, bytes(len(both)), both[::-1]],
        num_tokens=64,
    )
    single = numbers(3 * 2 * 24, "float32")
    yield encoded(
        "fp8-tail",
        "a scale for each head",
        "fp8",
        SINGLE,
        [single, single[4:] + single[:4]],
        num_tokens=3,
    )
    yield encoded(
        "cachegen",
        "offsets and an exception in the keys, shifts in the values; a layer of zeros, one "
        "of noise, which stays as it is",
        "cachegen",
        LONG,
        [
            bells(64, 80, are_keys=True) + bells(64, 80, are_keys=False),
            bytes(64 * 320),
            random.Random(2).randbytes(64 * 320),
        ],
        num_tokens=64,
    )


def _codecs_by_bits() -> Iterator[Vector]:
    half = numbers(2 * 4 * 2 * 160, "float16")
    for name in ("kivi4", "kivi2"):
        yield encoded(
            name,
            "groups of 32 and of 8 channels; a layer of zeros, one of noise, which stays as it is",
            name,
            LONG,
            [
                bells(64, 80, are_keys=True) + bells(64, 80, are_keys=False),
                bytes(64 * 320),
                random.Random(2).randbytes(64 * 320),
            ],
            num_tokens=64,
        )
        yield encoded(
            f"{name}-tail",
            "three tokens that do not fill a group, rows that do not fill their bytes",
            name,
            NARROW,
            [numbers(2 * 35 * 37, "float32")],
            num_tokens=35,
        )
    yield encoded(
        "k8v4",
        "keys of two runs, values of groups of 32; a layer of numbers, one of zeros, one "
        "with an infinity, which stays as it is",
        "k8v4",
        RUNS,
        [half, bytes(len(half)), half[:-2] + b"\x00\x7c"],
        num_tokens=4,
    )
    yield encoded(
        "turboquant4",
        "runs of 128 and of 32; a layer of which some runs are kept, one of zeros, one "
        "with an infinity, which stays as it is",
        "turboquant4",
        RUNS,
        [half, bytes(len(half)), half[:-2] + b"\x00\x7c"],
        num_tokens=4,
    )
    yield encoded(
        "turboquant4-tail",
        "vectors filled up with zeros",
        "turboquant4",
        NARROW,
        [numbers(2 * 3 * 37, "float32")],
        num_tokens=3,
    )
    yield encoded(
        "cachegen-tail",
        "channels that share",
        "cachegen",
        SHORT,
        [numbers(5 * 2 * 150, "float16")],
        num_tokens=5,
    )


def rejected() -> Iterator[Rejected]:
    """What is not a frame, all of it made from the frame `gqa`; "sealed": its header's checksum is
    right.
    """
    good = framed(GQA, num_tokens=4, first_token=8)
    start = header_size(rank=4, num_layers=2)

    def put(at: int, data: bytes) -> bytes:
        return good[:at] + data + good[at + len(data) :]

    def sealed(at: int, data: bytes) -> bytes:
        head = put(at, data)[: start - 8]
        return head + checksum(head).to_bytes(8, "little") + good[start:]

    def number(value: int, size: int = 8) -> bytes:
        return value.to_bytes(size, "little")

    yield Rejected("nothing at all", "length", b"")
    yield Rejected("23 bytes", "length", good[:23])
    yield Rejected("zeros", "magic", bytes(len(good)))
    yield Rejected("line ends rewritten", "magic", put(7, b"\r"))
    yield Rejected("version 0, sealed", "version", sealed(8, number(0, 2)))
    yield Rejected("version 2, sealed", "version", sealed(8, number(2, 2)))
    yield Rejected("an unknown flag, sealed", "version", sealed(10, number(1, 2)))
    yield Rejected("a header of 4 GiB", "length", put(12, number(2**32 - 8, 4)))
    yield Rejected(
        "a header that is not a multiple of 8 bytes", "length", put(12, number(start - 4, 4))
    )
    yield Rejected("a header longer than stated", "length", put(12, number(start - 64, 4)))
    yield Rejected("a payload of 2**63 bytes, sealed", "length", sealed(16, number(2**63)))
    yield Rejected("one byte too few", "length", good[:-1])
    yield Rejected("one byte too many", "length", good + b"\0")
    yield Rejected("the header alone", "length", good[:start])
    yield Rejected("a bit of the key", "checksum", put(40, bytes([good[40] ^ 1])))
    yield Rejected(
        "a bit of the header's checksum",
        "checksum",
        put(start - 1, bytes([good[start - 1] ^ 0x80])),
    )
    yield Rejected("a bit of the first layer", "checksum", put(start, bytes([good[start] ^ 0x10])))
    yield Rejected("a bit of the last layer", "checksum", good[:-1] + bytes([good[-1] ^ 1]))
    yield Rejected(
        "the layers swapped",
        "checksum",
        good[:start] + good[start + 128 :] + good[start : start + 128],
    )
    yield Rejected("a negative first token, sealed", "length", sealed(80, number(2**64 - 1)))
    yield Rejected("no tokens, sealed", "length", sealed(88, number(0, 4)))
    yield Rejected("no layers, sealed", "length", sealed(92, number(0, 4)))
    yield Rejected("2**32 - 1 layers, sealed", "length", sealed(92, number(2**32 - 1, 4)))
    yield Rejected(
        "layers of another size than the shape, sealed", "length", sealed(96, number(120))
    )
    yield Rejected("a codec without a name, sealed", "version", sealed(104, bytes(16)))
    yield Rejected("a codec with a zero inside its name, sealed", "version", sealed(104, b"ra\0w"))
    yield Rejected("an unknown dtype, sealed", "version", sealed(120, b"bfloat17"))
    yield Rejected("a packing that is not ASCII, sealed", "version", sealed(136, b"\xe9"))
    yield Rejected("an end beyond 63 bits, sealed", "length", sealed(168, number(2**63)))
    yield Rejected("rank 0, sealed", "length", sealed(176, number(0)))
    yield Rejected("rank 9, sealed", "length", sealed(176, number(9)))
    yield Rejected("rank 2**64 - 1, sealed", "length", sealed(176, number(2**64 - 1)))
    yield Rejected("an axis of no length, sealed", "length", sealed(184, number(0)))
    yield Rejected("a shape of 2**64 bytes and more, sealed", "length", sealed(184, number(2**63)))
    yield Rejected("layers that overlap, sealed", "length", sealed(184 + 32 + 24, number(64)))
    yield Rejected("a gap between layers, sealed", "length", sealed(184 + 32 + 24, number(136)))
    yield Rejected(
        "a layer beyond the payload, sealed", "length", sealed(184 + 32 + 24 + 8, number(2**40))
    )
    yield Rejected(
        "a raw layer that is too short, sealed", "length", sealed(184 + 32 + 8, number(127))
    )
    yield Rejected("padding that is not zero, sealed", "length", sealed(start - 9, b"x"))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for vector in vectors():
        (FOLDER / f"{vector.name}.bin").write_bytes(vector.frame)
        (FOLDER / f"{vector.name}.json").write_text(
            json.dumps(vector.description(), indent=1) + "\n"
        )
    table = [described(bad) for bad in rejected()]
    (FOLDER / "rejected.json").write_text(json.dumps(table, indent=1) + "\n")


def described(bad: Rejected) -> dict[str, str]:
    return {"says": bad.says, "reason": bad.reason, "frame": bad.frame.hex()}


if __name__ == "__main__":
    main()
