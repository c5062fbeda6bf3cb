import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.compare import names
from kvhold_lab.bench.compare.lmcache import LMCacheServer, environment
from kvhold_lab.bench.compare.visits import OWN_PROMPTS, TOKENS_PER_BLOCK, ComparePlan
from kvhold_lab.bench.engines import (
    PATIENT,
    ROOM_TOKENS,
    System,
    alike,
    node_pid,
    offloading_connector,
    python_path,
)
from kvhold_lab.engines.engine import Engine, binding, kvhold_connector, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

_SMALL_PROMPTS = 2.5
_SPARE_BLOCKS = 4
_WINDOW_S = 0.02
_RESTING_SHARE = 0.2
_REST_S = 3.0

_NO_PREFIX_CACHE: dict[str, Any] = {"prefix_caching": False}
_KVHOLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    names.KVHOLD: ({}, {}),
    names.ALONE: (_NO_PREFIX_CACHE, {}),
    names.LAYERWISE: (_NO_PREFIX_CACHE, {"layerwise": True}),
    names.BESIDE: (_NO_PREFIX_CACHE, {}),
}


@dataclass(frozen=True)
class Sizes:
    model: ModelInfo
    num_tokens: int
    prompts: int
    output_tokens: int

    @property
    def longest(self) -> int:
        return self.num_tokens + self.output_tokens + ROOM_TOKENS

    @property
    def own_bytes(self) -> int:
        blocks = (
            OWN_PROMPTS * math.ceil((self.num_tokens + self.output_tokens) / TOKENS_PER_BLOCK)
            + _SPARE_BLOCKS
        )
        return blocks * TOKENS_PER_BLOCK * self.model.kv_bytes_per_token

    @property
    def prompt_bytes(self) -> int:
        return self.num_tokens * self.model.kv_bytes_per_token

    def memory_bytes(self, tier: str) -> int:
        return int((self.prompts if tier == "ram" else _SMALL_PROMPTS) * self.prompt_bytes)

    @property
    def below_bytes(self) -> int:
        return 3 * self.prompts * self.prompt_bytes // 2


@dataclass
class RunningSystem:
    systems: dict[str, System] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    sockets: dict[str, Path] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def drop(self, name: str, why: str) -> None:
        self.errors[name] = why
        of_kvhold = names.COPIES if name == names.key(names.KVHOLD, "ram") else ()
        for gone in (name, *of_kvhold):
            self.systems.pop(gone, None)

    def hit_tokens(self, name: str) -> dict[str, int]:
        with NodeClient(self.sockets[name], PATIENT, name="kvhold bench") as client:
            counters = client.status()["counters"]
        begin, end = "kvhold_hit_tokens{source=", "}"
        return {
            label[len(begin) : -len(end)]: int(value)
            for label, value in counters.items()
            if label.startswith(begin)
        }


def settle(system: System) -> None:
    until = time.monotonic() + _REST_S
    before = system.cpu_s()
    while time.monotonic() < until:
        time.sleep(_WINDOW_S)
        now = system.cpu_s()
        if now - before < _RESTING_SHARE * _WINDOW_S:
            return
        before = now


@contextmanager
def started(
    sizes: Sizes,
    plan: ComparePlan,
    *,
    num_threads: int,
    peer: Path | None,
    lmcache: Path | str,
    folder: Path | None,
) -> Iterator[RunningSystem]:
    """peer: file of the host-memory spec
    lmcache: Python of LMCache's environment, or why there is none

    Raises EngineFailed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-compare-", dir=folder) as own,
        alike(),
        ExitStack() as stack,
    ):
        start = _Start(sizes, num_threads, Path(own), stack, RunningSystem(), plan.strict)
        plain = {
            names.RECOMPUTE: _NO_PREFIX_CACHE,
            names.PLAIN: {},
            names.AGAIN: {},
            names.LIMIT: {"kv_cache_bytes": sizes.memory_bytes("ram")},
        }
        for name in plan.systems:
            for tier in plan.tiers if name in names.WITH_TIERS else ("ram",):
                if name in plain:
                    start.engine(name, **plain[name])
                elif name in _KVHOLD:
                    start.kvhold(name, tier)
                elif name == names.OFFLOADING:
                    start.offloading(peer)
                elif name == names.LMCACHE:
                    start.lmcache(tier, lmcache)
        if of_kvhold := start.running.systems.get(names.key(names.KVHOLD, "ram")):
            rules = {"store": False, "load": False}
            copies = {
                names.LEFT_ALONE: replace(of_kvhold, rules=rules),
                names.LEFT_AGAIN: replace(of_kvhold, rules=rules),
            }
            if names.UNCHECKED in plan.systems:
                copies |= {
                    names.key(names.KVHOLD, "ram"): replace(of_kvhold, checks_memory=True),
                    names.CHECKED_AGAIN: replace(of_kvhold, checks_memory=True),
                    names.UNCHECKED: replace(of_kvhold, checks_memory=False),
                }
            start.running.systems |= copies
        yield start.running


@dataclass(frozen=True)
class _Start:
    sizes: Sizes
    num_threads: int
    folder: Path
    stack: ExitStack
    running: RunningSystem
    strict: bool

    def engine(
        self,
        name: str,
        *,
        pids: tuple[int, ...] = (),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        model, given = (
            self.sizes.model,
            {"kv_cache_bytes": self.sizes.own_bytes, **binding(self.num_threads), **options},
        )
        engine = Engine(
            options_for(model, max_model_len=self.sizes.longest, **given),
            environment=environment,
        )
        try:
            self.stack.enter_context(engine)
        except EngineFailed as error:
            if self.strict or names.is_ours(name) or name in (names.RECOMPUTE, names.PLAIN):
                raise
            self.running.errors[name] = str(error)
        else:
            self.running.systems[name] = System(engine, (engine.pid, *pids))

    def offloading(self, peer: Path | None) -> None:
        if peer is None:
            self.running.errors[names.OFFLOADING] = (
                "its host-memory spec is in a checkout's benchmarks folder; name it with --peer"
            )
            return
        self.engine(
            names.OFFLOADING,
            environment={"PYTHONPATH": python_path(peer)},
            kv_transfer_config=offloading_connector(peer, self.sizes.memory_bytes("ram")),
        )

    def kvhold(self, name: str, tier: str) -> None:
        named = names.key(name, tier)
        options, settings = _KVHOLD[name]
        if tier != "ram":
            try:
                url = self._below(tier, named)
            except NotInstalled as error:
                self.running.errors[named] = str(error)
                return
            settings = settings | {
                "tiers": [url],
                "write_behind_bytes": self.sizes.memory_bytes(tier),
            }
        number = len(self.running.sockets)
        socket = self.running.sockets[named] = self.folder / f"{number}.sock"
        self.stack.callback(end_node, socket)
        transfer = kvhold_connector(socket, self.sizes.memory_bytes(tier), **settings)
        self.engine(named, kv_transfer_config=transfer, **options)
        system = self.running.systems[named]
        self.running.systems[named] = replace(system, pids=(*system.pids, node_pid(socket)))

    def lmcache(self, tier: str, python: Path | str) -> None:
        named = names.key(names.LMCACHE, tier)
        if isinstance(python, str):
            self.running.errors[named] = python
            return
        try:
            folder = self._new_folder(named)
            port = self._redis().port if tier == "redis" else 0
            l1_bytes, num_tokens = self.sizes.memory_bytes(tier), self.sizes.num_tokens
            server = LMCacheServer(
                python,
                l1_bytes=l1_bytes,
                tier=tier,
                folder=folder,
                num_tokens=num_tokens,
                redis_port=port,
            )
            self.stack.enter_context(server)
        except (EngineFailed, NotInstalled) as error:
            self.running.errors[named] = str(error)
            return
        variables = environment(
            python, self.sizes.memory_bytes(tier), num_tokens=self.sizes.num_tokens
        )
        self.engine(
            named, pids=(server.pid,), environment=variables, kv_transfer_config=server.connector()
        )

    def _below(self, tier: str, named: str) -> str:
        if tier == "disk":
            return f"disk://{self._new_folder(named)}?max_bytes={self.sizes.below_bytes}"
        return self._redis().url

    def _redis(self) -> RedisServer:
        forgets = {"maxmemory-policy": "allkeys-lru", "maxmemory-samples": "10"}
        return self.stack.enter_context(
            RedisServer(settings={"maxmemory": str(self.sizes.below_bytes), **forgets})
        )

    def _new_folder(self, named: str) -> Path:
        folder = self.folder / named.replace(", ", "-").replace(" ", "-")
        folder.mkdir()
        self.running.folders.append(folder)
        return folder
