"""The measured LMCache 0.5.6.

in-process      our connector calls its host copies; it has none for CPUs
engine-driven   server; this process copies through shared memory (default)
lmcache-driven  server; it maps this process's blocks and copies
"""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhold_lab.bench.compare_engines.child import ChildDriver, ChildOptions, Layers

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}

import torch

_PATIENCE_S = 60.0
_POLL_S = 0.001
_LAYOUT = {"kv_layout": "NHD"}
_REDIS_KEYS = 2


def start(options: "ChildOptions", layers: "Layers") -> "ChildDriver":
    tensors = {
        f"layer.{number}": torch.from_numpy(layer.view("int16")).view(torch.bfloat16)
        for number, layer in enumerate(layers)
    }
    if options.mode == "in-process":
        return InProcess(options, tensors)
    return Server(options, tensors)


class _Pool:
    def __init__(self, options: "ChildOptions", tensors: dict[str, Any]) -> None:
        self._options = options
        self._tensors = tensors
        # systems must not find each other's chunks in Redis
        self._model = f"bench-{options.mode.replace(' ', '-')}"
        self._blocks_per_chunk = options.tokens_per_chunk // options.tokens_per_block

    @property
    def layers(self) -> "Layers":
        return [
            tensor.view(torch.int16).numpy().view("uint16") for tensor in self._tensors.values()
        ]


class InProcess(_Pool):
    def __init__(self, options: "ChildOptions", tensors: dict[str, Any]) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata

        super().__init__(options, tensors)
        tiers: dict[str, dict[str, Any]] = {
            "ram": {"local_cpu": True},
            "disk": {
                "local_cpu": False,
                "local_disk": f"{options.folder}/",
                "max_local_disk_size": 64.0,
            },
            "redis": {
                "local_cpu": False,
                "remote_url": f"redis://127.0.0.1:{options.redis_port}",
                "remote_serde": "naive",
            },
        }
        self._where = {
            "ram": "LocalCPUBackend",
            "disk": "LocalDiskBackend",
            "redis": "RemoteBackend",
        }[options.tier]
        size_gb = options.cache_bytes / (1 << 30)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=options.tokens_per_chunk, max_local_cpu_size=size_gb, **tiers[options.tier]
        )
        metadata = LMCacheMetadata(
            model_name=self._model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(options.layers, 2, options.tokens_per_chunk, options.heads, options.head_dim),
            chunk_size=options.tokens_per_chunk,
        )
        connector = _HostCopies(self)
        builder: Any = LMCacheEngineBuilder
        self._engine = builder.get_or_create(
            self._model, config, metadata, connector, lambda *_: None, lambda value, _: value
        )
        self._engine.post_init()
        self._numbers = itertools.count()
        self._stored: list[int] = []
        self._due = 0

    def expect(self, num_tokens: int) -> None:
        self._due = (
            redis_size(self._options) + _REDIS_KEYS * num_tokens // self._options.tokens_per_chunk
        )

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        self._engine.store(tokens, block_ids=block_ids)
        self._stored = tokens

    def settle(self) -> None:
        if self._options.tier == "redis":  # its client may hang if asked while it writes
            wait_until(lambda: redis_size(self._options) >= self._due, "on redis")
        else:
            wait_until(
                lambda: (
                    self._engine.lookup(self._stored, search_range=[self._where])
                    == len(self._stored)
                ),
                f"in {self._where}",
            )

    def lookup(self, tokens: list[int]) -> tuple[int, Callable[[], None]]:
        name = str(next(self._numbers))
        return self._engine.lookup(
            tokens, lookup_id=name, pin=True
        ), lambda: self._engine.lookup_unpin(name)

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> int:
        num_tokens, let_go = self.lookup(tokens)
        if num_tokens:
            num_tokens = int(self._engine.retrieve(tokens, block_ids=block_ids).sum())
        let_go()
        return num_tokens

    def forget(self) -> None:
        if self._options.tier == "ram":
            self._engine.clear()

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        """LMCache's close can hang above Redis."""


class _HostCopies:
    def __init__(self, pool: InProcess) -> None:
        from lmcache.v1.multiprocess.transfer_context import (
            gather_paged_kv_to_cpu,
            scatter_cpu_to_paged_kv,
        )

        self._pool = pool
        self._gather, self._scatter = gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv

    def batched_from_gpu(
        self,
        memory_objs: list[Any],
        starts: list[int],
        ends: list[int],
        *,
        block_ids: list[int],
        **_: Any,
    ) -> None:
        pool = self._pool
        chosen = self._blocks(starts, ends, block_ids)
        out = [memory.tensor for memory in memory_objs]
        self._gather(pool._tensors, chosen, pool._blocks_per_chunk, layout_hints=_LAYOUT, out=out)

    def batched_to_gpu(
        self,
        memory_objs: list[Any],
        starts: list[int],
        ends: list[int],
        *,
        block_ids: list[int],
        **_: Any,
    ) -> None:
        pool = self._pool
        chosen = self._blocks(starts, ends, block_ids)
        chunks = [memory.tensor for memory in memory_objs]
        self._scatter(pool._tensors, chosen, chunks, pool._blocks_per_chunk, layout_hints=_LAYOUT)

    def get_shape(self, num_tokens: int) -> Any:
        options = self._pool._options
        return torch.Size([2, options.layers, num_tokens, options.heads * options.head_dim])

    def _blocks(self, starts: list[int], ends: list[int], block_ids: list[int]) -> list[int]:
        size = self._pool._options.tokens_per_block
        return [
            block
            for first, end in zip(starts, ends, strict=True)
            for block in block_ids[first // size : end // size]
        ]


class Server(_Pool):
    def __init__(self, options: "ChildOptions", tensors: dict[str, Any]) -> None:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        super().__init__(options, tensors)
        port = free_port()
        self._process = subprocess.Popen(
            [str(Path(sys.executable).parent / "lmcache"), *self._arguments(port)]
        )
        self._make_key = IPCCacheServerKey
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{port}")
        wait_until(self._answers, "answering")
        mode = options.mode.replace("-", "_")
        self._transfers = create_transfer_context(
            tensors, instance_id=1, req_client=self._client, mode=mode
        )
        self._transfers.register(
            tensors, self._model, 1, self._blocks_per_chunk, _PATIENCE_S, layout_hints=_LAYOUT
        )
        self._numbers = itertools.count()
        self._stored: list[int] = []
        self._due = 0

    def _arguments(self, port: int) -> list[str]:
        options = self._options
        tiers: dict[str, list[str]] = {
            "ram": [],
            "disk": ["--l2-adapter", f'{{"type": "fs_native", "base_path": "{options.folder}"}}'],
            "redis": [
                "--l2-adapter",
                f'{{"type": "resp", "host": "127.0.0.1", "port": {options.redis_port}}}',
            ],
        }
        memory = ["--l1-size-gb", str(options.cache_bytes / (1 << 30)), "--eviction-policy", "LRU"]
        shared = (
            ["--shm-name", f"kvhold_bench_{os.getpid()}"] if options.mode == "engine-driven" else []
        )
        ports = ["--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_port())]
        mode = [
            "--supported-transfer-mode",
            options.mode.replace("-", "_"),
            "--chunk-size",
            str(options.tokens_per_chunk),
        ]
        return ["server", *ports, *mode, *memory, *shared, *tiers[options.tier]]

    def expect(self, num_tokens: int) -> None:
        self._due = self._written() + num_tokens // self._options.tokens_per_chunk

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        name = str(next(self._numbers))
        event = self._transfers.create_recorded_event()
        future = self._transfers.submit_store(
            name, self._key(name, tokens), self._tensors, [block_ids], event, self._blocks_per_chunk
        )
        if not future.result(timeout=_PATIENCE_S):
            raise RuntimeError("the server did not store")
        self._client.end_session(name)
        self._stored = tokens

    def settle(self) -> None:
        if self._options.tier == "ram":
            wait_until(lambda: self._found(self._stored), "found")
        else:
            wait_until(lambda: self._written() >= self._due, f"on {self._options.tier}")

    def lookup(self, tokens: list[int]) -> tuple[int, Callable[[], None]]:
        name = str(next(self._numbers))
        num_tokens = self._count_stored(name, tokens)

        def let_go() -> None:
            if num_tokens:
                self._client.free_lookup_locks(
                    self._key(name, tokens[:num_tokens], worker=None), 1
                ).result(timeout=_PATIENCE_S)
            self._client.end_session(name).result(timeout=_PATIENCE_S)

        return num_tokens, let_go

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> int:
        name = str(next(self._numbers))
        num_tokens = self._count_stored(name, tokens)
        if num_tokens:
            key = self._key(name, tokens[:num_tokens])
            blocks = [block_ids[: num_tokens // self._options.tokens_per_block]]
            event = self._transfers.create_recorded_event()
            future = self._transfers.submit_retrieve(
                name, key, self._tensors, blocks, event, self._blocks_per_chunk
            )
            num_tokens = num_tokens if future.result(timeout=_PATIENCE_S) else 0
        self._client.end_session(name)
        return num_tokens

    def forget(self) -> None:
        self._client.clear(False).result(timeout=_PATIENCE_S)

    def pids(self) -> list[int]:
        found, rest = [], [self._process.pid]
        while rest:
            pid = rest.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                rest += [int(child) for child in (task / "children").read_text().split()]
        return found

    def close(self) -> None:
        self._transfers.unregister()
        self._transfers.close()
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"lmcache server ended with exit code {self._process.returncode}")
        try:
            return bool(self._client.ping(None).result(timeout=0.2))
        except TimeoutError:
            return False

    def _key(self, name: str, tokens: list[int], worker: int | None = 0) -> Any:
        return self._make_key(
            model_name=self._model,
            world_size=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=name,
            num_kv_readers=1,
        )

    def _count_stored(self, name: str, tokens: list[int]) -> int:
        self._client.lookup(self._key(name, tokens, worker=None), 1).result(timeout=_PATIENCE_S)
        chunks = None
        while chunks is None:
            chunks = self._client.wait_prefetch_status(name, _PATIENCE_S).result(
                timeout=_PATIENCE_S
            )
        return int(chunks) * self._options.tokens_per_chunk

    def _found(self, tokens: list[int]) -> bool:
        num_tokens, let_go = self.lookup(tokens)
        let_go()
        return num_tokens == len(tokens)

    def _written(self) -> int:
        if self._options.tier == "disk":
            return sum(
                1 for entry in os.scandir(self._options.folder) if entry.name.endswith(".data")
            )
        return redis_size(self._options)


def wait_until(done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"not {what} within {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)


def redis_size(options: "ChildOptions") -> int:
    if not options.redis_port:
        return 0
    with socket.create_connection(("127.0.0.1", options.redis_port)) as redis:
        redis.sendall(b"DBSIZE\r\n")
        return int(redis.recv(64)[1:])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
