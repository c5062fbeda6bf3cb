"""Nodes that follow each other, and their chunks."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np

from kvhold.core.keys import HASH_BYTES, ChunkNames, Namespace, Prompt, make_key
from kvhold.core.layout import Group, Layout
from kvhold.core.status import FollowedPeerStatus, check_status
from kvhold.node import NodeClient
from kvhold_lab.bench.servers import RunningPeer, running_peer

GET_CHUNKS = 64
PATIENCE_S = 120.0
_PATIENT = "&".join(f"{name}_timeout_s=60" for name in ("probe", "get", "answer"))
SMALL = Namespace(
    model="bench",
    layout=Layout(
        groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),),
        tokens_per_chunk=256,
    ),
)


def two_nodes(
    stack: ExitStack,
    ram_bytes: int,
    way: Callable[[int], int] = lambda port: port,
    channel: str = "tcp",
) -> tuple[RunningPeer, RunningPeer]:
    first = stack.enter_context(running_peer(ram_bytes=ram_bytes, channel=channel))
    port = way(int(first.address.rpartition(":")[2]))
    url = url_of_peers(replace(first, address=f"127.0.0.1:{port}"))
    return first, stack.enter_context(running_peer(url, ram_bytes=ram_bytes, channel=channel))


def stored_prompts(
    first: RunningPeer, second: RunningPeer, space: Namespace, count: int
) -> list[Prompt]:
    prompts = [make_chunks_prompt(space, GET_CHUNKS, seed) for seed in range(count)]
    for node in (first, second):
        node.client.register(space)
        wait_until(partial(_is_touched, node.client))
    for prompt in prompts:
        store_chunks(first.client, space, prompt.chunks(), os.urandom(chunk_bytes(space)))
    wait_for_followers([first], second.client)
    return prompts


def followed(client: NodeClient) -> FollowedPeerStatus:
    [tier] = check_status(client.status())["tiers"]
    [peer] = tier["followed_peers"]["peers"]
    return peer


def url_of_peers(*peers: RunningPeer) -> str:
    return f"peers://{','.join(peer.address for peer in peers)}?{_PATIENT}"


def large(layers: int) -> Namespace:
    group = Group(layers=layers, planes=2, heads=8, head_dim=64, dtype="bfloat16")
    return Namespace(model="bench, large", layout=Layout(groups=(group,), tokens_per_chunk=64))


def chunk_bytes(space: Namespace) -> int:
    return space.layout.chunk_bytes(0, space.layout.tokens_per_chunk)


def make_chunks_prompt(space: Namespace, num_chunks: int, seed: int) -> Prompt:
    num_tokens = num_chunks * space.layout.tokens_per_chunk
    tokens = np.random.default_rng(seed).integers(0, 128_000, num_tokens, dtype=np.int32)
    return space.prompt(tokens)


def unhashed(prompt: Prompt) -> Prompt:
    return prompt.namespace.prompt(prompt.tokens)


def random_names(count: int, seed: int | None = None) -> ChunkNames:
    hashes = np.random.default_rng(seed).bytes(count * HASH_BYTES)
    return ChunkNames(SMALL.digest, hashes)


def keys_of(hashes: bytes, space: Namespace = SMALL) -> list[bytes]:
    return [
        make_key(space.digest, hashes[at : at + HASH_BYTES], 0, 0)
        for at in range(0, len(hashes), HASH_BYTES)
    ]


def store_chunks(
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


def find_prompt(client: NodeClient, prompt: Prompt, num_tokens: int | None = None) -> None:
    with client.lookup(unhashed(prompt).query()) as hit:
        expected = len(prompt.tokens) if num_tokens is None else num_tokens
        assert hit.num_tokens == expected, f"{hit.num_tokens} of {expected} tokens: {hit.reason}"


def wait_for_followers(peers: Sequence[RunningPeer], follower: NodeClient) -> None:
    follower.register(SMALL)
    for number, peer in enumerate(peers):
        last = make_chunks_prompt(SMALL, 1, 1000 + number)
        peer.client.register(SMALL)
        store_chunks(peer.client, SMALL, last.chunks())
        wait_until(partial(_is_found, follower, last))


def _is_found(client: NodeClient, prompt: Prompt) -> bool:
    with client.lookup(prompt.query()) as hit:
        return hit.num_tokens == len(prompt.tokens)


def _is_touched(client: NodeClient) -> bool:
    status = client.status()
    return status["arena_touched_bytes"] >= 0.99 * status["arena_bytes"]


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {PATIENCE_S:g} s")
        time.sleep(0.05)
