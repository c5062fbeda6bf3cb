"""The real connector with a witness beside it, for tests: loaded by an engine through
`kv_connector_module_path`.

TEST_LEDGER names a folder. After each store the witness reads the engine's blocks by itself (torch
indexing, none of kvhold's copying) and writes their digests under the chunk's hash; after each load
it reads the blocks again and compares. What differs goes to `mismatches`, what was compared is
counted in `compared`.

TEST_PAUSE is "store" or "load": the first such copy stops in its middle (a store between its copy
and its commit, a load between its claim and its copy), says so by making the file `paused`, and
goes on when there is a file `resume`.
"""

import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvhold.core.holdings import ABSENT, Lease, Reservation
from kvhold.core.keys import HASH_BYTES
from kvhold.integrations.vllm import connector as real
from kvhold.integrations.vllm.scheduler import SchedulerSide
from kvhold.integrations.vllm.steps import Load, Store
from kvhold.integrations.vllm.storing import Reading, Reserving
from kvhold.integrations.vllm.worker import WorkerSide
from kvhold.memory.copier import Mark, wait_for

_chunk_hashes: dict[
    str, list[bytes]
] = {}  # request -> hashes of all its chunks; both sides are in one process here


class Witness(WorkerSide):
    """Compares what comes back with what was stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ledger = Path(os.environ["TEST_LEDGER"])
        self._pause = os.environ.get("TEST_PAUSE", "")

    def register(self, kv_caches: dict[str, Any]) -> None:
        super().register(kv_caches)
        self._tensors = [
            [
                self._blocks_of(kv_caches[name]).chunk(len(self._held), dim=1)
                for name in part.layer_names
            ]
            for part in self._geometry.parts
        ]

    def _read(self, one: Reserving, mark: Mark | None) -> Reading:
        reading = super()._read(one, mark)
        if reading.is_whole:
            wait_for(reading.transfers)
            reservation = one.reservation.result()
            assert reservation is not None
            self._note(one.store, one.shard, reservation)
        return reading

    def _note(self, store: Store, shard: int, reservation: Reservation) -> None:
        for part, ids in enumerate(store.block_ids):
            at = 0
            for i, num_tokens in enumerate(reservation.num_tokens):
                blocks = ids[at : at + self._blocks_of_chunk(part, int(num_tokens))]
                at += len(blocks)
                if reservation.chunks(part).offsets[i] != ABSENT:
                    chunk_hash = store.names.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                    digests = b"".join(self._digest(part, shard, block) for block in blocks)
                    self._entry(chunk_hash, part, shard).write_bytes(digests)
        self._stop_here("store")

    def _scatter(self, load: Load, shard: int, lease: Lease, mark: Any) -> list[int]:
        self._stop_here("load")
        damaged = super()._scatter(load, shard, lease, mark)
        compared = 0
        for part, ids in enumerate(load.block_ids):
            per_chunk = self._blocks_of_chunk(part, self._namespace.layout.tokens_per_chunk)
            for at, block in enumerate(ids):
                if block < 0 or block in damaged:
                    continue
                chunk_hash = _chunk_hashes[load.request_id][load.first_chunk + at // per_chunk]
                place = at % per_chunk * 16
                if (
                    self._digest(part, shard, block)
                    != self._entry(chunk_hash, part, shard).read_bytes()[place : place + 16]
                ):
                    with (self._ledger / "mismatches").open("a") as file:
                        file.write(f"{load.request_id} {chunk_hash.hex()} part {part} block {at}\n")
                compared += 1
        with (self._ledger / "compared").open("a") as file:
            file.write(f"{compared}\n")
        return damaged

    def _blocks_of_chunk(self, part: int, num_tokens: int) -> int:
        return -(-num_tokens // self._geometry.parts[part].group.block_tokens)

    def _entry(self, chunk_hash: bytes, part: int, shard: int) -> Path:
        return self._ledger / f"{chunk_hash.hex()}-{part}-{shard}"

    def _digest(self, part: int, shard: int, block: int) -> bytes:
        digest = blake2b(digest_size=16)
        for slices in self._tensors[part]:
            digest.update(
                np.ascontiguousarray(
                    slices[shard - self._held.start][block].view(torch.uint8).numpy()
                ).data
            )
        return digest.digest()

    def _stop_here(self, where: str) -> None:
        if self._pause != where:
            return
        self._pause = ""
        (self._ledger / "paused").touch()
        while not (self._ledger / "resume").exists():
            time.sleep(0.01)


class Announcer(SchedulerSide):
    """Tells the witness which chunks a load is about."""

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        followed = self._request_states.get(request.request_id)
        if followed is not None and followed.tracker is not None:
            prompt = followed.tracker.prompt
            tail = [prompt.tails[-HASH_BYTES:]] if prompt.tails else []
            hit = followed.hit.num_tokens if followed.hit is not None else 0
            if prompt.tails:  # the tail that was found need not be the longest one
                rest = hit - prompt.num_whole * prompt.namespace.layout.tokens_per_chunk
                tail = [
                    prompt.tails[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                    for i, n in enumerate(prompt.tail_lengths)
                    if n == rest
                ]
            _chunk_hashes[request.request_id] = [
                prompt.hash_at(i) for i in range(prompt.num_whole)
            ] + tail
        super().allocated(request, blocks, external_tokens)


class WatchedConnector(real.KVHoldConnector):
    """KVHoldConnector with a witness."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module: Any = real
        module.WorkerSide, module.SchedulerSide = Witness, Announcer
        super().__init__(*args, **kwargs)
