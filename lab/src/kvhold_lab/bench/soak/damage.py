import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvhold.cache.transfer.commands import PendingRead
from kvhold.cache.transfer.framing import Framer
from kvhold.cache.transfer.read_buffer import ReadBuffer
from kvhold.codecs import Raw
from kvhold.core.errors import FrameError
from kvhold.core.keys import HASH_BYTES, NAMESPACE_BYTES, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.metrics import Metrics
from kvhold.core.store_options import DEFAULT_OPTIONS
from kvhold.memory.arena import Arena
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import Entry, RamTier, Wanted
from kvhold.tiers.stack import TierPlace

_LAYOUTS = (
    Layout(
        groups=(Group(layers=4, planes=2, heads=2, head_dim=16, dtype="bfloat16"),),
        tokens_per_chunk=16,
    ),
    Layout(
        groups=(Group(layers=3, planes=1, heads=1, head_dim=72, dtype="float16"),),
        tokens_per_chunk=16,
    ),
    Layout(
        groups=(Group(layers=2, planes=2, heads=1, head_dim=32, dtype="float8_e4m3fn"),),
        tokens_per_chunk=32,
    ),
    Layout(
        groups=(
            Group(
                layers=2,
                planes=2,
                heads=1,
                head_dim=64,
                dtype="int8",
                packing="x",
                block_tokens=8,
                block_bytes=1030,
            ),
        ),
        tokens_per_chunk=16,
        tail_tokens=8,
    ),
)
_FRAMES_EACH = 8


@dataclass(frozen=True)
class Damage:
    """undetected: must be 0"""

    injected: dict[str, int]
    noticed_by: dict[str, int]
    undetected: int
    seconds: float
    passed: bool


@dataclass
class _Frame:
    entry: Entry
    layout: Layout
    whole: bytes
    header_bytes: int


@dataclass
class _Run:
    chance: random.Random
    frames: list[_Frame]
    ram: RamTier
    noticed: Counter[str] = field(default_factory=Counter)
    undetected: int = 0


def run(count: int, seed: int) -> Damage:
    began = time.monotonic()
    injected: Counter[str] = Counter()
    with Arena.create(4 << 20, huge_pages="never") as arena:
        ram = RamTier(arena, make_policy("lru"), Metrics())
        chance = random.Random(seed)
        work = _Run(
            chance,
            [_make(ram, layout, chance) for layout in _LAYOUTS for _ in range(_FRAMES_EACH)],
            ram,
        )
        while injected.total() < count:
            frame, kind = chance.choice(work.frames), chance.choice(list(_KINDS))
            damaged = _KINDS[kind](work, frame)
            if damaged != frame.whole:
                injected[kind] += 1
                _receive(work, frame, damaged)
        for frame in work.frames:
            ram.abandon(frame.entry)
    return Damage(
        dict(injected),
        dict(work.noticed),
        work.undetected,
        round(time.monotonic() - began, 3),
        work.undetected == 0,
    )


def _make(ram: RamTier, layout: Layout, chance: random.Random) -> _Frame:
    key = make_key(chance.randbytes(NAMESPACE_BYTES), chance.randbytes(HASH_BYTES), 0, 0)
    nbytes = layout.chunk_bytes(0, layout.tokens_per_chunk)
    entries = ram.reserve_all(
        [Wanted(key, nbytes)], num_tokens=layout.tokens_per_chunk, first_token=256
    )
    assert entries is not None
    ram.view(entries[0])[:] = chance.randbytes(nbytes)
    written = Framer(Raw()).framed(entries[0], layout, ram.view(entries[0]), DEFAULT_OPTIONS)
    assert written is not None
    header, payload = written.parts
    return _Frame(entries[0], layout, bytes(header) + bytes(payload), len(header))


def _receive(work: _Run, frame: _Frame, damaged: bytes) -> None:
    read_buffer = ReadBuffer.of(
        work.ram, PendingRead(frame.entry, frame.layout, TierPlace(0, len(frame.whole)))
    )
    at = 0
    for part in read_buffer.parts:
        step = damaged[at : at + part.nbytes]
        part[: len(step)] = step
        at += len(step)
    try:
        read_buffer.accept(len(damaged), check=True)
    except FrameError as error:
        work.noticed[error.reason] += 1
    else:
        work.undetected += 1
    work.ram.view(frame.entry)[:] = frame.whole[frame.header_bytes :]


def _flipped(work: _Run, frame: _Frame) -> bytes:
    damaged = bytearray(frame.whole)
    for _ in range(work.chance.choice((1, 1, 1, 2, 3, 8))):
        damaged[work.chance.randrange(len(damaged))] ^= 1 << work.chance.randrange(8)
    return bytes(damaged)


def _cut(work: _Run, frame: _Frame) -> bytes:
    return frame.whole[: work.chance.randrange(len(frame.whole))]


def _other(work: _Run, frame: _Frame) -> bytes:
    return work.chance.choice(
        [other.whole for other in work.frames if len(other.whole) <= len(frame.whole)]
    )


def _mixed(work: _Run, frame: _Frame) -> bytes:
    other = _other(work, frame)
    start = work.chance.randrange(len(other))
    end = work.chance.randrange(start, len(other) + 1)
    return frame.whole[:start] + other[start:end] + frame.whole[end:]


def _exchanged(work: _Run, frame: _Frame) -> bytes:
    layers = frame.layout.groups[0].layers
    size = (len(frame.whole) - frame.header_bytes) // layers
    one, two = sorted(work.chance.sample(range(layers), 2))
    parts = [
        frame.whole[frame.header_bytes + at * size : frame.header_bytes + (at + 1) * size]
        for at in range(layers)
    ]
    parts[one], parts[two] = parts[two], parts[one]
    return frame.whole[: frame.header_bytes] + b"".join(parts)


_KINDS: dict[str, Callable[[Any, Any], bytes]] = {
    "bits flipped": _flipped,
    "cut short": _cut,
    "another frame": _other,
    "a part of another": _mixed,
    "layers exchanged": _exchanged,
}
