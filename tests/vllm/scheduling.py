"""An engine without a model: vLLM's real scheduler and the real connector over a real node, and
passes that only pretend to compute.

    engine = Engine(options, socket)
    engine.add("a", prompt); engine.run()
    engine.stores, engine.loads            # what the scheduler told the workers, in order

What stands in a token's slot instead of KV is a number that depends on every token up to it. Before
a pass reads a slot, that number is
checked: a block stored or loaded wrongly, or used before it arrived, fails the test there and then.

The worker's side is in `tests/vllm/hands.py`.
"""

import json
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhold.core.config import ClientConfig
from kvhold.integrations.vllm.connector import KVHoldConnector
from kvhold.integrations.vllm.steps import Load, Steps, Store
from kvhold.node import NodeClient
from tests.vllm.hands import Hands, RealHands, Worker

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
MAX_LENGTH = 4096
WITHIN_S = 20.0  # until something that must come has come; only a hang takes so long
# of tests that ask the node on a busy machine
UNHURRIED = ClientConfig(connect_timeout_s=WITHIN_S, call_timeout_s=WITHIN_S)
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Options:
    """How an engine is set up.

    `budget`: tokens in one pass; `chunk`: tokens a chunk; `events`: KV events, which nobody
    publishes; `rank`: of the worker; `num_hosts`: one worker on each.
    """

    folder: Path
    block: int = 16
    chunk: int = 64
    num_blocks: int = 400
    budget: int = 400
    max_running: int = 16
    asynchronous: bool = False
    caching: bool = True
    events: bool = False
    role: str = "kv_both"
    rank: int = 0
    num_hosts: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


def make_folder(folder: Path, *, weights: bytes = b"weights", **changes: Any) -> Path:
    """A model folder as vLLM wants one, without anything that could be computed with."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_LLAMA | changes))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def make_config(options: Options, socket: Path) -> VllmConfig:
    """vLLM's own configuration."""
    settings: dict[str, Any] = {
        "tokens_per_chunk": options.chunk,
        "node": {"socket": str(socket), "autostart": False},
    }
    settings["client"] = {"call_timeout_s": WITHIN_S}  # a busy machine is no lost node
    settings |= options.settings
    # passes that only pretend are faster than any load
    settings["rules"] = {"plan": False} | settings.get("rules", {})
    model = ModelConfig(
        model=str(options.folder),
        dtype="float32",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=MAX_LENGTH,
    )
    cache = CacheConfig(
        block_size=options.block, enable_prefix_caching=options.caching, cache_dtype="auto"
    )
    cache.num_gpu_blocks = options.num_blocks
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_running,
            max_num_batched_tokens=options.budget,
            max_model_len=MAX_LENGTH,
            enable_chunked_prefill=True,
            async_scheduling=options.asynchronous,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVHoldConnector",
            kv_connector_module_path="kvhold.integrations.vllm",
            kv_role=options.role,
            kv_connector_extra_config=settings,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if options.events
        else None,
    )
    parallel = config.parallel_config
    parallel.rank, parallel.nnodes = options.rank, options.num_hosts
    parallel.tensor_parallel_size = options.num_hosts
    return config


def make_kv_config(options: Options, **changes: Any) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        **(
            {
                "block_size": options.block,
                "num_kv_heads": 1,
                "head_size": 32,
                "dtype": torch.float32,
            }
            | changes
        )
    )
    return KVCacheConfig(
        num_blocks=options.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
    )


def eventually(what: Callable[[], Any]) -> Any:
    """The first true answer. Fails when there is none in time."""
    until = time.monotonic() + WITHIN_S
    while not (answer := what()):
        assert time.monotonic() < until, f"still {answer!r}"
        time.sleep(0.002)
    return answer


class NodeProcess:
    """A node of the test's own, to be killed or held up."""

    def __init__(self, socket: Path, *, ram: str = "64MiB") -> None:
        self.socket = socket
        self._ram = ram
        self.start_again()

    def start_again(self) -> None:
        """After it was killed."""
        command = [
            sys.executable,
            "-m",
            "kvhold",
            "serve",
            "--socket",
            str(self.socket),
            "--ram-bytes",
            self._ram,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        assert "ready" in self._process.stdout.readline()

    def hold_up(self) -> None:
        """It lives, and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Without a word to its clients. Again is harmless."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def held(self) -> dict[str, Any]:
        """Tickets, leases and reservations that are out."""
        with NodeClient(self.socket, UNHURRIED, name="test-status") as client:
            return dict(client.status()["held"])


class Engine:
    """One scheduler and what it drives."""

    def __init__(self, options: Options, socket: Path, *, real_worker: bool = False) -> None:
        self.options = options
        self.config = make_config(options, socket)
        kv_config = make_kv_config(options)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(options.block, sha256)
        kind = AsyncScheduler if options.asynchronous else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=options.block,
            log_stats=True,
        )
        self.connector: KVHoldConnector = self.scheduler.connector
        spec = kv_config.kv_cache_groups[0].kv_cache_spec
        self.tensors = {
            name: torch.zeros((options.num_blocks, 1, options.block, 64), dtype=torch.float32)
            for name in LAYERS
        }
        assert self.tensors[LAYERS[0]][0].nbytes == spec.page_size_bytes
        rows = self.tensors[LAYERS[0]].numpy().reshape(options.num_blocks, -1).view(np.int64)
        # [block, token]: what stands for a token's KV
        self.slots: npt.NDArray[np.int64] = rows[:, : options.block]
        side = self.connector.scheduler
        self.hands = Hands(side._namespace.layout, self.slots, socket, side._config.client)
        self.worker: Worker = (
            RealHands(self.config, kv_config, self.tensors) if real_worker else self.hands
        )
        self.stores: list[Store] = []
        self.loads: list[Load] = []
        self.preempted: set[str] = set()
        # requests that may read anything, if nobody hears what they answer then
        self.excused: set[str] = set()
        self.outputs: dict[str, list[int]] = {}
        # kv_transfer_params of the answers
        self.handed: dict[str, dict[str, Any]] = {}
        self.tokens_computed: dict[str, int] = {}
        self._passes: deque[SchedulerOutput] = deque()
        self._running: dict[str, Text] = {}
        self._depth = self.config.max_concurrent_batches

    def add(
        self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 2, **changes: Any
    ) -> Request:
        """A request arrives."""
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0} | changes.pop(
            "sampling", {}
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**sampling),
            pooling_params=None,
            block_hasher=self._hasher,
            **changes,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        """The caller has gone away."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> SchedulerOutput:
        """The scheduler's half of a step; the pass waits in a queue."""
        output = self.scheduler.schedule()
        steps = output.kv_connector_metadata
        assert isinstance(steps, Steps)
        self.stores += steps.stores
        self.loads += steps.loads
        self.preempted |= output.preempted_req_ids or set()
        self._passes.append(output)
        return output

    def execute(self) -> None:
        """The oldest pass in the queue, and its results back to the scheduler."""
        output = self._passes.popleft()
        sampled: dict[str, list[int]] = {}
        connected = self.worker.run(output, lambda: sampled.update(self._compute(output)))
        ids = list(sampled)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=connected,
        )
        for answers in self.scheduler.update_from_output(output, result).values():
            for answer in answers.outputs:
                self.outputs.setdefault(answer.request_id, []).extend(answer.new_token_ids)
                if answer.kv_transfer_params is not None:
                    self.handed[answer.request_id] = answer.kv_transfer_params

    def step(self) -> SchedulerOutput:
        """Schedule, and execute as far as the engine would: the queue is as deep as the
        configuration says.
        """
        output = self.schedule()
        while len(self._passes) >= self._depth or (
            self._passes and not output.total_num_scheduled_tokens
        ):
            self.execute()
        return output

    def next_pass(self) -> SchedulerOutput:
        """Steps until one has something to compute."""
        return eventually(
            lambda: output if (output := self.step()).total_num_scheduled_tokens else None
        )

    def run(self, *, until: Callable[[], Any] | None = None) -> None:
        """Steps until all is done, or until something is so."""
        deadline = time.monotonic() + WITHIN_S
        while self._passes or self.scheduler.has_requests():
            if until is not None and until():
                return
            assert time.monotonic() < deadline, (
                f"not done: {list(self.scheduler.requests.values())}"
            )
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.001)  # as the engine does when all wait
        assert until is None or until(), "all is done, and it never came to that"

    def followed(self) -> int:
        """Requests that the connector keeps something about."""
        return len(self.connector.scheduler._request_states)

    def close(self) -> None:
        """Leave the node."""
        self.scheduler.shutdown()
        self.worker.close()
        self.hands.close()

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """A pass: every scheduled token's number into its slot; then read all that attention would
        read. Returns sampled tokens.
        """
        for request_id in output.finished_req_ids:
            self._running.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self._running[new.req_id] = Text(
                list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            running, added = self._running[request_id], cached.new_block_ids[at]
            fresh = list(added[0]) if added is not None else []
            running.blocks = (
                fresh if request_id in cached.resumed_req_ids else running.blocks + fresh
            )
            running.computed = cached.num_computed_tokens[at]
        for request_id, count in output.num_scheduled_tokens.items():
            running = self._running[request_id]
            chain, places = running.chain(), running.places(self.options.block)
            first, last = running.computed, running.computed + count
            assert last <= len(running.tokens), "scheduled beyond its tokens"
            self.slots[places[first:last, 0], places[first:last, 1]] = chain[first:last]
            self.tokens_computed[request_id] = self.tokens_computed.get(request_id, 0) + count
        sampled: dict[str, list[int]] = {}
        for layer in LAYERS:
            self.worker.enter(layer)
        for request_id, count in output.num_scheduled_tokens.items():
            running = self._running[request_id]
            last = running.computed + count
            places = running.places(self.options.block)[:last]
            wrong = np.flatnonzero(self.slots[places[:, 0], places[:, 1]] != running.chain()[:last])
            assert not wrong.size or request_id in self.excused, (
                f"request {request_id} reads another text's KV at token {wrong[0]} of {last}"
            )
            done = last == len(running.tokens)
            sampled[request_id] = [] if not done else [0] if wrong.size else running.sample()
        for layer in LAYERS:
            self.worker.leave(layer)
        return sampled


@dataclass
class Text:
    """A request as the model's runner sees it."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    _chain: list[int] = field(default_factory=list)

    def chain(self) -> npt.NDArray[np.int64]:
        """[tokens]: for each token a number that depends on it and all before it; never 0."""
        for token in self.tokens[len(self._chain) :]:
            before = self._chain[-1] if self._chain else 1
            self._chain.append(
                ((before * 6364136223846793005 + token + 1442695040888963407) & (2**63 - 1)) | 1
            )
        return np.array(self._chain, dtype=np.int64)

    def places(self, block: int) -> npt.NDArray[np.int64]:
        """[tokens, 2]: block and offset of each token that has a place."""
        at = np.arange(min(len(self.tokens), len(self.blocks) * block))
        return np.stack([np.array(self.blocks, dtype=np.int64)[at // block], at % block], axis=1)

    def sample(self) -> list[int]:
        """The next token: the same text always goes on in the same way."""
        token = int(self.chain()[-1] >> 20) % 1000
        self.tokens.append(token)
        return [token]


def damage(engine: Engine, prompt: Sequence[int], *, chunk: int) -> None:
    """Invert one bit of a chunk of this prompt in the node's memory."""
    side = engine.connector.scheduler
    query = side._namespace.prompt(np.array(prompt, dtype=np.int32)).query()
    # here: tests/findings/test_vllm.py runs on a commit that does not have it
    from kvhold.testing.damage import OpenArena

    with engine.hands.client.lookup(query) as hit:
        lease = engine.hands.client.claim(hit.ticket)
        assert lease is not None
        with lease, OpenArena(engine.hands.client.status()["pid"]) as arena:
            arena.flip(int(lease.chunks().offsets[chunk]) + 5)


def make_prompt(seed: object, num_tokens: int) -> list[int]:
    """Random tokens, others for each seed."""
    rng = random.Random(str(seed))
    return [rng.randrange(1000) for _ in range(num_tokens)]


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an engine without any cache says."""
    text = Text(list(prompt))
    return [token for _ in range(num_tokens) for token in text.sample()]
