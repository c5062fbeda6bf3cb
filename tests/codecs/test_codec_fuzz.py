"""Attacks on decoders: bytes that no encoder wrote are a FrameError or some values, and nothing
outside of the buffers is touched.

The damaged bytes end where a page ends that may not be read behind, so that reading one byte too
many ends the process.
"""

import ctypes
import mmap
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhold.codecs import make_codec
from kvhold.core.errors import FrameError
from kvhold.core.layout import Group, Layout
from kvhold.testing.codec import Case, encode_layer
from kvhold.testing.values import from_float64

pytest.importorskip("numba", reason="no numba in this environment")

_PAGE = mmap.PAGESIZE
_GUARD = 64


def _case(dtype: str, tokens: int, **group: Any) -> Case:
    place = Group(layers=1, dtype=dtype, **{"planes": 2, "heads": 2, "head_dim": 32, **group})
    return Case(Layout(groups=(place,), tokens_per_chunk=256), 0, tokens)


def _layer(place: Case, *, outliers: bool) -> bytes:
    group, rng = place.layout.groups[0], np.random.default_rng(9)
    values = rng.standard_normal(
        (place.layer_bytes // group.token_bytes, group.heads * group.head_dim)
    )
    if outliers:
        values *= 2.0 ** rng.integers(-5, 6, values.shape[1])
    return from_float64(values.reshape(-1), group.dtype)


CASES = {
    "lossless": _case("bfloat16", 64),
    "lossless-bytes": _case("float8_e4m3fn", 64),  # its words are the last of the layer
    "lossless-segments": _case("uint8", 256, planes=1, heads=1, head_dim=160),
    "int8": _case("bfloat16", 33, head_dim=130),
    "fp8": _case("float16", 40),
    "fp8-tail": _case("float32", 3),
    "cachegen": _case("bfloat16", 64, head_dim=40),
    "cachegen-tail": _case("float32", 5),
    "kivi4": _case("bfloat16", 40, head_dim=43, heads=1),
    "kivi4-tail": _case("float32", 5),
    "kivi2": _case("float16", 33, head_dim=33),
    "kivi2-one": _case("bfloat16", 64, planes=1, heads=1, head_dim=70),
    "k8v4": _case("bfloat16", 33, head_dim=130),
    "turboquant4": _case("bfloat16", 33, head_dim=160),
    "turboquant4-tail": _case("float32", 1, head_dim=24),
}
GOOD = {
    name: encode_layer(
        make_codec(name.partition("-")[0]),
        place,
        0,
        memoryview(_layer(place, outliers=name == "lossless")),
    )
    for name, place in CASES.items()
}


class Fenced:
    """Memory with a page behind it that may not be touched."""

    def __init__(self, most: int) -> None:
        self._size = -(-most // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, self._size + _PAGE)
        view = np.frombuffer(self._map, np.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert protect(view.ctypes.data + self._size, _PAGE, 0) == 0, "mprotect"

    def put(self, data: bytes | bytearray) -> memoryview:
        """`data`, ending at the fence."""
        begin = self._size - len(data)
        self._map[begin : self._size] = data
        return memoryview(self._map)[begin : self._size]


FENCED = Fenced(1 << 20)
OUT = {name: bytearray(place.layer_bytes + 2 * _GUARD) for name, place in CASES.items()}


def attack(name: str, data: bytes | bytearray) -> bool:
    """Whether `data` decodes at all; guards around the output are looked at."""
    place, room = CASES[name], OUT[name]
    room[:_GUARD] = room[-_GUARD:] = b"\xc3" * _GUARD
    out = memoryview(room)[_GUARD:-_GUARD]
    reason = ""
    try:
        make_codec(name.partition("-")[0]).decode(
            FENCED.put(data),
            out,
            layout=place.layout,
            group=0,
            layer=0,
            num_tokens=place.num_tokens,
        )
    except FrameError as error:
        reason = error.reason
    assert room[:_GUARD] == room[-_GUARD:] == b"\xc3" * _GUARD
    assert reason in ("", "length")
    return not reason


@pytest.mark.parametrize("name", CASES)
def test_the_attacks_are_on_coded_layers(name: str) -> None:
    assert GOOD[name][0] and attack(name, GOOD[name]) and len(GOOD[name]) < CASES[name].layer_bytes


def test_each_form_of_a_stream_is_among_them() -> None:
    assert GOOD["lossless"][1] == 3 and GOOD["lossless-bytes"][1] == 2


@pytest.mark.parametrize("name", CASES)
def test_every_other_length_is_refused(name: str) -> None:
    good = GOOD[name]
    for keep in [*range(min(len(good), 600)), *range(600, len(good), 97), len(good) - 1]:
        assert not attack(name, good[:keep])
    assert not attack(name, good + b"\0") and not attack(name, good + good)


@pytest.mark.parametrize(
    "name", ["lossless", "lossless-bytes", "lossless-segments", "cachegen", "cachegen-tail"]
)
def test_every_bit_of_the_tables_may_be_wrong(name: str) -> None:
    """All that comes before the first words: forms, bias, frequencies, numbers of words."""
    good = bytearray(GOOD[name])
    for at in range(300):
        for bit in range(8):
            good[at] ^= 1 << bit
            attack(name, good)
            good[at] ^= 1 << bit


@pytest.mark.parametrize("name", ["lossless-bytes", "lossless-segments"])
def test_numbers_of_words_that_lie_are_refused(name: str) -> None:
    good, at = GOOD[name], 1
    at += 2 + (1 + good[at + 1]) * 3  # the form, the table
    segments = 2 if name == "lossless-segments" else 1
    counts = struct.unpack_from(f"<{segments}I", good, at)
    assert all(64 < count < 40_000 for count in counts)
    for wrong in (
        0,
        1,
        63,
        64,
        65,
        counts[0] - 1,
        counts[0] + 1,
        2**16,
        2**31 - 1,
        2**31,
        2**32 - 1,
    ):
        assert not attack(name, good[:at] + struct.pack("<I", wrong) + good[at + 4 :])
    if segments == 2:
        # moved from one to the other: the sum is right
        for by in (1, -1, 32, counts[0] - 64, 64 - counts[1]):
            assert not attack(
                name,
                good[:at] + struct.pack("<II", counts[0] - by, counts[1] + by) + good[at + 8 :],
            )


def test_a_table_is_in_order_and_without_zeros() -> None:
    good = GOOD["lossless-bytes"]
    (one, a), (other, b) = struct.iter_unpack("<BH", good[3:9])
    assert one < other
    for first, second in (
        ((other, b), (one, a)),
        ((one, a), (one, b)),
        ((one, a + b), (other, 0)),
        ((one, 0), (other, a + b)),
    ):
        assert not attack(
            "lossless-bytes", good[:3] + struct.pack("<BHBH", *first, *second) + good[9:]
        )
    assert not attack("lossless-bytes", good[:3] + struct.pack("<BH", one, a + 1) + good[6:])


EXTREMES = (0, 1, 31, 32, 63, 64, 255, 4095, 4096, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)


def _storm(name: str, dice: random.Random) -> bytes:
    """`GOOD[name]`, or noise, with a few wrongs."""
    data = bytearray(
        GOOD[name]
        if dice.random() < 0.95
        else bytes([dice.randrange(4)]) + dice.randbytes(dice.randrange(len(GOOD[name])))
    )
    for _ in range(dice.randint(1, 4)):
        # Half of them at the beginning, where the tables are.
        at = (
            dice.randrange(min(len(data), 200))
            if dice.random() < 0.5 and data
            else dice.randrange(len(data) + 1)
        )
        match dice.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                data[at : at + 4] = dice.choice(EXTREMES).to_bytes(4, "little")[
                    : len(data[at : at + 4])
                ]
            case 2:
                count = dice.randrange(64)
                data[at : at + count] = dice.randbytes(len(data[at : at + count]))
            case 3:
                del data[at : at + dice.randrange(1, 64)]
            case 4:
                data[at:at] = dice.randbytes(dice.randrange(64))
            case _:
                other = dice.choice(list(GOOD.values()))
                data[at:] = other[at:]
    return bytes(data)


def _run_storm(name: str, count: int) -> None:
    dice = random.Random(10)
    refused = sum(not attack(name, _storm(name, dice)) for _ in range(count))
    assert refused > count // 4


@pytest.mark.parametrize("name", CASES)
def test_a_storm_of_wrongs(name: str) -> None:
    _run_storm(name, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_storm_of_ten_thousand_wrongs(name: str) -> None:
    _run_storm(name, 10_000)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(CASES)), st.data())
def test_whatever_hypothesis_thinks_of(name: str, data: st.DataObject) -> None:
    changed = bytearray(GOOD[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        what = data.draw(st.binary(max_size=12))
        if data.draw(st.booleans()):
            changed[at : at + len(what)] = what
        else:
            changed[at:at] = what
    attack(name, bytes(changed))


@given(st.sampled_from(list(CASES)), st.binary(max_size=300))
def test_garbage(name: str, garbage: bytes) -> None:
    attack(name, garbage)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_layers_may_begin_at_any_address(name: str, shift: int) -> None:
    place, codec = CASES[name], make_codec(name.partition("-")[0])
    plain = _layer(place, outliers=name == "lossless")
    keywords = {"layout": place.layout, "group": 0, "layer": 0, "num_tokens": place.num_tokens}

    def at(data: bytes) -> memoryview:
        return memoryview(bytearray(bytes(shift) + data))[shift:]

    out = at(bytes(codec.max_size(place.layout, 0, place.num_tokens)))
    length = codec.encode(at(plain), out, **keywords)  # type: ignore[arg-type]
    assert out[:length] == GOOD[name]
    into = at(bytes(len(plain)))
    codec.decode(at(GOOD[name]), into, **keywords)  # type: ignore[arg-type]
    straight = bytearray(len(plain))
    codec.decode(memoryview(GOOD[name]), memoryview(straight), **keywords)  # type: ignore[arg-type]
    assert into == straight
