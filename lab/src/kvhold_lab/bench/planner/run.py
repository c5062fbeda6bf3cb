"""Two real vLLMs have their own node, and Redis behind a throttled link. Both also compute every
request.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold.core.config import ClientConfig
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.engines import OutputsDiffer, alike, flush_engines
from kvhold_lab.bench.planner.sample import CHUNK, MOST_CHUNKS
from kvhold_lab.bench.throttle import Throttle
from kvhold_lab.engines.engine import Engine, binding, kvhold_connector, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.servers.redis import RedisServer

COMPUTE, LOAD, PLAN = "compute", "load", "plan"
_ENGINES = (LOAD, PLAN)
_OUTPUT_TOKENS = 2
_PATIENT_S = 120.0
_UNLIMITED = 1e12
_BLOCK = 32
_RAM_PROMPTS = 1.25
_PIECES = 40


@dataclass(frozen=True)
class PlannerCell:
    num_tokens: int
    computed_s: dict[str, float] = field(default_factory=dict)
    taken_s: dict[str, float] = field(default_factory=dict)
    loaded_tokens: dict[str, int] = field(default_factory=dict)


@dataclass
class _System:
    engine: Engine
    client: NodeClient
    others: list[Prompt]

    def forget(self) -> None:
        flush_engines(self.client, patience_s=_PATIENT_S)
        self.others.reverse()
        with self.client.reserve(
            self.others[0].namespace.layout, self.others[0].chunks()
        ) as reservation:
            reservation.commit()
        flush_engines(self.client, patience_s=_PATIENT_S)


def break_even_bytes_s(
    model: ModelInfo, prompts: Sequence[list[int]], *, num_threads: int
) -> float:
    with alike(), Engine(options_for(model, **_options(num_threads))) as engine:
        seconds = [engine.generate(prompt, max_tokens=1).ttft_s for prompt in prompts]
    return sum(map(len, prompts)) * model.kv_bytes_per_token / sum(seconds)


def cells(
    model: ModelInfo,
    prompts: Sequence[list[int]],
    *,
    bytes_per_s: float,
    num_threads: int,
    plans: Callable[[dict[str, float]], None] = lambda plans: None,
) -> Iterator[PlannerCell]:
    chance = random.Random(len(prompts))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhold-planner-")))
        systems = {
            name: _start_system(
                stack, model, folder / f"{name}.sock", name == PLAN, bytes_per_s, num_threads
            )
            for name in _ENGINES
        }
        for number, prompt in enumerate(prompts):
            cell, answers = PlannerCell(len(prompt)), []
            turns = [(name, way) for name in _ENGINES for way in (COMPUTE, name)]
            for name, way in chance.sample(turns, len(turns)):
                rules = {"load": False, "tags": {"computed": str(number)}} if way == COMPUTE else {}
                one = systems[name].engine.generate(prompt, max_tokens=_OUTPUT_TOKENS, rules=rules)
                answers.append(one.token_ids)
                if way == COMPUTE:
                    cell.computed_s[name] = one.ttft_s
                else:
                    cell.taken_s[name] = one.ttft_s
                    cell.loaded_tokens[name] = one.num_cached_tokens
                systems[name].forget()
            if any(answer != answers[0] for answer in answers):
                raise OutputsDiffer(
                    f"a prompt of {len(prompt)} tokens was answered in several ways: {answers}"
                )
            yield cell
        plans(systems[PLAN].client.status()["counters"])


def _start_system(
    stack: ExitStack,
    model: ModelInfo,
    socket: Path,
    plan: bool,
    bytes_per_s: float,
    num_threads: int,
) -> _System:
    redis = stack.enter_context(RedisServer())
    link = stack.enter_context(
        Throttle(("127.0.0.1", redis.port), bytes_per_s=bytes_per_s, up_bytes_per_s=_UNLIMITED)
    )
    patient = "&".join(
        f"{name}={_PATIENT_S}" for name in ("probe_timeout_s", "get_timeout_s", "put_timeout_s")
    )
    ram_bytes = int(_RAM_PROMPTS * _longest() * model.kv_bytes_per_token)
    transfer = kvhold_connector(
        socket,
        ram_bytes,
        tokens_per_chunk=CHUNK,
        write_behind_bytes=ram_bytes,
        tiers=[f"redis://127.0.0.1:{link.port}/0?{patient}"],
        rules={"plan": plan},
        client={"arrival_timeout_s": _PATIENT_S, "call_timeout_s": 30.0},
    )
    stack.callback(end_node, socket)
    with alike():
        engine = stack.enter_context(
            Engine(options_for(model, kv_transfer_config=transfer, **_options(num_threads)))
        )
    client = stack.enter_context(
        NodeClient(socket, ClientConfig(call_timeout_s=_PATIENT_S), name="kvhold bench planner")
    )
    piece = Group(layers=1, planes=1, heads=1, head_dim=ram_bytes // _PIECES, dtype="int8")
    filling = Namespace("what else there is", Layout((piece,), tokens_per_chunk=1, tail_tokens=0))
    client.register(filling)
    return _System(
        engine,
        client,
        [filling.prompt(list(range(first, first + _PIECES))) for first in (0, _PIECES)],
    )


def _options(num_threads: int) -> dict[str, Any]:
    longest = _longest()
    one_pass = {"max_model_len": longest, "max_num_batched_tokens": longest}
    return one_pass | {"prefix_caching": False, "block_size": _BLOCK} | binding(num_threads)


def _longest() -> int:
    return CHUNK * MOST_CHUNKS + 2 * CHUNK
