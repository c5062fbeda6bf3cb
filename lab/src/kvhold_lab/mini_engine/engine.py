import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhold_lab.mini_engine.config import (
    SHAPES,
    MiniEngineOptions,
    allocate,
    kv_cache_config_of,
    read_weights,
    vllm_config_of,
    write_model,
)
from kvhold_lab.mini_engine.models import Model
from kvhold_lab.mini_engine.runner import Runner

_STILL_S = 60.0  # without progress


@dataclass
class Counts:
    passes: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    failed_loads: int = 0


class MiniEngine:
    def __init__(
        self,
        model: str = "llama",
        *,
        connector: Mapping[str, Any] | None = None,
        device: str = "cpu",
        folder: Path | None = None,
        keep_digests: bool = False,
        **options: Any,
    ) -> None:
        """model: a key of `SHAPES`; options: of `MiniEngineOptions`

        connector:    as `kv_connector_extra_config`
        """
        self.options = replace(MiniEngineOptions(SHAPES[model]), **options)
        self.outputs: dict[str, list[int]] = {}
        self.handed: dict[str, dict[str, Any]] = {}
        self.first_token_s: dict[str, float] = {}
        self.loaded_tokens: dict[str, int] = {}
        self.kv_digests: dict[str, str] = {}
        self.counts = Counts()
        self._keep_digests = keep_digests
        self._arrived_s: dict[str, float] = {}
        self._passes: deque[SchedulerOutput] = deque()
        with ExitStack() as stack:
            if folder is None:
                folder = (
                    Path(
                        stack.enter_context(
                            tempfile.TemporaryDirectory(prefix="kvhold-mini-engine-")
                        )
                    )
                    / model
                )
            if not (folder / "config.json").exists():
                write_model(self.options.shape, folder)
            self.config = vllm_config_of(
                self.options, folder, dict(connector) if connector is not None else None
            )
            self.kv_config = kv_cache_config_of(self.options, self.config)
            self.scheduler = self._make_scheduler(stack)
            self.caches = allocate(self.kv_config, self.config, device)
            self.connector = self._make_worker_connector(stack) if connector is not None else None
            self.runner = self._make_runner(folder, device)
            if self.connector is not None:
                self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                    {(0, 0): self.connector.get_handshake_metadata()}
                )
            self._closing = stack.pop_all()

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        **request: Any,
    ) -> None:
        """request: arguments of vLLM's `Request`, such as `cache_salt`.

        kv_transfer_params: the answer's come into `handed`
        """
        extra = {"kv_transfer_params": dict(kv_transfer_params)} if kv_transfer_params else None
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra
        )
        self._arrived_s[request_id] = time.perf_counter()
        self.outputs[request_id] = []
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=list(token_ids),
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
                **request,
            )
        )

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """Schedule a pass; compute one if the queue is full. Return whether it has tokens."""
        output = self.scheduler.schedule()
        self._passes.append(output)
        computes = bool(output.total_num_scheduled_tokens)
        while len(self._passes) >= self.config.max_concurrent_batches or (
            self._passes and not computes
        ):
            self._execute(self._passes.popleft())
        return computes

    def run(self, *, until: Callable[[], Any] = lambda: False) -> dict[str, list[int]]:
        moved_s = time.monotonic()
        while self.is_busy() and not until():
            if self.step():
                moved_s = time.monotonic()
            else:
                self.idle()
                if time.monotonic() - moved_s > _STILL_S:
                    raise TimeoutError(f"nothing moves: {list(self.scheduler.requests.values())}")
        return self.outputs

    def is_busy(self) -> bool:
        return bool(self._passes) or bool(self.scheduler.has_requests())

    def idle(self) -> None:
        time.sleep(0.001)

    def block_ids(self, request_id: str) -> list[list[int]]:
        return self.runner.block_ids(request_id)

    def block_bytes(self, layer: str, block: int) -> bytes:
        """`[heads, tokens, elements]`."""
        return bytes(self.caches[layer][block].contiguous().view(torch.uint8).cpu().numpy())

    def reset_prefix_cache(self) -> bool:
        """False: blocks are in use."""
        return bool(self.scheduler.reset_prefix_cache())

    def close(self) -> None:
        self._closing.close()

    def _execute(self, output: SchedulerOutput) -> None:
        result = self.runner.execute(output)
        now_s = time.perf_counter()
        connected = result.kv_connector_output
        if connected is not None:
            self.counts.failed_loads += len(connected.failed_recving or ()) + bool(
                connected.invalid_block_ids
            )
        self.counts.passes += bool(output.total_num_scheduled_tokens)
        self.counts.computed_tokens += output.total_num_scheduled_tokens
        self.counts.preemptions += len(output.preempted_req_ids or ())
        for answers in self.scheduler.update_from_output(output, result).values():
            for answer in answers.outputs:
                self._take(answer, now_s)

    def _make_scheduler(self, stack: ExitStack) -> Scheduler:
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(self.kv_config, self.config)
        hash_blocks = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_blocks)
        self._hasher = get_request_block_hasher(hash_tokens, hash_blocks)
        kind = self.config.scheduler_config.get_scheduler_cls()
        scheduler: Scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=self.kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        stack.callback(scheduler.shutdown)
        return scheduler

    def _make_worker_connector(self, stack: ExitStack) -> Any:
        worker = KVConnectorFactory.create_connector(
            config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=self.kv_config
        )
        stack.callback(worker.shutdown)
        return worker

    def _make_runner(self, folder: Path, device: str) -> Runner:
        groups = {
            name: number
            for number, group in enumerate(self.kv_config.kv_cache_groups)
            for name in group.layer_names
        }
        weights = read_weights(folder, device)
        model = Model(
            self.options.shape,
            weights,
            groups=groups,
            max_tokens=self.options.max_tokens,
            device=device,
        )
        return Runner(
            self.config, self.kv_config, model, self.caches, self.connector, device=device
        )

    def _take(self, answer: Any, now_s: float) -> None:
        request_id = answer.request_id
        if answer.new_token_ids and not self.outputs[request_id]:
            self.first_token_s[request_id] = now_s - self._arrived_s[request_id]
        self.outputs[request_id] += answer.new_token_ids
        if answer.kv_transfer_params is not None:
            self.handed[request_id] = answer.kv_transfer_params
        if answer.prefill_stats is not None:
            loaded = answer.prefill_stats.num_external_cached_tokens
            self.loaded_tokens[request_id] = loaded
            self.counts.loaded_tokens += loaded
            self.counts.cached_tokens += answer.prefill_stats.num_local_cached_tokens
        if answer.finish_reason is not None and self._keep_digests:
            self.kv_digests[request_id] = _digest(self.runner.read_kv(request_id))


def _digest(kv: dict[str, torch.Tensor]) -> str:
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(kv.items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
