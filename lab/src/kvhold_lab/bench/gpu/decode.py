"""How much copies slow a decoding engine.

Windows with and without copies alternate. A step stores 16 MiB in 5 ms.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Literal, Protocol, TypeAlias

from kvhold.core.holdings import Lease, Reservation
from kvhold.memory.copier import Copier, Mark, Transfer
from kvhold.memory.device import Settings
from kvhold_lab.bench.gpu.decoder import StepDecoder, Tick, decoder_of
from kvhold_lab.bench.gpu.rows import GpuRow
from kvhold_lab.bench.gpu.sample import SIZES, CopySample
from kvhold_lab.bench.gpu.target import Target

PART = "decode"
Verb: TypeAlias = Literal["stores", "loads"]

_PIECES = ("8 KiB", "18 KiB", "64 KiB")
_MOST_SLOWER = 1.02
_MOST_IN_FLIGHT = 4


@dataclass(frozen=True)
class _Sizes:
    """rounds: even, so that a drift counts for both"""

    rounds: int
    steps: int
    store_bytes: int
    load_bytes: int
    layers: int
    store_ring_bytes: int = 256 << 20
    load_ring_bytes: int = 128 << 20

    def settings(self, way: str) -> Settings:
        return Settings(
            store_ring_bytes=256 if way == _NO_RING else self.store_ring_bytes,
            load_ring_bytes=self.load_ring_bytes,
            direct_bytes=1 if way == _DIRECTLY else 1 << 40,
        )


_BY_RING, _DIRECTLY, _NO_RING = "by the ring", "directly", "without a ring"
_GPU = _Sizes(rounds=8, steps=32, store_bytes=16 << 20, load_bytes=64 << 20, layers=32)
_SMALL = _Sizes(
    rounds=6,
    steps=8,
    store_bytes=1 << 20,
    load_bytes=1 << 20,
    layers=2,
    store_ring_bytes=8 << 20,
    load_ring_bytes=4 << 20,
)


def rows(target: Target) -> Iterator[GpuRow]:
    sizes = _SMALL if target.small else _GPU
    decoder = decoder_of(target)
    serves = Settings().direct_bytes
    alone: list[float] = []
    for name in _PIECES:
        large = SIZES[name] >= serves
        for verb, way, has_goal in _paths(target, large=large):
            sample = CopySample(
                target,
                piece_bytes=SIZES[name],
                total_bytes=sizes.store_bytes if verb == "stores" else sizes.load_bytes,
                layers=sizes.layers,
            )
            copier = target.copier(sample.buffer, sample.buffer, sizes.settings(way))
            try:
                with closing(RepeatedCopies(copier, sample, verb)) as copies:
                    found = compare(decoder, copies, rounds=sizes.rounds, steps=sizes.steps)
            finally:
                copier.close()
            alone.append(found.alone_s)
            title = f"{verb}, {name}{', ' if way else ''}{way}"
            yield from found.rows(title, target.goal(_MOST_SLOWER) if has_goal else None)
    read_bytes_a_s = decoder.step_bytes / median(alone)
    yield GpuRow(PART, "read by a step alone", round(read_bytes_a_s / 1e9, 6), "GB/s")


def _paths(target: Target, *, large: bool) -> Iterator[tuple[Verb, str, bool]]:
    if target.driver is None:
        yield from (("stores", "", True), ("loads", "", True))
        return
    yield "stores", _BY_RING, True
    yield "stores", _NO_RING, False
    yield "loads", _BY_RING, not large
    yield "loads", _DIRECTLY, large


class Beside(Protocol):
    def begin(self) -> None: ...

    def step(self) -> None:
        """After a step: keep copies in flight."""

    def ended_bytes(self) -> int: ...

    def end(self) -> None:
        """Raises the copies' errors."""

    @property
    def in_flight(self) -> int:
        """Copies not ended, committed or compared."""


@dataclass(frozen=True)
class Compared:
    alone_s: float
    beside_s: float
    copied_bytes_a_s: float

    def rows(self, title: str, most_slower: float | None) -> Iterator[GpuRow]:
        slower, copied = self.beside_s / self.alone_s, self.copied_bytes_a_s > 0
        ok = None if most_slower is None else slower <= most_slower
        yield GpuRow(
            PART,
            f"a step beside {title}",
            round(1e3 * self.beside_s, 4),
            "ms",
            round(1e3 * self.alone_s, 4),
            round(slower, 3),
            ok if copied else False,
        )
        yield GpuRow(
            PART,
            f"copied by {title}",
            round(self.copied_bytes_a_s / 1e9, 6),
            "GB/s",
            ok=None if copied else False,
        )


def compare(decoder: StepDecoder, copies: Beside, *, rounds: int, steps: int) -> Compared:
    """rounds: even; the first does not count.

    Raises RuntimeError if copies run in a window without them, and the copies' errors.
    """
    assert rounds % 2 == 0, "the order of the two windows alternates"
    alone, beside, copied = list[float](), list[float](), list[float]()
    with decoder.current():
        for number in range(1 + rounds):
            for with_copies in (False, True) if number % 2 else (True, False):
                if with_copies:
                    seconds, nbytes = _beside(decoder, copies, steps)
                    beside.append(seconds / steps)
                    copied.append(nbytes / seconds)
                else:
                    alone.append(_alone(decoder, copies, steps) / steps)
    return Compared(*(median(each[1:]) for each in (alone, beside, copied)))


def _alone(decoder: StepDecoder, copies: Beside, steps: int) -> float:
    running = copies.in_flight
    began, ended = _window(decoder, steps, None)
    if running or copies.in_flight:
        raise RuntimeError("copies ran in a window without them")
    return ended.seconds_since(began)


def _beside(decoder: StepDecoder, copies: Beside, steps: int) -> tuple[float, int]:
    copies.begin()
    try:
        began, ended = _window(decoder, steps, copies)
        nbytes = copies.ended_bytes()
    finally:
        copies.end()
    return ended.seconds_since(began), nbytes


def _window(decoder: StepDecoder, steps: int, copies: Beside | None) -> tuple[Tick, Tick]:
    began = decoder.tick()
    running, ended = deque[Tick](), began
    for _ in range(steps):
        decoder.step()
        ended = decoder.tick()
        running.append(ended)
        if copies is not None:
            copies.step()
        if len(running) > 1:
            running.popleft().wait()
    ended.wait()
    return began, ended


class RepeatedCopies:
    def __init__(self, copier: Copier, sample: CopySample, verb: Verb) -> None:
        self._copier, self._sample, self._verb = copier, sample, verb
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"bench-{verb}")
        self._settler = ThreadPoolExecutor(1) if verb == "stores" else self._worker
        self._running: list[_Running] = []
        with sample.reserve() as reservation:
            copier.gather([sample.store_into(reservation)], after=copier.mark()).wait()
            reservation.commit()

    def begin(self) -> None:
        assert not self._running, "copies of the last window run"
        self.step()
        (first,) = self._running
        first.ended_before = first.submitted.result().done()

    def step(self) -> None:
        if self.in_flight >= _MOST_IN_FLIGHT:
            return
        mark, holding = self._copier.mark(), self._hold()
        submitted = self._worker.submit(self._submit, holding, mark)
        settled = self._settler.submit(_settle, holding, submitted)
        self._running.append(_Running(submitted, settled))
        if self._verb == "stores" or mark is None:
            self._copier.fence([submitted.result()])

    def ended_bytes(self) -> int:
        return self._sample.nbytes * sum(one.has_ended() for one in self._running)

    def end(self) -> None:
        running, self._running = self._running, []
        wait([one.settled for one in running])
        for one in running:
            one.settled.result()

    @property
    def in_flight(self) -> int:
        return sum(not one.settled.done() for one in self._running)

    def close(self) -> None:
        self._worker.shutdown()
        self._settler.shutdown()

    def _hold(self) -> Reservation | Lease:
        return self._sample.reserve() if self._verb == "stores" else self._sample.lease()

    def _submit(self, holding: Reservation | Lease, mark: Mark | None) -> Transfer:
        if isinstance(holding, Reservation):
            return self._copier.gather([self._sample.store_into(holding)], after=mark)
        return self._copier.scatter([self._sample.load_from(holding)], after=mark)


@dataclass
class _Running:
    submitted: Future[Transfer]
    settled: Future[None]
    ended_before: bool = False

    def has_ended(self) -> bool:
        return not self.ended_before and self.submitted.done() and self.submitted.result().done()


def _settle(holding: Reservation | Lease, submitted: Future[Transfer]) -> None:
    with holding:
        if any(submitted.result().wait()):
            raise RuntimeError("a load found damage")
        if isinstance(holding, Reservation):
            holding.commit()
