"""The connector's calls around a pass, made by vLLM's own code in the order of each of its two
model runners.

    calls = calls_of(config, connector, caches)             # registers the caches
    with calls.turn():
        calls.before_blocks(output)  # then the runner zeroes and copies blocks
        tokens, connected = calls.around(output, forward, sample)

The first runner (`v1/worker/gpu_model_runner.py`) calls `handle_preemptions` before it zeroes and
copies blocks, and ends the connector's step before it samples. The second one
(`v1/worker/gpu/model_runner.py`, vLLM's choice where there is Triton) does both the other way
round.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

Forward = Callable[[], torch.Tensor]  # returns logits
Sample = Callable[[torch.Tensor], list[int]]  # waits for the device


class Calls(Protocol):
    """Of one engine's worker."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Make the connector this process's: engines take turns."""

    def before_blocks(self, output: SchedulerOutput) -> None:
        """Before blocks are zeroed and copied."""

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        """Compute and sample, with the connector's step around it."""

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The connector's step where there is nothing to compute."""


class NoCalls:
    """There is no connector."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Calls`."""
        yield

    def before_blocks(self, output: SchedulerOutput) -> None:
        """See `Calls`."""

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], None]:
        """See `Calls`."""
        return sample(forward()), None

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See `Calls`."""
        return EMPTY_MODEL_RUNNER_OUTPUT


class FirstRunnerCalls:
    """As the first model runner makes them."""

    def __init__(self, config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> None:
        self._config = config
        self._connector = connector
        connector.register_kv_caches(caches)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Calls`."""
        with _as_transfer_group(self._connector):
            yield

    def before_blocks(self, output: SchedulerOutput) -> None:
        """See `Calls`."""
        self._connector.handle_preemptions(output.kv_connector_metadata)

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        """See `Calls`."""
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connected,
        ):
            logits = forward()
        return sample(logits), connected

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See `Calls`."""
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)


class SecondRunnerCalls:
    """As the second model runner makes them."""

    def __init__(self, config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> None:
        self._config = config
        self._connector = connector
        with self.turn():
            self._active = ActiveKVConnector(config, caches)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `Calls`."""
        with _as_transfer_group(self._connector):
            yield

    def before_blocks(self, output: SchedulerOutput) -> None:
        """See `Calls`. This runner does not tell the connector."""

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        """See `Calls`."""
        with set_forward_context(None, self._config):
            self._active.pre_forward(output)
            logits = forward()
        self._active.finish_forward()
        tokens = sample(logits)
        return tokens, self._active.post_forward(output.finished_req_ids)

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See `Calls`."""
        return self._active.no_forward(output)


def calls_of(config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> Calls:
    """The calls of the runner that the configuration names. connector: None: there is none."""
    if connector is None:
        return NoCalls()
    return (SecondRunnerCalls if config.use_v2_model_runner else FirstRunnerCalls)(
        config, connector, caches
    )


@contextmanager
def _as_transfer_group(connector: Any) -> Iterator[None]:
    before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, connector
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = before
