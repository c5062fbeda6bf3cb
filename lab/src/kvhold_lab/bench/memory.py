from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kvhold.core.holdings import ChunkBytes
from kvhold.core.keys import Namespace, Prompt
from kvhold.memory.copy import gather_blocks, scatter_blocks, warm_up
from kvhold.node import NodeClient
from kvhold_lab.bench.gather import LAYOUT, GatherEngine, memcpy, touched
from kvhold_lab.bench.profiles import Profiles, of_calls
from kvhold_lab.bench.rows import Row, in_turn, rate_row
from kvhold_lab.bench.servers import running_node

NUM_CHUNKS = 4
ROUNDS = 9
THREADS = 2
NAMESPACE = Namespace(model="bench", layout=LAYOUT)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    nbytes = NUM_CHUNKS * LAYOUT.chunk_bytes(0, LAYOUT.tokens_per_chunk)
    beside = touched(nbytes)
    warm_up()
    with (
        running_node(ram_bytes=3 * nbytes) as client,
        ThreadPoolExecutor(THREADS) as helpers,
    ):
        trips = _Trips(client)
        work: dict[str, Callable[[], object]] = {
            "memcpy": partial(memcpy, beside, trips.engine.pool, THREADS, helpers),
            "store, with checksums": partial(trips.store, checked=True),
            "store, without": partial(trips.store, checked=False),
            "retrieve, with checksums": partial(trips.retrieve, checked=True),
            "retrieve, without": partial(trips.retrieve, checked=False),
        }
        forget = {name: trips.forget for name in work if name.startswith("store")}
        seconds = in_turn(work, rounds=ROUNDS, after=forget)
        return [
            profiles.of(
                rate_row(name, nbytes, seconds[name], seconds["memcpy"]),
                partial(of_calls, work[name], after=forget.get(name)),
            )
            for name in work
            if name != "memcpy"
        ]


class _Trips:
    def __init__(self, client: NodeClient) -> None:
        self.engine = GatherEngine(NUM_CHUNKS)
        self._client = client
        self._stored = 0
        client.register(NAMESPACE)
        self._kept = self._prompt()
        self._store(self._kept, checked=True)

    def store(self, *, checked: bool) -> None:
        self._store(self._prompt(), checked=checked)

    def retrieve(self, *, checked: bool) -> None:
        with self._client.lookup(self._kept.query()) as hit:
            assert hit.num_tokens == len(self._kept.tokens)
            lease = self._client.claim(hit.ticket)
            assert lease is not None
            with lease:
                scatter_blocks(
                    self.engine.view,
                    self.engine.block_ids,
                    lease.buffer,
                    _places(lease.chunks(), checked),
                    threads=THREADS,
                )

    def forget(self) -> None:
        self._client.clear()
        self._store(self._kept, checked=True)

    def _store(self, prompt: Prompt, *, checked: bool) -> None:
        with self._client.reserve(LAYOUT, prompt.chunks()) as reservation:
            assert len(reservation.granted) == NUM_CHUNKS
            places = reservation.chunks()
            gather_blocks(
                self.engine.view,
                self.engine.block_ids,
                reservation.buffer,
                _places(places, checked),
                threads=THREADS,
            )
            if not checked and places.sums is not None:
                places.sums.known[:] = True
            reservation.commit()

    def _prompt(self) -> Prompt:
        self._stored += 1
        return NAMESPACE.prompt(
            np.arange(NUM_CHUNKS * LAYOUT.tokens_per_chunk, dtype=np.int32) + self._stored
        )


def _places(places: ChunkBytes, checked: bool) -> ChunkBytes:
    return places if checked else ChunkBytes(places.offsets, places.num_tokens)
