"""The engines that are compared, each a real vLLM in a process of its own, all alive at the same
time.

| system | what it is |
|---|---|
| recompute | no connector, no prefix cache: every prompt is computed |
| vllm | no connector, vLLM's own prefix cache in KV memory for two prompts: what kvhold's cost is
measured against |
| vllm, again | the same once more: how much two processes differ that should not |
| offloading | vLLM's OffloadingConnector, with the host-memory spec of
`benchmarks/vllm_host_offload.py` |
| lmcache | LMCache's multi-process server and its connector |
| lmcache in-process | LMCache's connector without a server; it refuses CPUs, and its rows have its
error |
| kvhold | kvhold's connector and a node |
| kvhold, no prefix cache | the same with vLLM's own prefix cache turned off |
| kvhold, left alone; left alone again | kvhold's engine, asked to leave the request alone, at no
reuse: what following one costs |

kvhold and LMCache have an engine for each tier: in "ram" memory holds the largest working set, in
"disk" and "redis" it has room for little more than two prompts, and what a set needs comes from
below. Offloading has as much memory as they have in "ram", always.
"""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhold.lab.bench.compare.lmcache import LMCacheServer, environment, in_process_connector, prove
from kvhold.lab.bench.compare.visits import OWN_PROMPTS, TOKENS_PER_BLOCK
from kvhold.lab.bench.engines import (
    PATIENT,
    ROOM_TOKENS,
    System,
    alike,
    kvhold_connector,
    node_pid,
    offloading_connector,
    python_path,
)
from kvhold.lab.engines.engine import Engine, binding, options_for
from kvhold.lab.engines.models import ModelInfo
from kvhold.lab.engines.process import EngineFailed
from kvhold.lab.engines.prompts import make_prompt
from kvhold.node import NodeClient, end_node
from kvhold.testing.servers.base import NotInstalled
from kvhold.testing.servers.redis import RedisServer

RECOMPUTE = "recompute"
PLAIN = "vllm"
AGAIN = "vllm, again"
OFFLOADING = "offloading"
LMCACHE = "lmcache"
IN_PROCESS = "lmcache in-process"
KVHOLD = "kvhold"
ALONE = "kvhold, no prefix cache"
LEFT_ALONE = "kvhold, left alone"
LEFT_AGAIN = "kvhold, left alone again"
SYSTEMS = (
    RECOMPUTE,
    PLAIN,
    AGAIN,
    OFFLOADING,
    LMCACHE,
    IN_PROCESS,
    KVHOLD,
    ALONE,
    LEFT_ALONE,
    LEFT_AGAIN,
)
OURS = (KVHOLD, ALONE, LEFT_ALONE, LEFT_AGAIN)
WITH_TIERS = (LMCACHE, KVHOLD, ALONE)  # an engine for each tier
TIERS = ("ram", "disk", "redis")
OUTPUT_TOKENS = 4

_SMALL_PROMPTS = 2.5  # that memory above a lower tier has room for: a burst, and some
_SPARE_BLOCKS = 4  # of an engine's own KV memory, so that two prompts run together
_PROOF_SEED = 999_999
_WINDOW_S = 0.02  # in which a system must have done next to nothing to be at rest
_RESTING_SHARE = 0.2  # of one core
_REST_S = 3.0


@dataclass(frozen=True)
class Sizes:
    """Tokens and bytes of all that is started. prompts: that the large memories hold."""

    model: ModelInfo
    num_tokens: int
    prompts: int

    @property
    def longest(self) -> int:
        """Tokens of a request, at most."""
        return self.num_tokens + OUTPUT_TOKENS + ROOM_TOKENS

    @property
    def own_bytes(self) -> int:
        """An engine's own KV memory."""
        blocks = (
            OWN_PROMPTS * math.ceil((self.num_tokens + OUTPUT_TOKENS) / TOKENS_PER_BLOCK)
            + _SPARE_BLOCKS
        )
        return blocks * TOKENS_PER_BLOCK * self.model.kv_bytes_per_token

    @property
    def prompt_bytes(self) -> int:
        """KV of a prompt."""
        return self.num_tokens * self.model.kv_bytes_per_token

    def memory_bytes(self, tier: str) -> int:
        """What a cache has for KV in memory."""
        return int((self.prompts if tier == "ram" else _SMALL_PROMPTS) * self.prompt_bytes)

    @property
    def below_bytes(self) -> int:
        """What a lower tier has room for: more than memory has in "ram"."""
        return 3 * self.prompts * self.prompt_bytes // 2


@dataclass
class Running:
    """All systems that run, by name or `key`. errors: why others do not, or no longer; sockets: of
    kvhold's nodes, by key.
    """

    systems: dict[str, System] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    sockets: dict[str, Path] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)

    def drop(self, name: str, why: str) -> None:
        """It failed: it is asked nothing any more."""
        self.errors[name] = why
        of_kvhold = (LEFT_ALONE, LEFT_AGAIN) if name == key(KVHOLD, "ram") else ()
        for gone in (name, *of_kvhold):
            self.systems.pop(gone, None)

    def hit_tokens(self, name: str) -> dict[str, int]:
        """Tokens that a node has found so far, by where they were: ram, or a tier's name."""
        with NodeClient(self.sockets[name], PATIENT, name="kvhold bench") as client:
            counters = client.status()["counters"]
        begin, end = "kvhold_hit_tokens{source=", "}"
        return {
            label[len(begin) : -len(end)]: int(value)
            for label, value in counters.items()
            if label.startswith(begin)
        }


def key(name: str, tier: str) -> str:
    """What the system's engine for that tier is called among all engines; most have one for all
    tiers.
    """
    return f"{name}, {tier}" if name in WITH_TIERS else name


def num_asked(tiers: Sequence[str]) -> int:
    """How many systems get each prompt, if all run."""
    without = (IN_PROCESS, LEFT_ALONE, LEFT_AGAIN)  # it refuses CPUs; they are asked little
    return sum(len(tiers) if name in WITH_TIERS else 1 for name in SYSTEMS if name not in without)


def is_ours(name: str) -> bool:
    """Whether an engine, by its key, is one with kvhold."""
    return name.startswith(KVHOLD)


def settle(system: System) -> None:
    """Wait until its processes rest, for what it does in the background is not to disturb the next
    one; not for long.
    """
    until = time.monotonic() + _REST_S
    before = system.cpu_s()
    while time.monotonic() < until:
        time.sleep(_WINDOW_S)  # the window in which CPU time is counted
        now = system.cpu_s()
        if now - before < _RESTING_SHARE * _WINDOW_S:
            return
        before = now


@contextmanager
def started(
    sizes: Sizes,
    *,
    tiers: Sequence[str],
    num_threads: int,
    peer: Path | None,
    lmcache: Path | str,
    folder: Path | None,
) -> Iterator[Running]:
    """All systems, ready; they end with the block. One that does not start is among the errors,
    unless it is kvhold: raises EngineFailed.

    peer: the file of the host-memory spec for vLLM's offloading
    lmcache: the interpreter of its environment, or why there is none
    folder: for the disk tiers, on the file system that is measured
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvhold-compare-", dir=folder) as own,
        alike(),
        ExitStack() as stack,
    ):
        start = _Start(sizes, num_threads, Path(own), stack, Running())
        start.engine(RECOMPUTE, prefix_caching=False)
        start.engine(PLAIN)
        start.engine(AGAIN)
        if peer is None:
            start.running.errors[OFFLOADING] = (
                "its host-memory spec is in a checkout's benchmarks folder; name it with --peer"
            )
        else:
            transfer = offloading_connector(peer, sizes.memory_bytes("ram"))
            start.engine(
                OFFLOADING,
                environment={"PYTHONPATH": python_path(peer)},
                kv_transfer_config=transfer,
            )
        for tier in tiers:
            start.kvhold(KVHOLD, tier)
            start.kvhold(ALONE, tier, prefix_caching=False)
            start.lmcache(tier, lmcache)
        start.lmcache_in_process(lmcache)
        if of_kvhold := start.running.systems.get(key(KVHOLD, "ram")):
            rules = {"store": False, "load": False}
            start.running.systems |= {
                name: replace(of_kvhold, rules=rules) for name in (LEFT_ALONE, LEFT_AGAIN)
            }
        yield start.running


@dataclass(frozen=True)
class _Start:
    """Starts one system after the other into `running`; `stack` ends them."""

    sizes: Sizes
    num_threads: int
    folder: Path
    stack: ExitStack
    running: Running

    def engine(
        self,
        name: str,
        *,
        pids: tuple[int, ...] = (),
        log_path: Path | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """One engine. pids: of what else works for it.

        Raises EngineFailed if it is kvhold's or the one that others are compared with.
        """
        model, given = (
            self.sizes.model,
            {"kv_cache_bytes": self.sizes.own_bytes, **binding(self.num_threads), **options},
        )
        engine = Engine(
            options_for(model, max_model_len=self.sizes.longest, **given),
            log_path=log_path,
            environment=environment,
        )
        try:
            self.stack.enter_context(engine)
        except EngineFailed as error:
            if is_ours(name) or name in (RECOMPUTE, PLAIN):
                raise
            self.running.errors[name] = str(error)
        else:
            self.running.systems[name] = System(engine, (engine.pid, *pids))
        return engine

    def kvhold(self, name: str, tier: str, **options: Any) -> None:
        """An engine with a node of its own."""
        named = key(name, tier)
        settings: dict[str, Any] = {}
        if tier != "ram":
            try:
                url = self._below(tier, named)
            except NotInstalled as error:
                self.running.errors[named] = str(error)
                return
            settings = {"tiers": [url], "write_behind_bytes": self.sizes.memory_bytes(tier)}
        number = len(self.running.sockets)
        socket = self.running.sockets[named] = self.folder / f"{number}.sock"
        self.stack.callback(end_node, socket)
        transfer = kvhold_connector(socket, self.sizes.memory_bytes(tier), **settings)
        self.engine(named, kv_transfer_config=transfer, **options)
        system = self.running.systems[named]
        self.running.systems[named] = replace(system, pids=(*system.pids, node_pid(socket)))

    def lmcache(self, tier: str, python: Path | str) -> None:
        """A server and an engine."""
        named = key(LMCACHE, tier)
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

    def lmcache_in_process(self, python: Path | str) -> None:
        """An engine, if it reuses anything."""
        if isinstance(python, str):
            self.running.errors[IN_PROCESS] = python
            return
        log = self.folder / "lmcache.log"
        variables = environment(
            python, self.sizes.memory_bytes("ram"), num_tokens=self.sizes.num_tokens
        )
        engine = self.engine(
            IN_PROCESS,
            log_path=log,
            environment=variables,
            kv_transfer_config=in_process_connector(),
        )
        try:
            if IN_PROCESS in self.running.systems:
                prove(
                    engine,
                    make_prompt(self.sizes.model.path, self.sizes.num_tokens, seed=_PROOF_SEED),
                    log,
                )
        except EngineFailed as error:
            self.running.drop(IN_PROCESS, str(error))
            engine.stop()

    def _below(self, tier: str, named: str) -> str:
        """The URL of a lower tier of its own. Raises NotInstalled."""
        if tier == "disk":
            return f"disk://{self._new_folder(named)}?max_bytes={self.sizes.below_bytes}"
        return self._redis().url

    def _redis(self) -> RedisServer:
        """One for a system alone, that forgets what was not asked for longest.

        Raises NotInstalled.
        """
        forgets = {"maxmemory-policy": "allkeys-lru", "maxmemory-samples": "10"}
        return self.stack.enter_context(
            RedisServer(settings={"maxmemory": str(self.sizes.below_bytes), **forgets})
        )

    def _new_folder(self, named: str) -> Path:
        folder = self.folder / named.replace(", ", "-").replace(" ", "-")
        folder.mkdir()
        self.running.folders.append(folder)
        return folder
