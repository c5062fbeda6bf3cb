"""Prefill and decode engines: real vLLMs, with nodes of kvhold. One thread."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.core.status import NodeStatus
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.pd.faults import (
    KVHOLD,
    NIXL,
    ONE_EACH,
    PdConditions,
    PdShape,
    count_held,
)
from kvhold_lab.bench.pd.requests import MOST_TOKENS, OUTPUT_TOKENS
from kvhold_lab.bench.second_host import SecondHost
from kvhold_lab.engines.engine import kvhold_connector, options_for
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.servers.base import free_port

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

HANDOVER_S = 5.0
_SHORTEST_S = 0.001
NIXL_LEASE_S = 2
AT_ONCE = 4  # requests, and sequences in an engine
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
_LOOPBACK = "127.0.0.1"


def why_no_nixl() -> str:
    """Empty: it can run."""
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
        shape: PdShape = ONE_EACH,
        second_host: SecondHost | None = None,
        tokens_per_block: int | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        """max_tokens:   of a prompt and its answer
        shape:        numbers of engines; the first is "the prefill engine"
        chunk_tokens: of kvhold; 0: the default
        """
        self.system = system
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._conditions = conditions
        self._chunk_tokens = chunk_tokens
        self._second_host = second_host if conditions.two_nodes else None
        sockets = ("prefill", "decode") if conditions.two_nodes else ("node", "node")
        self._sockets = {
            role: self._folder / f"{name}.sock" for role, name in zip(ROLES, sockets, strict=True)
        }
        self._peer_ports = {role: free_port() for role in ROLES}
        length = max_tokens + _ROOM_TOKENS
        self._sequence_bytes = length * model.kv_bytes_per_token
        self._chunk_bytes = _TOKENS_PER_CHUNK * model.kv_bytes_per_token
        self._options = {
            role: options_for(
                model,
                max_model_len=length,
                kv_cache_bytes=held_prompts * self._sequence_bytes,
                num_threads=threads,
                block_size=tokens_per_block,
                kv_transfer_config=self._connector(role),
            )
            for role in ROLES
        }
        numbers = {"prefill": shape.prefill, "decode": shape.decode}
        self._ports = {role: [free_port() for _ in range(numbers[role])] for role in ROLES}
        self._engines: dict[Role, dict[int, OpenAIServer]] = {role: {} for role in ROLES}

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
        """Raises EngineFailed."""
        missing: list[OpenAIServer] = []
        for role in ROLES:
            for number, port in enumerate(self._ports[role], 1):
                engine = self._engines[role].get(number)
                if engine is not None and engine.is_running:
                    continue
                host = self._second_host if role == "prefill" else None
                engine = self._engines[role][number] = OpenAIServer(
                    self._options[role],
                    log_path=self._folder / f"{role}{number}.log",
                    environment=self._environment(),
                    port=port,
                    host=self._address(role),
                    under=host.enter if host is not None else (),
                )
                missing.append(engine)
        with ThreadPoolExecutor(max(1, len(missing))) as starters:
            for started in [starters.submit(engine.start, START_S) for engine in missing]:
                started.result()

    def stop(self) -> None:
        for engine in self._all():
            engine.stop()
        if self.system == KVHOLD:
            for socket in set(self._sockets.values()):
                end_node(socket)

    @property
    def sockets(self) -> list[Path]:
        return sorted(set(self._sockets.values()))

    def servers(self, role: Role) -> list[OpenAIServer]:
        return list(self._engines[role].values())

    def urls(self, role: Role) -> list[str]:
        return [f"http://{self._address(role)}:{port}" for port in self._ports[role]]

    def url(self, role: Role) -> str:
        return self.urls(role)[0]

    def are_running(self, role: Role) -> bool:
        engines = self._engines[role]
        return len(engines) == len(self._ports[role]) and all(
            engine.is_running for engine in engines.values()
        )

    def kill(self, role: Role) -> None:
        self._engines[role][1].kill()

    @contextmanager
    def paused(self, role: Role) -> Iterator[None]:
        with ExitStack() as paused:
            for engine in self._engines[role].values():
                paused.callback(engine.resume)
                engine.pause()
            yield

    @contextmanager
    def slowed(self, role: Role) -> Iterator[None]:
        """All engines run for a fifth of the time."""
        is_over = threading.Event()

        def stop_and_go() -> None:
            while not is_over.wait(_SLOW_RUN_S):
                with self.paused(role):
                    is_over.wait(_SLOW_STOP_S)

        thread = threading.Thread(target=stop_and_go, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def kill_node(self) -> None:
        os.kill(self._status("prefill")["pid"], signal.SIGKILL)

    def await_prefill(self) -> bool:
        return wait_until(self._is_prefilling, _BEGINS_WITHIN_S)

    def await_node(self) -> bool:
        return wait_until(lambda: bool(self._status("prefill")), _BACK_WITHIN_S)

    def handed_tokens(self) -> int:
        """Since the decode engines' start. Raises EngineFailed."""
        return sum(int(engine.metric(_LOADED)) for engine in self._engines["decode"].values())

    def held_at_end(self) -> dict[str, int]:
        """None at once, else the holdings after half a minute."""
        held = {"silent node or engine": 1}

        def is_free() -> bool:
            nonlocal held
            held = (self._held_by_nodes() if self.system == KVHOLD else {}) | self._used_engines()
            return not held

        wait_until(is_free, _FREE_WITHIN_S)
        return held

    def _is_prefilling(self) -> bool:
        if self.system == KVHOLD:
            return self._status("prefill")["announced_chunks"] > 0
        return any(engine.metric(_RUNNING) > 0 for engine in self._engines["prefill"].values())

    def _held_by_nodes(self) -> dict[str, int]:
        roles = ROLES if self._conditions.two_nodes else ROLES[:1]
        return count_held(self._status(role) for role in roles)

    def _used_engines(self) -> dict[str, int]:
        used = [engine for engine in self._all() if engine.is_running]
        num_used = sum(engine.metric(_USED_BLOCKS) > 0 for engine in used)
        return {"engines with blocks in use": num_used} if num_used else {}

    def _all(self) -> list[OpenAIServer]:
        return [engine for engines in self._engines.values() for engine in engines.values()]

    def _status(self, role: Role) -> NodeStatus:
        with NodeClient(self._sockets[role], _PATIENT, name="kvhold bench") as client:
            return client.status()

    def _address(self, role: Role) -> str:
        if self._second_host is None:
            return _LOOPBACK
        return self._second_host.address if role == "prefill" else _LOOPBACK

    def _connector(self, role: Role) -> dict[str, Any]:
        if self.system == NIXL:
            extra = {"kv_lease_duration": NIXL_LEASE_S} if self._conditions.short_leases else {}
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
            self._sockets[role],
            ram_bytes,
            idle_exit_s=_NODE_OUTLIVES_ENGINES_S,
            client={"handover_timeout_s": wait_s, "handover_grace_s": min(wait_s, 1.0)},
            **({"tokens_per_chunk": self._chunk_tokens} if self._chunk_tokens else {}),
            **(self._peers(role) if self._conditions.two_nodes else {}),
        )

    def _peers(self, role: Role) -> dict[str, Any]:
        host = self._second_host
        there, here = (host.address, host.here) if host is not None else (_LOOPBACK, _LOOPBACK)
        addresses = {
            "prefill": f"{there}:{self._peer_ports['prefill']}",
            "decode": f"{here}:{self._peer_ports['decode']}",
        }
        serving: dict[str, Any] = {"listen": addresses[role]}
        login = ""
        if host is not None:
            token = self._folder / "token"
            token.touch(mode=0o600)
            token.write_text("kvhold bench pd\n")
            serving |= {"token_file": str(token), "insecure": True}
            login = f"?token_file={token}&insecure=true"
        return {"tiers": [f"peers://{','.join(addresses.values())}{login}"], "peers": serving}

    def _environment(self) -> dict[str, str]:
        if self.system != NIXL:
            return {}
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}

    @property
    def _usual_bytes(self) -> int:
        return _HELD_PROMPTS * self._sequence_bytes


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    """An error of a node, an engine or a proxy counts as false."""
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
