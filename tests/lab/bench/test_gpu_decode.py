"""The part `decode` of `kvhold bench gpu`: its windows, in virtual time and on a fake device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from kvhold.memory.copier import HostCopier
from kvhold.memory.device import DeviceCopier, DeviceEvent, Lane, PinnedArenas, Settings
from kvhold.testing.device import FakeDevice, FakeDriver, FakeEvent
from kvhold_lab.bench.gpu.decode import Compared, RepeatedCopies, Verb, compare
from kvhold_lab.bench.gpu.decoder import GPU, SMALL, HostDecoder, QueueDecoder, StepModel
from kvhold_lab.bench.gpu.sample import CopySample
from kvhold_lab.bench.gpu.target import Target

ROUNDS, STEPS = 4, 8


@dataclass
class VirtualTick:
    at_s: float

    def wait(self) -> None:
        """It has passed."""

    def seconds_since(self, earlier: "VirtualTick") -> float:
        return self.at_s - earlier.at_s


class VirtualDecoder:
    """A step takes a second. `more_s` is added after each step."""

    step_bytes = 1

    def __init__(self, more_s: Callable[[int], float]) -> None:
        self.now_s = 0.0
        self.steps = 0
        self._more_s = more_s

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        self.now_s += 1 + self._more_s(self.steps)
        self.steps += 1

    def tick(self) -> VirtualTick:
        return VirtualTick(self.now_s)


@dataclass
class VirtualCopies:
    """Ten bytes a step. left: copies that `end` leaves running"""

    left: int = 0
    in_flight: int = 0
    submitted: int = 0

    def begin(self) -> None:
        self.submitted, self.in_flight = 0, 1

    def step(self) -> None:
        self.submitted += 1

    def ended_bytes(self) -> int:
        return 10 * self.submitted

    def end(self) -> None:
        self.in_flight = self.left


def test_steps_beside_copies_are_compared_with_steps_alone() -> None:
    copies = VirtualCopies()
    decoder = VirtualDecoder(lambda step: 0.5 * (copies.in_flight > 0))
    found = compare(decoder, copies, rounds=ROUNDS, steps=STEPS)
    assert found == Compared(alone_s=1.0, beside_s=1.5, copied_bytes_a_s=10 / 1.5)
    assert decoder.steps == 2 * (1 + ROUNDS) * STEPS


@pytest.mark.parametrize("drift_s", [0.01, -0.005])
def test_a_drift_of_the_device_is_no_slowdown(drift_s: float) -> None:
    decoder = VirtualDecoder(lambda step: drift_s * step)
    found = compare(decoder, VirtualCopies(), rounds=ROUNDS, steps=STEPS)
    assert found.beside_s == pytest.approx(found.alone_s)


def test_a_baseline_beside_running_copies_is_refused() -> None:
    with pytest.raises(RuntimeError, match="copies ran in a window without them"):
        compare(VirtualDecoder(lambda step: 0), VirtualCopies(left=1), rounds=ROUNDS, steps=STEPS)


def test_a_baseline_during_which_copies_begin_is_refused() -> None:
    copies = VirtualCopies()

    def begin(step: int) -> float:
        copies.in_flight = 1
        return 0

    with pytest.raises(RuntimeError, match="copies ran in a window without them"):
        compare(VirtualDecoder(begin), copies, rounds=ROUNDS, steps=STEPS)


@pytest.mark.parametrize("goal", [None, 1.02])
def test_without_a_copied_byte_no_row_is_right(goal: float | None) -> None:
    rows = Compared(alone_s=1.0, beside_s=1.0, copied_bytes_a_s=0.0).rows("loads", goal)
    assert [row.ok for row in rows] == [False, False]


@pytest.mark.parametrize(
    ("beside_s", "goal", "ok"), [(1.02, 1.02, True), (1.03, 1.02, False), (9.0, None, None)]
)
def test_steps_may_be_two_percent_slower(
    beside_s: float, goal: float | None, ok: bool | None
) -> None:
    step, copied = Compared(alone_s=1.0, beside_s=beside_s, copied_bytes_a_s=5e9).rows("x", goal)
    assert (step.value, step.limit, step.ratio, step.ok) == (1e3 * beside_s, 1e3, beside_s, ok)
    assert (copied.value, copied.unit, copied.limit, copied.ok) == (5.0, "GB/s", None, None)


@dataclass
class Log:
    """What a fake device did, in order: a lane, "step" or "tick".

    submitted: steps
    wrong:     kernels of stores that ran before their step's end, or after the next one's begin
    """

    done: list[str] = field(default_factory=list)
    submitted: int = 0
    wrong: int = 0

    def tick(self) -> float:
        self.done.append("tick")
        return float(len(self.done))

    def windows(self) -> list[list[str]]:
        """What was done between the first and the last tick of each window."""
        found: list[list[str]] = []
        ticks, window = 0, list[str]()
        for one in self.done:
            if one == "tick":
                ticks = (ticks + 1) % (1 + STEPS)
                if not ticks:
                    found.append(window)
                    window = []
            elif ticks:
                window.append(one)
        return found


class LoggingDriver(FakeDriver):
    """Its copies are launched, too."""

    def __init__(self, log: Log) -> None:
        super().__init__(FakeDevice(seed=3, has_slow_streams=False))
        self._log = log

    def launch(
        self, lane: Lane, after: Sequence[DeviceEvent], work: Callable[[], None]
    ) -> FakeEvent:
        steps = self._log.submitted

        def logged() -> None:
            self._log.done.append(lane.value)
            self._log.wrong += lane is Lane.GATHER and self._log.done.count("step") != steps
            work()

        return super().launch(lane, after, logged)


class LoggingDecoder(QueueDecoder):
    def __init__(self, log: Log, driver: FakeDriver) -> None:
        super().__init__(StepModel(SMALL, torch.device("cpu")), driver, log.tick)
        self._log = log

    def step(self) -> None:
        self._log.submitted += 1
        self._driver.compute(lambda: self._log.done.append("step"))
        super().step()


def copier_over(driver: FakeDriver, sample: CopySample, settings: Settings) -> DeviceCopier:
    arenas = PinnedArenas(driver)
    arenas.add(sample.buffer, sample.buffer)
    arenas.wait()
    return DeviceCopier(driver, arenas, settings)


@pytest.fixture
def sample() -> CopySample:
    return CopySample(Target("fake"), piece_bytes=1 << 10, total_bytes=32 << 10, layers=2)


PATHS: dict[tuple[Verb, str], tuple[Settings, set[str]]] = {
    ("stores", "by the ring"): (
        Settings(1 << 20, 1 << 20, direct_bytes=1 << 40),
        {"gather", "store"},
    ),
    ("stores", "without a ring"): (Settings(256, 1 << 20), {"store"}),
    ("loads", "by the ring"): (
        Settings(1 << 20, 1 << 20, direct_bytes=1 << 40),
        {"load", "scatter"},
    ),
    ("loads", "directly"): (Settings(1 << 20, 1 << 20, direct_bytes=1), {"load"}),
}


@pytest.mark.parametrize(("verb", "way"), PATHS)
def test_copies_run_beside_the_steps_and_never_beside_the_baseline(
    verb: Verb, way: str, sample: CopySample
) -> None:
    log = Log()
    driver = LoggingDriver(log)
    settings, lanes = PATHS[verb, way]
    copier = copier_over(driver, sample, settings)
    with closing(RepeatedCopies(copier, sample, verb)) as copies:
        log.done.clear()
        found = compare(LoggingDecoder(log, driver), copies, rounds=ROUNDS, steps=STEPS)
    copier.close()
    windows = [set(window) for window in log.windows()]
    assert len(windows) == 2 * (1 + ROUNDS)
    # the two windows of a round take turns in going first
    beside = [window for number, window in enumerate(windows) if number % 4 in (0, 3)]
    without = [window for number, window in enumerate(windows) if number % 4 in (1, 2)]
    assert all(window == {"step"} for window in without)
    assert all(window - {"step"} for window in beside)
    assert set.union(*beside) == {"step"} | lanes
    assert found.copied_bytes_a_s > 0
    assert log.wrong == 0, "a store's kernel runs between its step and the next"


@pytest.mark.parametrize("verb", ["stores", "loads"])
def test_without_streams_copies_end_within_the_window(verb: Verb, sample: CopySample) -> None:
    decoder = HostDecoder(StepModel(SMALL, torch.device("cpu")))
    with closing(RepeatedCopies(HostCopier(), sample, verb)) as copies:
        found = compare(decoder, copies, rounds=ROUNDS, steps=STEPS)
    assert found.copied_bytes_a_s > 0


def test_a_copy_that_has_not_ended_is_not_counted(sample: CopySample) -> None:
    device = FakeDevice(seed=1)
    driver = FakeDriver(device)
    with closing(
        RepeatedCopies(copier_over(driver, sample, Settings(1 << 20, 1 << 20)), sample, "stores")
    ) as copies:
        driver.delay(0)  # its mark is late
        copies.begin()
        assert (copies.ended_bytes(), copies.in_flight) == (0, 1)
        copies.end()


def test_a_load_that_finds_damage_ends_the_part(sample: CopySample) -> None:
    driver = FakeDriver(FakeDevice(seed=1))
    copier = copier_over(driver, sample, Settings(1 << 20, 1 << 20))
    decoder = HostDecoder(StepModel(SMALL, torch.device("cpu")))
    with closing(RepeatedCopies(copier, sample, "loads")) as copies:
        sample.buffer[0] ^= 1
        with pytest.raises(RuntimeError, match="a load found damage"):
            compare(decoder, copies, rounds=ROUNDS, steps=STEPS)
        assert copies.in_flight == 0


def test_a_pause_of_the_host_is_no_time_of_the_device() -> None:
    now_s = 0.0
    decoder = QueueDecoder(
        StepModel(SMALL, torch.device("cpu")), FakeDriver(FakeDevice(seed=1)), lambda: now_s
    )
    began = decoder.tick()
    now_s = 100.0
    ended = decoder.tick()
    ended.wait()
    assert ended.seconds_since(began) == 0


def test_a_step_reads_gibibytes_on_a_gpu() -> None:
    assert GPU.layers * GPU.layer_bytes == 12 << 30
    model = StepModel(SMALL, torch.device("cpu"))
    assert model.nbytes == sum(tensor.nbytes for layer in model._layers for tensor in layer)
