import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

import numpy as np

from kvhold.core.keys import HASH_BYTES, Prompt
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.net.nixl_agent import is_installed
from kvhold.node import NodeClient
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.limits import RawSocket
from kvhold_lab.bench.peers_engines import host_rows, once_rows
from kvhold_lab.bench.peers_nodes import (
    GET_CHUNKS,
    PATIENCE_S,
    SMALL,
    chunk_bytes,
    find_prompt,
    followed,
    keys_of,
    large,
    make_chunks_prompt,
    random_names,
    store_chunks,
    stored_prompts,
    two_nodes,
    unhashed,
    url_of_peers,
    wait_for_followers,
    wait_until,
)
from kvhold_lab.bench.peers_others import lmcache_row, mooncake_row
from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes, peers_row
from kvhold_lab.bench.raw_nixl import RawNixl
from kvhold_lab.bench.rows import in_turn
from kvhold_lab.bench.servers import RunningPeer, running_peer
from kvhold_lab.bench.throttle import Throttle

PARTS = ("get", "link", "nixl", "index", "events", "serving")
OTHERS = ("mooncake", "lmcache")
WITH_ENGINES = ("hosts", "once")
LOOKUP_TOKENS = 32_000
INDEX_BYTES = 48.0
EVENT_MS = 20.0
_AT_ONCE = 1000
_BATCHES_A_SECOND = 100
_LOOK_S = 0.0005
_PACE_S = 0.002
_LOWEST = 19


def rows(sizes: PeersSizes, only: Sequence[str] = ()) -> Iterator[PeersRow]:
    """only: of all; empty: `PARTS`, with NIXL if it is installed"""
    for part in only or [part for part in PARTS if part != "nixl" or is_installed()]:
        match part:
            case "get":
                yield _get_row(sizes)
            case "link":
                yield _get_row(sizes, gbit_s=sizes.link_gbit_s)
            case "nixl":
                yield _nixl_row(sizes)
            case "index":
                yield from _index_rows(sizes)
            case "events":
                yield _event_row(sizes)
            case "serving":
                yield _serving_row(sizes)
                yield _serving_row(sizes, nice=_LOWEST)
            case "mooncake":
                yield mooncake_row(sizes)
            case "lmcache":
                yield lmcache_row()
            case "hosts":
                yield from host_rows(sizes)
            case "once":
                yield from once_rows(sizes)


def _get_row(sizes: PeersSizes, gbit_s: float = 0.0) -> PeersRow:
    """A lookup that ends when all chunks of another node have arrived.

    gbit_s: of both links; 0: loopback
    """
    space = large(sizes.layers)
    nbytes = chunk_bytes(space)
    ram_bytes = (sizes.rounds + 2) * GET_CHUNKS * size_class(nbytes) + 4 * SLAB_BYTES
    with ExitStack() as stack:

        def way(port: int) -> int:
            if not gbit_s:
                return port
            link = Throttle(("127.0.0.1", port), bytes_per_s=gbit_s * 1e9 / 8)
            return stack.enter_context(link).port

        first, second = two_nodes(stack, ram_bytes, way)
        left = iter(stored_prompts(first, second, space, sizes.rounds + 1))
        into = [memoryview(bytearray(nbytes)) for _ in range(GET_CHUNKS)]
        bare = stack.enter_context(RawSocket(into, receive=False, way=way))
        seconds = in_turn(
            {
                "get": lambda: find_prompt(second.client, next(left)),
                "TCP": lambda: bare.receive(into),
            },
            rounds=sizes.rounds,
        )
    where = f" over a link of {gbit_s:g} Gbit/s" if gbit_s else ""
    return peers_row(
        f"get of {GET_CHUNKS} chunks of {nbytes >> 10:,} KiB from a peer{where}; limit: bare TCP",
        GET_CHUNKS * nbytes / seconds["get"] / 1e9,
        "GB/s",
        GET_CHUNKS * nbytes / seconds["TCP"] / 1e9,
        "at least 0.9",
    )


def _nixl_row(sizes: PeersSizes) -> PeersRow:
    space = large(sizes.layers)
    nbytes = chunk_bytes(space)
    ram_bytes = (sizes.rounds + 2) * GET_CHUNKS * size_class(nbytes) + 4 * SLAB_BYTES
    with ExitStack() as stack:
        first, second = two_nodes(stack, ram_bytes, channel="nixl")
        prompts = stored_prompts(first, second, space, sizes.rounds + 1)
        wait_until(lambda: followed(second.client)["channel"] == "nixl")
        left = iter(prompts)
        into = [memoryview(bytearray(nbytes)) for _ in range(GET_CHUNKS)]
        bare = stack.enter_context(RawNixl(into))
        seconds = in_turn(
            {"get": lambda: find_prompt(second.client, next(left)), "NIXL": bare.read},
            rounds=sizes.rounds,
        )
        came = followed(second.client)["nixl_bytes"]
        assert came == len(prompts) * GET_CHUNKS * nbytes, f"only {came} bytes came by NIXL"
    return peers_row(
        f"get of {GET_CHUNKS} chunks of {nbytes >> 10:,} KiB from a peer by NIXL; limit: NIXL "
        "alone, in one read",
        GET_CHUNKS * nbytes / seconds["get"] / 1e9,
        "GB/s",
        GET_CHUNKS * nbytes / seconds["NIXL"] / 1e9,
        "at least 0.9",
    )


def _index_rows(sizes: PeersSizes) -> Iterator[PeersRow]:
    size = SMALL.layout.tokens_per_chunk
    with ExitStack() as stack:
        ram_bytes = sizes.chunks * size_class(size) + 8 * SLAB_BYTES
        peers = [stack.enter_context(running_peer(ram_bytes=ram_bytes)) for _ in range(sizes.peers)]
        for peer in peers:
            peer.client.register(SMALL)
            for first in range(0, sizes.chunks, _AT_ONCE):
                store_chunks(peer.client, SMALL, random_names(min(_AT_ONCE, sizes.chunks - first)))
        following = stack.enter_context(running_peer(url_of_peers(*peers))).client
        alone = stack.enter_context(running_peer()).client
        tiered = stack.enter_context(running_peer("memory://?max_bytes=64MiB")).client
        held, missing = (make_chunks_prompt(SMALL, LOOKUP_TOKENS // size, seed) for seed in (1, 2))
        for client in (following, alone, tiered):
            client.register(SMALL)
            store_chunks(client, SMALL, held.chunks())
        wait_for_followers(peers, following)
        for what, prompt, tokens, other, limit in (
            ("hit", held, LOOKUP_TOKENS, alone, "without tiers"),
            ("miss", missing, 0, alone, "without tiers"),
            ("miss", missing, 0, tiered, "with memory:// as its tier"),
        ):
            seconds = in_turn(
                {
                    "peers": partial(find_prompt, following, prompt, tokens),
                    "other": partial(find_prompt, other, prompt, tokens),
                },
                rounds=20 * sizes.rounds,
            )
            yield peers_row(
                f"lookup of {LOOKUP_TOKENS:,} tokens, a {what}, with {sizes.peers} peers of "
                f"{sizes.chunks:,} chunks; limit: {limit}",
                1e3 * seconds["peers"],
                "ms",
                1e3 * seconds["other"],
                "at most 1.2",
            )
        [tier] = following.status()["tiers"]
        yield peers_row(
            "index of the peers' chunks",
            (tier["index_bytes"] or 0) / (sizes.peers * sizes.chunks),
            "bytes a chunk",
            INDEX_BYTES,
            "at most 1",
        )


def _event_row(sizes: PeersSizes) -> PeersRow:
    num_batches = max(2, int(sizes.event_s * _BATCHES_A_SECOND))
    batch = max(1, sizes.events_s // _BATCHES_A_SECOND)
    ram_bytes = num_batches * batch * size_class(SMALL.layout.tokens_per_chunk) + 8 * SLAB_BYTES
    with running_peer(ram_bytes=ram_bytes) as node:
        call = f"store_steadily({str(node.socket)!r}, {num_batches}, {batch})"
        with _apart(call) as (given, said):
            found_s = asyncio.run(_follow(node, given, num_batches, batch))
            stored_s: list[float] = json.loads(said.readline())
    ways_ms = [1e3 * (found - stored) for found, stored in zip(found_s, stored_s, strict=True)]
    rate = (num_batches - 1) * batch / (stored_s[-1] - stored_s[0])
    return peers_row(
        f"median way of an event into a peer's index, at {rate:,.0f} events a second",
        median(ways_ms),
        "ms",
        EVENT_MS,
        "at most 1",
    )


async def _follow(node: RunningPeer, given: IO[str], num_batches: int, batch: int) -> list[float]:
    tier, _ = make_tier(url_of_peers(node))
    found_s = []
    try:
        await tier.check()
        given.write("begin\n")
        given.flush()
        async with asyncio.timeout(PATIENCE_S):
            for number in range(num_batches):
                [key] = keys_of(random_names(batch, number).hashes[-HASH_BYTES:])
                while (await tier.probe([key]))[0] is None:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(_LOOK_S)
                found_s.append(time.monotonic())
    finally:
        await tier.close()
    return found_s


def store_steadily(path: str, num_batches: int, batch: int) -> None:
    with NodeClient(Path(path), name="kvhold bench, storing") as client:
        client.register(SMALL)
        sys.stdin.readline()
        stored_s = []
        due_s = time.monotonic()
        for number in range(num_batches):
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s += 1 / _BATCHES_A_SECOND
            stored_s.append(store_chunks(client, SMALL, random_names(batch, number)))
        print(json.dumps(stored_s), flush=True)


def _serving_row(sizes: PeersSizes, nice: int = 0) -> PeersRow:
    """nice: of the reading peer, which takes cores that on another host would be its own"""
    space, size = large(sizes.layers), SMALL.layout.tokens_per_chunk
    nbytes = chunk_bytes(space)
    p99_s: dict[bool, list[float]] = {False: [], True: []}
    with running_peer(ram_bytes=GET_CHUNKS * size_class(nbytes) + 8 * SLAB_BYTES) as node:
        prompt = make_chunks_prompt(SMALL, LOOKUP_TOKENS // size, 1)
        for stored in (space, SMALL):
            node.client.register(stored)
        store_chunks(
            node.client,
            space,
            make_chunks_prompt(space, GET_CHUNKS, 0).chunks(),
            os.urandom(nbytes),
        )
        store_chunks(node.client, SMALL, prompt.chunks())
        call = f"read_steadily({url_of_peers(node)!r}, {sizes.layers}, {nice})"
        with _apart(call) as (given, said):
            said.readline()
            read_bytes, read_s = 0, 0.0
            for number in range(2 * sizes.rounds + 2):
                is_read = number % 2 == 1
                if is_read:
                    given.write("g")
                    given.flush()
                    said.readline()
                p99 = _p99_of_lookups(node.client, prompt, sizes.lookups)
                if is_read:
                    given.write("s")
                    given.flush()
                    phase = json.loads(said.readline())
                    read_bytes, read_s = read_bytes + phase["bytes"], read_s + phase["s"]
                if number >= 2:
                    p99_s[is_read].append(p99)
    reader = "a peer of lowest priority" if nice else "a peer"
    return peers_row(
        f"p99 of an engine's lookup of {LOOKUP_TOKENS:,} tokens while {reader} reads "
        f"{read_bytes / read_s / 1e9:.1f} GB/s; limit: alone",
        1e3 * median(p99_s[True]),
        "ms",
        1e3 * median(p99_s[False]),
        "at most 1.3",
    )


def _p99_of_lookups(client: NodeClient, prompt: Prompt, count: int) -> float:
    taken_s = []
    for _ in range(count):
        began_s = time.perf_counter()
        hit = client.lookup(unhashed(prompt).query())
        taken_s.append(time.perf_counter() - began_s)
        assert hit.num_tokens == LOOKUP_TOKENS, hit.reason
        hit.close()
        time.sleep(_PACE_S)
    return float(np.percentile(taken_s, 99))


def read_steadily(url: str, layers: int, nice: int) -> None:
    os.nice(nice)
    asyncio.run(_read_steadily(url, layers))


async def _read_steadily(url: str, layers: int) -> None:
    space = large(layers)
    keys = keys_of(make_chunks_prompt(space, GET_CHUNKS, 0).chunks().hashes, space)
    tier, _ = make_tier(url)
    try:
        await tier.check()
        async with asyncio.timeout(PATIENCE_S):
            while None in (sizes := await tier.probe(keys)):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(_LOOK_S)
        into = [[memoryview(bytearray(size))] for size in sizes if isinstance(size, int)]
        print("ready", flush=True)
        while await asyncio.to_thread(os.read, 0, 1) == b"g":
            print("reading", flush=True)
            stop = asyncio.create_task(asyncio.to_thread(os.read, 0, 1))
            began_s, nbytes = time.monotonic(), 0
            while not stop.done():
                assert await tier.get(keys, into) == sizes
                nbytes += sum(map(int, sizes))
            print(json.dumps({"bytes": nbytes, "s": time.monotonic() - began_s}), flush=True)
    finally:
        await tier.close()


@contextmanager
def _apart(call: str) -> Iterator[tuple[IO[str], IO[str]]]:
    code = f"from kvhold_lab.bench import peers; peers.{call}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdin, process.stdout
        except BaseException:
            process.kill()
            raise
