import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

import numpy as np

from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.status import FollowedPeerStatus, check_status
from kvhold.memory.slab import SLAB_BYTES, size_class
from kvhold.net.nixl_agent import is_installed
from kvhold.node import NodeClient
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.limits import RawSocket
from kvhold_lab.bench.raw_nixl import RawNixl
from kvhold_lab.bench.rows import in_turn
from kvhold_lab.bench.servers import RunningPeer, running_peer
from kvhold_lab.bench.throttle import Throttle

GET_CHUNKS = 64
LOOKUP_TOKENS = 32_000
INDEX_BYTES = 48.0
EVENT_MS = 20.0
_PATIENCE_S = 120.0
_PATIENT = "&".join(f"{name}_timeout_s=60" for name in ("probe", "get", "answer"))
_AT_ONCE = 1000
_BATCHES_A_SECOND = 100
_LOOK_S = 0.0005
_PACE_S = 0.002
_SMALL = Namespace(
    model="bench",
    layout=Layout(
        groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),),
        tokens_per_chunk=256,
    ),
)


@dataclass(frozen=True)
class PeersRow:
    name: str
    value: float
    unit: str
    limit: float
    ratio: float
    goal: str


@dataclass(frozen=True)
class PeersSizes:
    """link_gbit_s: of a slower link, for a second get
    layers:      of a chunk, 128 KiB each
    lookups:     in each round, beside a serving node and an idle one
    """

    rounds: int = 9
    link_gbit_s: float = 1.0
    layers: int = 16
    peers: int = 8
    chunks: int = 100_000
    lookups: int = 300
    events_s: int = 10_000
    event_s: float = 5.0


def rows(sizes: PeersSizes) -> Iterator[PeersRow]:
    yield _get_row(sizes)
    yield _get_row(sizes, gbit_s=sizes.link_gbit_s)
    if is_installed():
        yield _nixl_row(sizes)
    yield from _index_rows(sizes)
    yield _event_row(sizes)
    yield _serving_row(sizes)


def _row(name: str, value: float, unit: str, limit: float, goal: str) -> PeersRow:
    return PeersRow(name, round(value, 4), unit, round(limit, 4), round(value / limit, 4), goal)


def _get_row(sizes: PeersSizes, gbit_s: float = 0.0) -> PeersRow:
    """A lookup that ends when all chunks of another node have arrived.

    gbit_s: of both links; 0: loopback
    """
    space = _large(sizes.layers)
    nbytes = _chunk_bytes(space)
    ram_bytes = (sizes.rounds + 2) * GET_CHUNKS * size_class(nbytes) + 4 * SLAB_BYTES
    with ExitStack() as stack:

        def way(port: int) -> int:
            if not gbit_s:
                return port
            link = Throttle(("127.0.0.1", port), bytes_per_s=gbit_s * 1e9 / 8)
            return stack.enter_context(link).port

        first, second = _two_nodes(stack, ram_bytes, way)
        left = iter(_stored_prompts(first, second, space, sizes.rounds + 1))
        into = [memoryview(bytearray(nbytes)) for _ in range(GET_CHUNKS)]
        bare = stack.enter_context(RawSocket(into, receive=False, way=way))
        seconds = in_turn(
            {
                "get": lambda: _find(second.client, next(left)),
                "TCP": lambda: bare.receive(into),
            },
            rounds=sizes.rounds,
        )
    where = f" over a link of {gbit_s:g} Gbit/s" if gbit_s else ""
    return _row(
        f"get of {GET_CHUNKS} chunks of {nbytes >> 10:,} KiB from a peer{where}; limit: bare TCP",
        GET_CHUNKS * nbytes / seconds["get"] / 1e9,
        "GB/s",
        GET_CHUNKS * nbytes / seconds["TCP"] / 1e9,
        "at least 0.9",
    )


def _nixl_row(sizes: PeersSizes) -> PeersRow:
    space = _large(sizes.layers)
    nbytes = _chunk_bytes(space)
    ram_bytes = (sizes.rounds + 2) * GET_CHUNKS * size_class(nbytes) + 4 * SLAB_BYTES
    with ExitStack() as stack:
        first, second = _two_nodes(stack, ram_bytes, channel="nixl")
        prompts = _stored_prompts(first, second, space, sizes.rounds + 1)
        _until(lambda: _followed(second.client)["channel"] == "nixl")
        left = iter(prompts)
        into = [memoryview(bytearray(nbytes)) for _ in range(GET_CHUNKS)]
        bare = stack.enter_context(RawNixl(into))
        seconds = in_turn(
            {"get": lambda: _find(second.client, next(left)), "NIXL": bare.read},
            rounds=sizes.rounds,
        )
        came = _followed(second.client)["nixl_bytes"]
        assert came == len(prompts) * GET_CHUNKS * nbytes, f"only {came} bytes came by NIXL"
    return _row(
        f"get of {GET_CHUNKS} chunks of {nbytes >> 10:,} KiB from a peer by NIXL; limit: NIXL "
        "alone, in one read",
        GET_CHUNKS * nbytes / seconds["get"] / 1e9,
        "GB/s",
        GET_CHUNKS * nbytes / seconds["NIXL"] / 1e9,
        "at least 0.9",
    )


def _two_nodes(
    stack: ExitStack,
    ram_bytes: int,
    way: Callable[[int], int] = lambda port: port,
    channel: str = "tcp",
) -> tuple[RunningPeer, RunningPeer]:
    first = stack.enter_context(running_peer(ram_bytes=ram_bytes, channel=channel))
    port = way(int(first.address.rpartition(":")[2]))
    url = _following(replace(first, address=f"127.0.0.1:{port}"))
    return first, stack.enter_context(running_peer(url, ram_bytes=ram_bytes, channel=channel))


def _stored_prompts(
    first: RunningPeer, second: RunningPeer, space: Namespace, count: int
) -> list[Prompt]:
    prompts = [_prompt(space, GET_CHUNKS, seed) for seed in range(count)]
    for node in (first, second):
        node.client.register(space)
        _until(partial(_is_touched, node.client))
    for prompt in prompts:
        _store(first.client, space, prompt.chunks(), os.urandom(_chunk_bytes(space)))
    _wait_for_followers([first], second.client)
    return prompts


def _followed(client: NodeClient) -> FollowedPeerStatus:
    [tier] = check_status(client.status())["tiers"]
    [peer] = tier["followed_peers"]["peers"]
    return peer


def _index_rows(sizes: PeersSizes) -> Iterator[PeersRow]:
    size = _SMALL.layout.tokens_per_chunk
    with ExitStack() as stack:
        ram_bytes = sizes.chunks * size_class(size) + 8 * SLAB_BYTES
        peers = [stack.enter_context(running_peer(ram_bytes=ram_bytes)) for _ in range(sizes.peers)]
        for peer in peers:
            peer.client.register(_SMALL)
            for first in range(0, sizes.chunks, _AT_ONCE):
                _store(peer.client, _SMALL, _names(min(_AT_ONCE, sizes.chunks - first)))
        following = stack.enter_context(running_peer(_following(*peers))).client
        alone = stack.enter_context(running_peer()).client
        tiered = stack.enter_context(running_peer("memory://?max_bytes=64MiB")).client
        held, missing = (_prompt(_SMALL, LOOKUP_TOKENS // size, seed) for seed in (1, 2))
        for client in (following, alone, tiered):
            client.register(_SMALL)
            _store(client, _SMALL, held.chunks())
        _wait_for_followers(peers, following)
        for what, prompt, tokens, other, limit in (
            ("hit", held, LOOKUP_TOKENS, alone, "without tiers"),
            ("miss", missing, 0, alone, "without tiers"),
            ("miss", missing, 0, tiered, "with memory:// as its tier"),
        ):
            seconds = in_turn(
                {
                    "peers": partial(_find, following, prompt, tokens),
                    "other": partial(_find, other, prompt, tokens),
                },
                rounds=20 * sizes.rounds,
            )
            yield _row(
                f"lookup of {LOOKUP_TOKENS:,} tokens, a {what}, with {sizes.peers} peers of "
                f"{sizes.chunks:,} chunks; limit: {limit}",
                1e3 * seconds["peers"],
                "ms",
                1e3 * seconds["other"],
                "at most 1.2",
            )
        [tier] = following.status()["tiers"]
        yield _row(
            "index of the peers' chunks",
            (tier["index_bytes"] or 0) / (sizes.peers * sizes.chunks),
            "bytes a chunk",
            INDEX_BYTES,
            "at most 1",
        )


def _event_row(sizes: PeersSizes) -> PeersRow:
    num_batches = max(2, int(sizes.event_s * _BATCHES_A_SECOND))
    batch = max(1, sizes.events_s // _BATCHES_A_SECOND)
    ram_bytes = num_batches * batch * size_class(_SMALL.layout.tokens_per_chunk) + 8 * SLAB_BYTES
    with running_peer(ram_bytes=ram_bytes) as node:
        call = f"store_steadily({str(node.socket)!r}, {num_batches}, {batch})"
        with _apart(call) as (given, said):
            found_s = asyncio.run(_follow(node, given, num_batches, batch))
            stored_s: list[float] = json.loads(said.readline())
    ways_ms = [1e3 * (found - stored) for found, stored in zip(found_s, stored_s, strict=True)]
    rate = (num_batches - 1) * batch / (stored_s[-1] - stored_s[0])
    return _row(
        f"median way of an event into a peer's index, at {rate:,.0f} events a second",
        median(ways_ms),
        "ms",
        EVENT_MS,
        "at most 1",
    )


async def _follow(node: RunningPeer, given: IO[str], num_batches: int, batch: int) -> list[float]:
    tier, _ = make_tier(_following(node))
    found_s = []
    try:
        await tier.check()
        given.write("begin\n")
        given.flush()
        async with asyncio.timeout(_PATIENCE_S):
            for number in range(num_batches):
                [key] = _keys(_names(batch, number).hashes[-HASH_BYTES:])
                while (await tier.probe([key]))[0] is None:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(_LOOK_S)
                found_s.append(time.monotonic())
    finally:
        await tier.close()
    return found_s


def store_steadily(path: str, num_batches: int, batch: int) -> None:
    with NodeClient(Path(path), name="kvhold bench, storing") as client:
        client.register(_SMALL)
        sys.stdin.readline()
        stored_s = []
        due_s = time.monotonic()
        for number in range(num_batches):
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s += 1 / _BATCHES_A_SECOND
            stored_s.append(_store(client, _SMALL, _names(batch, number)))
        print(json.dumps(stored_s), flush=True)


def _serving_row(sizes: PeersSizes) -> PeersRow:
    space, size = _large(sizes.layers), _SMALL.layout.tokens_per_chunk
    nbytes = _chunk_bytes(space)
    p99_s: dict[bool, list[float]] = {False: [], True: []}
    with running_peer(ram_bytes=GET_CHUNKS * size_class(nbytes) + 8 * SLAB_BYTES) as node:
        prompt = _prompt(_SMALL, LOOKUP_TOKENS // size, 1)
        for stored in (space, _SMALL):
            node.client.register(stored)
        _store(node.client, space, _prompt(space, GET_CHUNKS, 0).chunks(), os.urandom(nbytes))
        _store(node.client, _SMALL, prompt.chunks())
        with _apart(f"read_steadily({_following(node)!r}, {sizes.layers})") as (given, said):
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
    return _row(
        f"p99 of an engine's lookup of {LOOKUP_TOKENS:,} tokens while a peer reads "
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
        hit = client.lookup(_unhashed(prompt).query())
        taken_s.append(time.perf_counter() - began_s)
        assert hit.num_tokens == LOOKUP_TOKENS, hit.reason
        hit.close()
        time.sleep(_PACE_S)
    return float(np.percentile(taken_s, 99))


def read_steadily(url: str, layers: int) -> None:
    asyncio.run(_read_steadily(url, layers))


async def _read_steadily(url: str, layers: int) -> None:
    space = _large(layers)
    keys = _keys(_prompt(space, GET_CHUNKS, 0).chunks().hashes, space)
    tier, _ = make_tier(url)
    try:
        await tier.check()
        async with asyncio.timeout(_PATIENCE_S):
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


def _following(*peers: RunningPeer) -> str:
    return f"peers://{','.join(peer.address for peer in peers)}?{_PATIENT}"


def _large(layers: int) -> Namespace:
    group = Group(layers=layers, planes=2, heads=8, head_dim=64, dtype="bfloat16")
    return Namespace(model="bench, large", layout=Layout(groups=(group,), tokens_per_chunk=64))


def _chunk_bytes(space: Namespace) -> int:
    return space.layout.chunk_bytes(0, space.layout.tokens_per_chunk)


def _prompt(space: Namespace, num_chunks: int, seed: int) -> Prompt:
    num_tokens = num_chunks * space.layout.tokens_per_chunk
    tokens = np.random.default_rng(seed).integers(0, 128_000, num_tokens, dtype=np.int32)
    return space.prompt(tokens)


def _unhashed(prompt: Prompt) -> Prompt:
    return prompt.namespace.prompt(prompt.tokens)


def _names(count: int, seed: int | None = None) -> ChunkNames:
    hashes = np.random.default_rng(seed).bytes(count * HASH_BYTES)
    return ChunkNames(_SMALL.digest, hashes)


def _keys(hashes: bytes, space: Namespace = _SMALL) -> list[bytes]:
    return [
        make_key(space.digest, hashes[at : at + HASH_BYTES], 0, 0)
        for at in range(0, len(hashes), HASH_BYTES)
    ]


def _store(
    client: NodeClient, space: Namespace, names: ChunkNames, data: bytes | None = None
) -> float:
    with client.reserve(space.layout, names) as reservation:
        assert len(reservation.granted) == len(names), "the node's memory is large enough"
        if data is not None:
            for at in reservation.chunks().offsets:
                reservation.buffer[at : at + len(data)] = np.frombuffer(data, np.uint8)
        now_s = time.monotonic()
        reservation.commit()
    return now_s


def _find(client: NodeClient, prompt: Prompt, num_tokens: int | None = None) -> None:
    with client.lookup(_unhashed(prompt).query()) as hit:
        expected = len(prompt.tokens) if num_tokens is None else num_tokens
        assert hit.num_tokens == expected, f"{hit.num_tokens} of {expected} tokens: {hit.reason}"


def _wait_for_followers(peers: Sequence[RunningPeer], follower: NodeClient) -> None:
    follower.register(_SMALL)
    for number, peer in enumerate(peers):
        last = _prompt(_SMALL, 1, 1000 + number)
        peer.client.register(_SMALL)
        _store(peer.client, _SMALL, last.chunks())
        _until(partial(_is_found, follower, last))


def _is_found(client: NodeClient, prompt: Prompt) -> bool:
    with client.lookup(prompt.query()) as hit:
        return hit.num_tokens == len(prompt.tokens)


def _is_touched(client: NodeClient) -> bool:
    status = client.status()
    return status["arena_touched_bytes"] >= 0.99 * status["arena_bytes"]


def _until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {_PATIENCE_S:g} s")
        time.sleep(0.05)
