"""A decoding engine without a scheduler, timed by the device."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch

from kvhold.memory.device import DeviceDriver
from kvhold_lab.bench.gpu.target import Target


class Tick(Protocol):
    def wait(self) -> None:
        """The thread sleeps."""

    def seconds_since(self, earlier: Any) -> float:
        """Both ticks are reached."""


class StepDecoder(Protocol):
    @property
    def step_bytes(self) -> int:
        """Weights and KV that a step reads."""

    def current(self) -> AbstractContextManager[Any]:
        """Make the decoder's stream current."""

    def step(self) -> None: ...

    def tick(self) -> Tick: ...


@dataclass(frozen=True)
class StepShape:
    """width:    of a token's state
    tokens:   of each request in the KV cache
    queries:  that share a KV head
    """

    layers: int
    width: int
    requests: int
    tokens: int
    heads: int
    queries: int
    head_dim: int
    dtype: torch.dtype

    @property
    def kv(self) -> tuple[int, int, int, int]:
        return self.requests, self.heads, self.tokens, self.head_dim

    @property
    def layer_bytes(self) -> int:
        elements = 4 * self.width * self.width + 2 * prod(self.kv)
        return elements * int(self.dtype.itemsize)


GPU = StepShape(
    layers=32,
    width=4096,
    requests=32,
    tokens=2048,
    heads=8,
    queries=4,
    head_dim=128,
    dtype=torch.bfloat16,
)
SMALL = StepShape(
    layers=1,
    width=16,
    requests=1,
    tokens=8,
    heads=1,
    queries=4,
    head_dim=8,
    dtype=torch.float32,
)


def decoder_of(target: Target) -> StepDecoder:
    if target.kind == "cuda":
        return GpuDecoder(target.device)
    model = StepModel(SMALL, target.device)
    return HostDecoder(model) if target.driver is None else QueueDecoder(model, target.driver)


class StepModel:
    def __init__(self, shape: StepShape, device: torch.device) -> None:
        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, device=device, dtype=shape.dtype).mul_(0.02)

        width = shape.width
        self.nbytes = shape.layers * shape.layer_bytes
        self._layers = [
            (
                random(width, 2 * width),
                random(2 * width, width),
                random(*shape.kv),
                random(*shape.kv),
            )
            for _ in range(shape.layers)
        ]
        self._state = random(shape.requests, width)
        self._queries = random(shape.requests, shape.heads, shape.queries, shape.head_dim)

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        state, queries = self._state, self._queries
        for up, down, keys, values in self._layers:
            # torch.softmax would start threads
            scores = torch.exp(queries @ keys.transpose(-1, -2))
            queries = scores @ values / scores.sum(dim=-1, keepdim=True)
            state = state @ up @ down
        return state, queries


class GpuDecoder:
    """Takes half of the free memory at most."""

    def __init__(self, device: torch.device) -> None:
        free_bytes = torch.cuda.mem_get_info(device)[0]
        layers = max(1, min(GPU.layers, free_bytes // 2 // GPU.layer_bytes))
        self._model = StepModel(replace(GPU, layers=layers), device)
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with self.current():
            for _ in range(3):
                self._model.decode()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self._graph, stream=self._stream):
            self._model.decode()

    @property
    def step_bytes(self) -> int:
        return self._model.nbytes

    def current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def step(self) -> None:
        with self.current():
            self._graph.replay()

    def tick(self) -> "GpuTick":
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        return GpuTick(event)


@dataclass(frozen=True)
class GpuTick:
    event: Any

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: "GpuTick") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class QueueDecoder:
    def __init__(
        self,
        model: StepModel,
        driver: DeviceDriver,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._driver = driver
        self._clock = clock

    @property
    def step_bytes(self) -> int:
        return self._model.nbytes

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step(self) -> None:
        self._driver.compute(self._decode)

    def tick(self) -> "QueueTick":
        times: list[float] = []
        self._driver.compute(lambda: times.append(self._clock()))
        return QueueTick(times, self._driver.record().wait)

    def _decode(self) -> None:
        self._model.decode()


class HostDecoder:
    def __init__(self, model: StepModel) -> None:
        self._model = model

    @property
    def step_bytes(self) -> int:
        return self._model.nbytes

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step(self) -> None:
        self._model.decode()

    def tick(self) -> "QueueTick":
        return QueueTick([time.perf_counter()], lambda: None)


@dataclass(frozen=True)
class QueueTick:
    """times: empty until the device has reached it"""

    times: list[float]
    wait_for_device: Callable[[], None]

    def wait(self) -> None:
        self.wait_for_device()

    def seconds_since(self, earlier: "QueueTick") -> float:
        return self.times[0] - earlier.times[0]
