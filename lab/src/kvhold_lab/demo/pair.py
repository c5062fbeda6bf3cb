"""Time answers of one engine, and of two behind `kvhold proxy`."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold.node import end_node
from kvhold_lab.bench.load.client import Endpoint, LoadClient
from kvhold_lab.bench.load.work import Reply, Request, Turn
from kvhold_lab.engines.engine import kvhold_connector, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.engines.prompts import make_prompt
from kvhold_lab.servers.proxy import ProxyProcess

_OUTPUT_TOKENS = 32
_LONG_OUTPUT_TOKENS = 192
_SHORT_PROMPT_TOKENS = 64
_NODE_OUTLIVES_ENGINES_S = 120.0
_START_S = 600.0
_OTHERS = 1_000
_LOADED = "vllm:external_prefix_cache_hits_total"


@dataclass
class ArrangementTimes:
    """gaps_s:      between tokens, while nothing else runs
    busy_gaps_s: of a long answer, while others' prompts are computed
    """

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    busy_gaps_s: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, float]:
        return {
            "ttft_s": statistics.median(self.ttft_s),
            "itl_s": statistics.median(self.gaps_s),
            "longest_busy_gap_s": max(self.busy_gaps_s),
        }


@dataclass(frozen=True)
class PairResult:
    """handed_tokens: of a prompt, on average"""

    model: ModelInfo
    threads: int
    prompt_tokens: int
    one: ArrangementTimes
    two: ArrangementTimes
    handed_tokens: int
    identical: bool

    def as_json(self) -> dict[str, Any]:
        """Times are medians, but for the longest gap."""
        return {
            "model_params": self.model.num_parameters,
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "one_engine": self.one.as_json(),
            "two_engines": self.two.as_json(),
            "handed_tokens": self.handed_tokens,
            "identical": self.identical,
            "runs": len(self.one.ttft_s),
        }


def run_pair(
    model: ModelInfo, *, num_tokens: int, repeats: int, threads: int, say: Callable[[str], None]
) -> PairResult:
    """threads: of each engine. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="kvhold-demo-") as folder, ExitStack() as stack:
        socket = Path(folder) / "node.sock"
        stack.callback(end_node, socket)
        room = 4 * (repeats + 1) * num_tokens * model.kv_bytes_per_token + (64 << 20)
        length = num_tokens + _LONG_OUTPUT_TOKENS + 256
        options = options_for(
            model,
            max_model_len=length,
            kv_cache_bytes=4 * length * model.kv_bytes_per_token,
            num_threads=threads,
            kv_transfer_config=kvhold_connector(socket, room, idle_exit_s=_NODE_OUTLIVES_ENGINES_S),
        )
        say("starting a prefill and a decode engine, their node, and kvhold proxy ...")
        prefill, decode = (OpenAIServer(options) for _ in range(2))
        for server in (prefill, decode):
            stack.callback(server.stop)
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(one.start, _START_S) for one in (prefill, decode)]:
                started.result()
        proxy = stack.enter_context(
            ProxyProcess(
                [prefill.base_url.removesuffix("/v1")],
                [decode.base_url.removesuffix("/v1")],
                KVHOLD_PROXY_PROTOCOL="nixl",
            )
        )
        return asyncio.run(
            _compare(model, decode, f"{proxy.url}/v1", num_tokens, repeats=repeats, say=say)
        )


async def _compare(
    model: ModelInfo,
    decode: OpenAIServer,
    proxy_url: str,
    num_tokens: int,
    *,
    repeats: int,
    say: Callable[[str], None],
) -> PairResult:
    asked = _Asked(model, num_tokens, repeats)
    async with (
        _client(decode.base_url, "one") as one,
        _client(proxy_url, "two") as two,
        _client(proxy_url, "warm") as warm,
        _client(decode.base_url, "warm, too") as warm_alone,
    ):
        for client in (warm, warm_alone):
            await asked.send(client, 2 * _OTHERS, num_tokens)
        times_one, outputs_one = await asked.answers(one, say, "one engine")
        before = await asyncio.to_thread(decode.metric, _LOADED)
        times_two, outputs_two = await asked.answers(two, say, "two engines")
        loaded = await asyncio.to_thread(decode.metric, _LOADED) - before
        say("timing a long answer while prompts of others are computed ...")
        times_one.busy_gaps_s = await asked.busy_gaps(one)
        times_two.busy_gaps_s = await asked.busy_gaps(two)
    return PairResult(
        model,
        decode.options.num_threads,
        num_tokens,
        times_one,
        times_two,
        int(loaded) // repeats,
        outputs_one == outputs_two,
    )


def _client(base_url: str, salt: str) -> LoadClient:
    return LoadClient(Endpoint(base_url, "demo", extra_body={"cache_salt": salt}))


@dataclass(frozen=True)
class _Asked:
    model: ModelInfo
    num_tokens: int
    repeats: int

    async def send(
        self, client: LoadClient, seed: int, num_tokens: int, *, max_tokens: int = _OUTPUT_TOKENS
    ) -> Reply:
        prompt = make_prompt(self.model.path, num_tokens, seed=seed)
        request = Request("demo", (Turn("user", prompt),), max_tokens, needs_content=True)
        reply = await client.send(request)
        if reply.error or reply.ttft_s is None:
            raise EngineFailed(f"a request failed: {reply.error}: {reply.detail}")
        return reply

    async def answers(
        self, client: LoadClient, say: Callable[[str], None], name: str
    ) -> tuple[ArrangementTimes, list[Any]]:
        times, outputs = ArrangementTimes(), []
        for seed in range(self.repeats):
            reply = await self.send(client, seed, self.num_tokens)
            assert reply.ttft_s is not None
            times.ttft_s.append(reply.ttft_s)
            times.gaps_s += reply.gaps_s
            outputs.append(reply.content)
            say(f"{name}: prompt {seed + 1} of {self.repeats}: {reply.ttft_s:.2f} s")
        return times, outputs

    async def busy_gaps(self, client: LoadClient) -> list[float]:
        answer = asyncio.create_task(
            self.send(client, _OTHERS, _SHORT_PROMPT_TOKENS, max_tokens=_LONG_OUTPUT_TOKENS)
        )
        for number in range(self.repeats):
            if answer.done():
                break
            await self.send(client, _OTHERS + 1 + number, self.num_tokens, max_tokens=1)
        return list((await answer).gaps_s)
