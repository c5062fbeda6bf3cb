import os
import random
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.node import NodeClient
from kvhold_lab.engines.engine import Engine, options_for
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.servers.redis import RedisServer

_PROMPTS = 40
_AT_ONCE = 4
_OUTPUT_TOKENS = 6
_MOST_GROWTH_BYTES = 200 << 20
_SETTLED_REQUESTS = 3_000
_VOCABULARY = range(10, 250)
_SMALL_REDIS = {"maxmemory": "24mb", "maxmemory-policy": "allkeys-lru"}


@dataclass(frozen=True)
class RedisSoak:
    minutes: float
    requests: int
    wrong: int
    errors: int
    kills: int
    chunks_from_redis: float
    engine_grew_bytes: int
    node_grew_bytes: int
    passed: bool


def run(minutes: float, every_s: float, seed: int) -> RedisSoak:
    model, prompts = make_model("tiny"), _prompts(seed)
    with _engine(model, None, "") as plain:
        expected = plain.generate_many(prompts, max_tokens=_OUTPUT_TOKENS).token_ids
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-soak-") as folder,
        RedisServer(settings=_SMALL_REDIS) as server,
    ):
        socket = Path(folder) / "node.sock"
        try:
            with _engine(model, socket, server.url) as engine:
                return _Soak(engine, socket, server, prompts, expected, random.Random(seed)).run(
                    minutes, every_s
                )
        finally:
            with NodeClient(socket, ClientConfig(), name="soak") as client:
                client.stop_node()


class _Soak:
    def __init__(
        self,
        engine: Engine,
        socket: Path,
        server: RedisServer,
        prompts: list[list[int]],
        expected: list[list[int]],
        chance: random.Random,
    ) -> None:
        self._engine = engine
        self._server = server
        self._prompts = prompts
        self._expected = expected
        self._chance = chance
        self._client = NodeClient(socket, ClientConfig(), name="soak")
        self._over = threading.Event()
        self.requests = self.wrong = self.errors = self.kills = 0

    def run(self, minutes: float, every_s: float) -> RedisSoak:
        killer = threading.Thread(target=self._kill, args=(every_s,))
        begin_s = time.monotonic()
        try:
            killer.start()
            end_s = begin_s + 60 * minutes
            while time.monotonic() < begin_s + 60 * minutes / 5 or (
                self.requests < _SETTLED_REQUESTS and time.monotonic() < end_s
            ):
                self._generate()
            before = self._memory()
            while time.monotonic() < end_s:
                self._generate()
        finally:
            self._over.set()
            killer.join()
        after = self._memory()
        came = self._client.status()["tier_counters"].get(
            "kvhold_tier_items{tier=redis,operation=get,result=hit}", 0
        )
        self._client.close()
        engine_grew, node_grew = after[0] - before[0], after[1] - before[1]
        bounded = (
            max(node_grew, engine_grew if self.requests >= 2 * _SETTLED_REQUESTS else 0)
            < _MOST_GROWTH_BYTES
        )
        passed = not self.wrong and not self.errors and bounded and came > 0 and self.kills > 0
        return RedisSoak(
            minutes,
            self.requests,
            self.wrong,
            self.errors,
            self.kills,
            came,
            engine_grew,
            node_grew,
            passed,
        )

    def _generate(self) -> None:
        chosen = self._chance.sample(range(len(self._prompts)), _AT_ONCE)
        self.requests += len(chosen)
        try:
            answer = self._engine.generate_many(
                [self._prompts[at] for at in chosen], max_tokens=_OUTPUT_TOKENS
            )
            self._engine.reset_prefix_cache()
        except EngineFailed:
            self.errors += 1
            raise
        self.wrong += sum(
            tokens != self._expected[at]
            for tokens, at in zip(answer.token_ids, chosen, strict=True)
        )

    def _kill(self, every_s: float) -> None:
        while not self._over.wait(every_s * 5 / 6):
            self._server.kill()
            self.kills += 1
            self._over.wait(every_s / 6)
            self._server.start()

    def _memory(self) -> tuple[int, int]:
        try:
            node = self._client.status()["resident_bytes"]
        except KVHoldError:
            self.errors += 1
            node = 0
        pages = Path(f"/proc/{self._engine.pid}/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE"), node


def _engine(model: ModelInfo, socket: Path | None, redis_url: str) -> Engine:
    connector = {
        "kv_connector": "KVHoldConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tokens_per_chunk": 64,
            "ram_bytes": "8MiB",
            "tiers": [redis_url],
            "rules": {"plan": False},
            "node": {"socket": str(socket), "idle_exit_s": 300},
            "client": {"reconnect_interval_s": 0.2, "call_timeout_s": 10},
        },
    }
    settings = {
        "max_model_len": 2048,
        "block_size": 32,
        "kv_cache_bytes": 8 * 2048 * model.kv_bytes_per_token,
    }
    return Engine(options_for(model, kv_transfer_config=connector if socket else None, **settings))


def _prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    prompts: list[list[int]] = []
    for at in range(_PROMPTS):
        shared = chance.choice(prompts)[: chance.randrange(64, 600)] if prompts and at % 2 else []
        prompts.append(
            shared + [chance.choice(_VOCABULARY) for _ in range(chance.randrange(100, 1000))]
        )
    return prompts
