"""A prefill and a decode engine: real vLLMs, started, stopped, paused and killed by their ids.

Of kvhold, the node that the engines start is part of it. Waits are bounded. Not thread-safe.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.status import NodeStatus
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.pd.faults import KVHOLD, NIXL, PdConditions, count_held
from kvhold_lab.bench.pd.requests import MOST_TOKENS, OUTPUT_TOKENS
from kvhold_lab.engines.engine import kvhold_connector, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.servers.base import free_port

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

HANDOVER_S = 5.0
_SHORTEST_S = 0.001
_NIXL_LEASE_S = 2
AT_ONCE = 4  # requests, and sequences in an engine's memory
_ROOM_TOKENS = 128
_HELD_PROMPTS = 32
_TINY_CHUNKS = 4
_TOKENS_PER_CHUNK = 128
START_S = 600.0
_NODE_OUTLIVES_ENGINES_S = 120.0
_PATIENT = ClientConfig(connect_timeout_s=20.0, call_timeout_s=20.0)
_MOMENT_S = 0.02
_BEGINS_WITHIN_S = 10.0
_BACK_WITHIN_S = 60.0
_FREE_WITHIN_S = 30.0
_SLOW_STOP_S, _SLOW_RUN_S = 0.2, 0.05

_LOADED = "vllm:external_prefix_cache_hits_total"
_RUNNING = "vllm:num_requests_running"
_USED_BLOCKS = "vllm:kv_cache_usage_perc"


def why_no_nixl() -> str:
    """Return why vLLM's NixlConnector cannot run; empty: it can."""
    if find_spec("nixl") is None:
        return "the package nixl is not installed here (pip install nixl)"
    return ""


class PdPair:
    def __init__(
        self,
        model: ModelInfo,
        folder: Path,
        system: str,
        conditions: PdConditions,
        *,
        threads: int,
        max_tokens: int = MOST_TOKENS + OUTPUT_TOKENS,
        held_prompts: int = AT_ONCE,
    ) -> None:
        """folder:       keeps logs and the socket, in a folder of this pair
        max_tokens:   of a prompt and its answer
        held_prompts: in an engine's memory
        """
        self.system = system
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._socket = self._folder / "node.sock"
        self._conditions = conditions
        length = max_tokens + _ROOM_TOKENS
        self._sequence_bytes = length * model.kv_bytes_per_token
        self._chunk_bytes = _TOKENS_PER_CHUNK * model.kv_bytes_per_token
        self._options = options_for(
            model,
            max_model_len=length,
            kv_cache_bytes=held_prompts * self._sequence_bytes,
            num_threads=threads,
            kv_transfer_config=self._connector(),
        )
        self._ports: dict[Role, int] = {role: free_port() for role in ROLES}
        self._engines: dict[Role, OpenAIServer] = {}

    def __enter__(self) -> Self:
        try:
            self.start_missing()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start_missing(self) -> None:
        """Start the engines that do not run, on their ports. Raises EngineFailed."""
        missing = [role for role in ROLES if not self.is_running(role)]
        for role in missing:
            self._engines[role] = OpenAIServer(
                self._options,
                log_path=self._folder / f"{role}.log",
                environment=self._environment(),
                port=self._ports[role],
            )
        with ThreadPoolExecutor(len(ROLES)) as starters:
            starts = [starters.submit(self._engines[role].start, START_S) for role in missing]
            for started in starts:
                started.result()

    def stop(self) -> None:
        for engine in self._engines.values():
            engine.stop()
        if self.system == KVHOLD:
            end_node(self._socket)

    def url(self, role: Role) -> str:
        return f"http://127.0.0.1:{self._ports[role]}"

    def is_running(self, role: Role) -> bool:
        return role in self._engines and self._engines[role].is_running

    # faults

    def kill(self, role: Role) -> None:
        self._engines[role].kill()

    @contextmanager
    def paused(self, role: Role) -> Iterator[None]:
        self._engines[role].pause()
        try:
            yield
        finally:
            self._engines[role].resume()

    @contextmanager
    def slowed(self, role: Role) -> Iterator[None]:
        """It runs for a fifth of the time."""
        engine, is_over = self._engines[role], threading.Event()

        def stop_and_go() -> None:
            while not is_over.wait(_SLOW_RUN_S):
                engine.pause()
                is_over.wait(_SLOW_STOP_S)
                engine.resume()

        thread = threading.Thread(target=stop_and_go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def kill_node(self) -> None:
        os.kill(self._status()["pid"], signal.SIGKILL)

    # observation

    def await_prefill(self) -> bool:
        """Wait until the prefill engine computes. False: it does not begin."""
        return wait_until(self._is_prefilling, _BEGINS_WITHIN_S)

    def await_node(self) -> bool:
        return wait_until(lambda: bool(self._status()), _BACK_WITHIN_S)

    def handed_tokens(self) -> int:
        """Tokens that the decode engine has loaded since its start. Raises EngineFailed."""
        return int(self._engines["decode"].metric(_LOADED))

    def held_at_end(self) -> dict[str, int]:
        """Return the holdings: none as soon as there are none, else those after half a minute."""
        held = {"silent node or engine": 1}

        def is_free() -> bool:
            nonlocal held
            held = count_held(self._status()) if self.system == KVHOLD else self._used_engines()
            return not held

        wait_until(is_free, _FREE_WITHIN_S)
        return held

    def _is_prefilling(self) -> bool:
        if self.system == KVHOLD:
            return self._status()["announced_chunks"] > 0
        return self._engines["prefill"].metric(_RUNNING) > 0

    def _used_engines(self) -> dict[str, int]:
        running = [role for role in ROLES if self.is_running(role)]
        used = {role for role in running if self._engines[role].metric(_USED_BLOCKS) > 0}
        return {f"{role} engine with blocks in use": 1 for role in used}

    def _status(self) -> NodeStatus:
        with NodeClient(self._socket, _PATIENT, name="kvhold bench") as client:
            return client.status()

    def _connector(self) -> dict[str, Any]:
        if self.system == NIXL:
            extra = {"kv_lease_duration": _NIXL_LEASE_S} if self._conditions.short_leases else {}
            return {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
        chunks = self._chunk_bytes * _TINY_CHUNKS
        ram_bytes = chunks if self._conditions.tiny_arena else self._usual_bytes
        wait_s = _SHORTEST_S if self._conditions.short_leases else HANDOVER_S
        return kvhold_connector(
            self._socket,
            ram_bytes,
            idle_exit_s=_NODE_OUTLIVES_ENGINES_S,
            client={"handover_timeout_s": wait_s, "handover_grace_s": min(wait_s, 1.0)},
        )

    def _environment(self) -> dict[str, str]:
        if self.system != NIXL:
            return {}
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}

    @property
    def _usual_bytes(self) -> int:
        return _HELD_PROMPTS * self._sequence_bytes


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """Whether it came true. An error of a node, an engine or a proxy counts as false."""
    until = time.monotonic() + within_s
    while True:
        with suppress(KVHoldError, OSError):
            if condition():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_MOMENT_S)


def alone(model: ModelInfo, folder: Path, *, threads: int) -> OpenAIServer:
    """An engine without a connector, not started."""
    length = MOST_TOKENS + OUTPUT_TOKENS + _ROOM_TOKENS
    options = options_for(model, max_model_len=length, num_threads=threads)
    return OpenAIServer(options, log_path=folder / "alone.log")
