"""The check at start: it passes where orders are kept, and finds each one that is not."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from kvhold.core.api import Cache
from kvhold.core.errors import LayoutError
from kvhold.core.holdings import ChunkBytes
from kvhold.kernels.reference_sums import EndedSums
from kvhold.memory.copier import Copier, HostCopier, Mark, Piece, Stage
from kvhold.memory.device import DeviceCopier, PinnedArenas, proven_copier_for
from kvhold.memory.device.check import check_copies, sums_agree, takes_sums
from kvhold.memory.device.copier import DeviceTransfer
from kvhold.memory.device.ring import Slice
from kvhold.memory.selftest import check_orders
from kvhold.testing.device import FakeDevice, FakeDriver
from tests.kernels.engines import make
from tests.memory.device_world import (
    LAYERS,
    NoFence,
    NoMark,
    NoWaitAtTheEnd,
    NoWaitOfDirectLoads,
    NoWaitOfGathers,
    NoWaitOfScatters,
    NoWaitOfStores,
)

IDS = np.array([3, 1])


class OfEngine:
    """Blocks of a small engine. A version is a byte."""

    def __init__(self) -> None:
        self.engine = make("NHD", layers=LAYERS)
        self.nbytes = LAYERS * 2 * 2 * self.engine.view.rows_per_block * self.engine.view.row_bytes

    def piece(self, buffer: npt.NDArray[np.uint8]) -> Piece:
        tokens = 2 * self.engine.view.rows_per_block
        return Piece(
            self.engine.view, IDS, buffer, ChunkBytes(np.zeros(1, np.int64), np.array([tokens]))
        )

    def write(self, stage: Stage, version: int) -> None:
        def scatter() -> None:
            HostCopier().scatter([self.piece(self.bytes_of(version))], after=None)

        stage.compute(scatter)

    def read(self, stage: Stage) -> Callable[[], npt.NDArray[np.uint8]]:
        seen = np.zeros(self.nbytes, np.uint8)

        def gather() -> None:
            HostCopier().gather([self.piece(seen)], after=None)

        stage.compute(gather)
        return lambda: seen

    def bytes_of(self, version: int) -> npt.NDArray[np.uint8]:
        return (np.arange(self.nbytes) * 7 + version).astype(np.uint8)


def check(copier: Copier) -> None:
    blocks = OfEngine()
    with copier.scratch(blocks.nbytes) as buffer:
        check_orders(copier, blocks.piece(buffer), blocks)


def over_fake(
    seed: int, make_driver: Callable[[FakeDevice], FakeDriver] = FakeDriver
) -> DeviceCopier:
    driver = make_driver(FakeDevice(seed))
    return DeviceCopier(driver, PinnedArenas(driver))


@pytest.mark.parametrize("seed", range(10))
def test_where_orders_are_kept_it_passes_and_copies_go_as_they_did(seed: int) -> None:
    copier = over_fake(seed)
    check(copier)
    assert not copier._goes_by


def test_without_direct_copies_the_ring_is_checked_alone() -> None:
    check(over_fake(1, lambda device: FakeDriver(device, has_direct_copies=False)))


def test_a_device_that_takes_no_host_memory_passes() -> None:
    """Its stores end in their calls, so one order needs no keeping."""
    copier = over_fake(1, lambda device: FakeDriver(device, refuses_pinning=True))
    check(copier)
    assert copier.stores_block


def test_calls_that_have_ended_when_they_return_have_no_order_to_keep() -> None:
    check(HostCopier())


BROKEN: Sequence[type[FakeDriver]] = (
    NoWaitOfGathers,
    NoWaitOfStores,
    NoWaitOfScatters,
    NoWaitOfDirectLoads,
    NoMark,
    NoFence,
    NoWaitAtTheEnd,
)


@pytest.mark.parametrize("broken", BROKEN)
def test_each_order_that_is_not_kept_is_found(broken: type[FakeDriver]) -> None:
    found = set()
    for seed in range(10):
        try:
            check(over_fake(seed, broken))
        except (
            LayoutError,
            AssertionError,
        ) as error:  # a copy that is not waited for may find that its memory has gone
            found.add(str(error))
    assert found


def test_a_device_that_is_never_late_cannot_be_checked() -> None:
    class Prompt(FakeDriver):
        def delay(self, seconds: float) -> None:
            pass

        def late_mark(self, seconds: float) -> object:  # type: ignore[override]
            return self.record()

        def compute(self, work: Callable[[], None]) -> None:
            work()

    with pytest.raises(
        LayoutError, match="cannot be checked: gather after mark was right without the wait"
    ):
        check(over_fake(1, Prompt))


def test_a_ring_whose_slices_are_taken_too_early_is_not_its_business(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two copies at once are for `tests/memory/test_device.py`."""
    monkeypatch.setattr(Slice, "is_free", lambda _: True)
    check(over_fake(1))


class TestOnBlocksOfItsOwn:
    """Engines that have no blocks at start, such as transformers."""

    @pytest.mark.parametrize("seed", range(3))
    def test_where_copies_are_right_it_passes(self, seed: int) -> None:
        check_copies(over_fake(seed), "cpu")

    @pytest.mark.parametrize("broken", BROKEN)
    def test_each_order_that_is_not_kept_is_found(self, broken: type[FakeDriver]) -> None:
        found = set()
        for seed in range(10):
            try:
                check_copies(over_fake(seed, broken), "cpu")
            except (LayoutError, AssertionError) as error:
                found.add(str(error))
            if found:
                break
        assert found

    def test_bytes_that_differ_are_found(self) -> None:
        class Spoilt(DeviceCopier):
            def gather(
                self, pieces: Sequence[Piece], after: Mark | None, *, layers: range | None = None
            ) -> DeviceTransfer:
                transfer = super().gather(pieces, after, layers=layers)
                transfer.wait()
                pieces[0].buffer[77] ^= 1
                return transfer

        driver = FakeDriver(FakeDevice(1))
        with pytest.raises(LayoutError, match="gathered bytes are not those of the blocks"):
            check_copies(Spoilt(driver, PinnedArenas(driver)), "cpu")

    def test_a_device_is_served_where_the_user_allows_it_and_the_check_passes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[DeviceCopier] = []

        def make(device: str, *, threads: int, cache: Cache) -> DeviceCopier:
            made.append(over_fake(1, NoFence) if device == "wrong:0" else over_fake(1))
            return made[-1]

        def get(device: str, allow_unproven: bool = True, shown: bool = False) -> Copier:
            return proven_copier_for(
                device,
                threads=1,
                cache=cast(Cache, None),
                allow_unproven=allow_unproven,
                shown_on_nvidia=shown,
            )

        assert isinstance(get("cpu", allow_unproven=False), HostCopier)
        monkeypatch.setattr("kvhold.memory.device.copier_for", make)
        monkeypatch.setattr(
            "kvhold.memory.device.check.check_copies",
            lambda copier, device: check_copies(copier, "cpu"),
        )
        with pytest.raises(
            LayoutError,
            match=r"on late:0 copies have not been shown to be exact \(allow_unproven = true",
        ):
            get("late:0", allow_unproven=False, shown=True)
        assert not made
        assert get("cuda:0", allow_unproven=False, shown=True) is made[-1]
        assert get("late:0") is made[-1]
        with pytest.raises(LayoutError, match="out of order"):
            get("wrong:0")


class TestChecksums:
    def test_a_device_whose_checksums_are_the_librarys_takes_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = FakeDriver(FakeDevice(1))
        assert sums_agree(driver, "cpu")

        class Other(EndedSums):
            def read(self) -> npt.NDArray[np.uint64]:
                return self.found ^ np.uint64(1 << 63)

        wrong = Other(np.zeros(7, np.uint64))
        monkeypatch.setattr("kvhold.memory.device.check.begin_sums", lambda *_: wrong)
        assert not sums_agree(driver, "cpu")

    @pytest.mark.parametrize(
        ("agree", "told"),
        [
            (lambda *_: False, "cuda:0 takes wrong checksums; the host takes them"),
            (lambda *_: 1 / 0, "cuda:0 takes no checksums, the host does: division by zero"),
        ],
    )
    def test_otherwise_the_host_does(
        self,
        agree: Callable[..., bool],
        told: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        driver = FakeDriver(FakeDevice(1))
        monkeypatch.setattr("kvhold.memory.device.check.sums_agree", agree)
        assert not takes_sums(driver, "cuda:0")
        assert told in caplog.text
        monkeypatch.setattr("kvhold.memory.device.check.sums_agree", lambda *_: True)
        assert takes_sums(driver, "cuda:0")
        assert not takes_sums(driver, "xpu:0"), "there is no kernel for it"
