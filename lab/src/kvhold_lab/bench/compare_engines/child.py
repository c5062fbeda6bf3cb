"""One cache, in a process that acts as the engine. Only the standard library and numpy.

python -m kvhold_lab.bench.compare_engines.child kvhold_lab.bench.compare_engines.kvhold_child
.../lmcache/bin/python child.py lmcache_child torch    # in LMCache's environment

{"op": "start", ...}  -> {"seconds": ...}
{"op": "store", "tokens": [...], "seed": 1}  -> {"seconds", "written_s", "checksum"}
{"op": "retrieve" or "lookup", "tokens": [...]}  -> {"seconds", "num_tokens", "checksum"}
{"op": "forget", "stop" or "memory"}
"""

import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

POOL_NAME = "engine-kv"
_OF_KV = (
    POOL_NAME,
    "lmcache_kv_",
    "lmcache_l1_pool_",
    "memfd:kvhold",
)

Layers = Sequence[npt.NDArray[np.uint16]]


@dataclass(frozen=True)
class ChildOptions:
    """Stores read one part of the engine's pool, retrieves write another.

    num_tokens: of the longest prompt
    folder:     empty
    redis_port: 0: no Redis
    """

    mode: str
    tier: str
    num_tokens: int
    tokens_per_chunk: int
    tokens_per_block: int
    layers: int
    heads: int
    head_dim: int
    cache_bytes: int
    folder: str
    redis_port: int = 0
    page_cache: bool = False

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // self.tokens_per_block

    @property
    def prompt_bytes(self) -> int:
        return self.num_tokens * self.layers * 2 * self.heads * self.head_dim * 2

    @property
    def chunk_bytes(self) -> int:
        return self.prompt_bytes // self.num_tokens * self.tokens_per_chunk


class ChildDriver(Protocol):
    @property
    def layers(self) -> Layers:
        """[2, num_blocks, tokens_per_block, heads, head_dim] a layer."""

    def expect(self, num_tokens: int) -> None:
        """The next store, for `settle`."""

    def store(self, tokens: list[int], block_ids: list[int]) -> None:
        """Return when the engine may reuse its blocks."""

    def settle(self) -> None:
        """Wait until the last store is in `tier`."""

    def lookup(self, tokens: list[int]) -> tuple[int, Callable[[], None]]:
        """Return the tokens found, and a function that releases them."""

    def retrieve(self, tokens: list[int], block_ids: list[int]) -> int:
        pass

    def forget(self) -> None:
        """Clear memory, but no lower tier."""

    def pids(self) -> list[int]:
        pass

    def close(self) -> None:
        pass


class ComparedEngine:
    def __init__(self, driver_name: str, options: ChildOptions) -> None:
        self._options = options
        self._layers = _pool(options)
        self._before = own_bytes(os.getpid(), options.cache_bytes)
        began = time.perf_counter()
        self._driver: ChildDriver = importlib.import_module(driver_name).start(
            options, self._layers
        )
        self.started_s = time.perf_counter() - began
        del self._layers
        ids = 1 + np.random.default_rng(0).permutation(2 * options.num_blocks)
        self._from, self._to = np.split(ids, 2)

    def do(self, asked: dict[str, Any]) -> dict[str, Any]:
        match asked:
            case {"op": "store", "tokens": tokens, "seed": seed}:
                return self._store(tokens, seed)
            case {"op": "retrieve", "tokens": tokens}:
                return self._retrieve(tokens)
            case {"op": "lookup", "tokens": tokens}:
                began = time.perf_counter()
                num_tokens, let_go = self._driver.lookup(tokens)
                seconds = time.perf_counter() - began
                let_go()
                return {"seconds": seconds, "num_tokens": num_tokens}
            case {"op": "forget"}:
                self._driver.forget()
                if self._options.tier == "disk" and not self._options.page_cache:
                    drop_pages(Path(self._options.folder))
            case {"op": "memory"}:
                pids = [os.getpid(), *self._driver.pids()]
                return {
                    "nbytes": sum(own_bytes(pid, self._options.cache_bytes) for pid in pids)
                    - self._before
                }
            case {"op": "stop"}:
                self._driver.close()
            case _:
                raise ValueError(f"no such operation: {asked.get('op')!r}")
        return {}

    def _store(self, tokens: list[int], seed: int) -> dict[str, Any]:
        block_ids = self._blocks(self._from, tokens)
        fill(self._driver.layers, block_ids, seed)
        self._driver.expect(len(tokens))
        given = block_ids.tolist()
        began = time.perf_counter()
        self._driver.store(tokens, given)
        seconds = time.perf_counter() - began
        self._driver.settle()
        written_s = time.perf_counter() - began
        return {
            "seconds": seconds,
            "written_s": written_s,
            "checksum": checksum(self._driver.layers, block_ids),
        }

    def _retrieve(self, tokens: list[int]) -> dict[str, Any]:
        block_ids = self._blocks(self._to, tokens)
        for layer in self._driver.layers:
            layer[:, block_ids] = 0
        given = block_ids.tolist()
        began = time.perf_counter()
        num_tokens = self._driver.retrieve(tokens, given)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "num_tokens": num_tokens,
            "checksum": checksum(self._driver.layers, block_ids),
        }

    def _blocks(self, region: npt.NDArray[np.int64], tokens: list[int]) -> npt.NDArray[np.int64]:
        if len(tokens) % self._options.tokens_per_block or len(tokens) > self._options.num_tokens:
            raise ValueError(
                f"{len(tokens)} tokens: whole blocks of {self._options.tokens_per_block}, "
                f"{self._options.num_tokens} at most"
            )
        return region[: len(tokens) // self._options.tokens_per_block]


def fill(layers: Layers, block_ids: npt.NDArray[np.int64], seed: int) -> None:
    chance = np.random.default_rng(seed)
    for layer in layers:
        shape = (2, len(block_ids), *layer.shape[2:])
        layer[:, block_ids] = np.frombuffer(
            chance.bytes(2 * int(np.prod(shape))), np.uint16
        ).reshape(shape)


def checksum(layers: Layers, block_ids: npt.NDArray[np.int64]) -> str:
    state = blake2b(digest_size=16)
    for layer in layers:
        state.update(np.ascontiguousarray(layer[:, block_ids]).data)
    return state.hexdigest()


def drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if not path.is_file():
                continue
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def own_bytes(pid: int, cache_bytes: int) -> int:
    return sum(
        nbytes
        for name, size, nbytes in _mappings(pid)
        if (name or size < cache_bytes) and not any(kv in name for kv in _OF_KV)
    )


def _mappings(pid: int) -> Iterator[tuple[str, int, int]]:
    name, size = "", 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Size:":
            size = int(words[1]) << 10
        elif words[0] == "Pss:":
            yield name, size, int(words[1]) << 10
        elif not words[0].endswith(":"):
            name = " ".join(words[5:])


def _pool(options: ChildOptions) -> Layers:
    shape = (
        2,
        1 + 2 * options.num_blocks,
        options.tokens_per_block,
        options.heads,
        options.head_dim,
    )
    elements = int(np.prod(shape))
    descriptor = os.memfd_create(POOL_NAME)
    os.ftruncate(descriptor, options.layers * elements * 2)
    pool = np.frombuffer(mmap.mmap(descriptor, 0), np.uint16)
    os.close(descriptor)
    pool[:] = 1
    return [part.reshape(shape) for part in np.split(pool, options.layers)]


def main(driver_name: str, *of_the_engine: str) -> int:
    asked, answers = _take_pipes()
    faulthandler.register(signal.SIGUSR1)
    for name in of_the_engine:
        importlib.import_module(name)
    engine: ComparedEngine | None = None
    for line in asked:
        answer: dict[str, Any] = {}
        operation = json.loads(line)
        try:
            if operation["op"] == "start":
                del operation["op"]
                engine = ComparedEngine(driver_name, ChildOptions(**operation))
                answer = {"seconds": engine.started_s}
            elif engine is None and operation["op"] != "stop":
                raise ValueError("the first operation must be start")
            elif engine is not None:
                answer = engine.do(operation)
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if operation.get("op") == "stop":
            return 0
    if engine is not None:
        engine.do({"op": "stop"})
    return 0


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return asked, answers


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
