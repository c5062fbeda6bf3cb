"""The connector's calls around a pass, as in each of vLLM's two model runners.

`v1/worker/gpu_model_runner.py` calls `handle_preemptions` before it zeroes and copies blocks, and
ends the connector's step before it samples; `v1/worker/gpu/model_runner.py` does the opposite.
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

Forward = Callable[[], torch.Tensor]
Sample = Callable[[torch.Tensor], list[int]]


class Calls(Protocol):
    @contextmanager
    def turn(self) -> Iterator[None]:
        """Make the connector this process's."""

    def before_blocks(self, output: SchedulerOutput) -> None: ...

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        """Compute and sample within the connector's step."""

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class NoCalls:
    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def before_blocks(self, output: SchedulerOutput) -> None: ...

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], None]:
        return sample(forward()), None

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return EMPTY_MODEL_RUNNER_OUTPUT


class FirstRunnerCalls:
    def __init__(self, config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> None:
        self._config = config
        self._connector = connector
        connector.register_kv_caches(caches)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with _as_transfer_group(self._connector):
            yield

    def before_blocks(self, output: SchedulerOutput) -> None:
        self._connector.handle_preemptions(output.kv_connector_metadata)

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as connected,
        ):
            logits = forward()
        return sample(logits), connected

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)


class SecondRunnerCalls:
    def __init__(self, config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> None:
        self._config = config
        self._connector = connector
        with self.turn():
            self._active = ActiveKVConnector(config, caches)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with _as_transfer_group(self._connector):
            yield

    def before_blocks(self, output: SchedulerOutput) -> None: ...

    def around(
        self, output: SchedulerOutput, forward: Forward, sample: Sample
    ) -> tuple[list[int], KVConnectorOutput | None]:
        with set_forward_context(None, self._config):
            self._active.pre_forward(output)
            logits = forward()
        self._active.finish_forward()
        tokens = sample(logits)
        return tokens, self._active.post_forward(output.finished_req_ids)

    def without_pass(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self._active.no_forward(output)


def calls_of(config: VllmConfig, connector: Any, caches: dict[str, torch.Tensor]) -> Calls:
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
