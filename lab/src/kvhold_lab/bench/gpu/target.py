import mmap
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from statistics import median
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvhold.memory.copier import Copier, HostCopier
from kvhold.memory.device import (
    DeviceCopier,
    DeviceDriver,
    PinnedArenas,
    Settings,
    new_checkers,
    sum_threads,
)
from kvhold.memory.device.check import takes_sums
from kvhold.testing.device import FakeDevice, FakeDriver

Kind: TypeAlias = Literal["cuda", "cpu", "fake"]

_ROUNDS, _FEW_ROUNDS = 7, 1


class Target:
    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.small = kind != "cuda"
        self.device = torch.device("cuda:0" if kind == "cuda" else "cpu")
        self.driver: DeviceDriver | None = None
        if kind == "cuda":
            from kvhold.memory.device.cuda import CudaDriver

            self.driver = CudaDriver(self.device)
        elif kind == "fake":
            self.driver = FakeDriver(FakeDevice(seed=1))

    @cached_property
    def _sums_on(self) -> str | None:
        if self.kind == "fake":
            return "cpu"
        assert self.driver is not None
        return str(self.device) if takes_sums(self.driver, str(self.device)) else None

    @property
    def name(self) -> str:
        return (
            torch.cuda.get_device_name()
            if self.kind == "cuda"
            else {"cpu": "the CPU", "fake": "a fake device on the CPU"}[self.kind]
        )

    def copier(
        self,
        read_only: npt.NDArray[np.uint8],
        writable: npt.NDArray[np.uint8],
        settings: Settings | None = None,
    ) -> Copier:
        if self.driver is None:
            return HostCopier(threads=2)
        arenas = PinnedArenas(self.driver)
        arenas.add(read_only, writable)
        arenas.wait()
        return DeviceCopier(
            self.driver,
            arenas,
            settings,
            threads=sum_threads(),
            checkers=new_checkers(),
            sums_on=self._sums_on,
        )

    def arena(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Like a node's: uint8 [nbytes], all pages present."""
        buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        buffer[::4096] = 0
        return buffer

    def goal(self, ratio: float) -> float | None:
        return ratio if self.kind == "cuda" else None

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.kind == "cuda")

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def seconds(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Medians, without the first round."""
        rounds = _FEW_ROUNDS if self.small else _ROUNDS
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(1 + rounds):
            for name, call in calls.items():
                self.synchronize()
                began_s = time.perf_counter()
                call()
                self.synchronize()
                taken[name].append(time.perf_counter() - began_s)
        return {name: median(times[1:]) for name, times in taken.items()}
