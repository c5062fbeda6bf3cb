"""Checksums of a prompt's KV: those of its bytes, wherever they are."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kvhold.core.holdings import ABSENT
from kvhold.core.keys import Namespace, Prompt
from kvhold.node import NodeClient
from kvhold.testing.cache import LAYOUTS, PLAIN, a_prompt, store
from tests.control.running import RunningControl, flood, running_control, tokens_of
from tests.node.nodes import NOTHING, RunningNode, eventually

SPACE = Namespace("content:1", PLAIN, title="one")


async def ask(control: RunningControl, prompt: Prompt, status: int = 200) -> Any:
    order = {"namespace": prompt.namespace.digest.hex(), "tokens": tokens_of(prompt)}
    answered, found = await control.own("POST", "/v1/checksums", order)
    assert answered == status, found
    return found


def by_hand(client: NodeClient, prompt: Prompt) -> list[dict[str, Any]]:
    """From the arena's bytes."""
    layout, rows = prompt.namespace.layout, []
    with client.lookup(prompt.query()) as hit:
        for shard in range(prompt.namespace.shards):
            lease = client.claim(hit.ticket, shard)
            assert lease is not None
            with lease:
                for group, geometry in enumerate(layout.groups):
                    places = lease.chunks(group)
                    for chunk, offset in enumerate(places.offsets):
                        if offset == ABSENT:
                            continue
                        num_tokens = int(places.num_tokens[chunk])
                        sums = []
                        for layer in range(geometry.layers):
                            start, length = layout.layer_range(group, layer, num_tokens)
                            layer_bytes = lease.buffer[offset + start :][:length].tobytes()
                            sums.append(xxh3_64_intdigest(layer_bytes))
                        rows.append(
                            {
                                "first_token": chunk * layout.tokens_per_chunk,
                                "num_tokens": num_tokens,
                                "group": group,
                                "shard": shard,
                                "checksum": xxh3_64_hexdigest(struct.pack(f"<{len(sums)}Q", *sums)),
                            }
                        )
    return rows


@pytest.mark.parametrize("name", LAYOUTS)
async def test_they_are_those_of_each_chunk(node: RunningNode, name: str) -> None:
    space = Namespace("content:2", LAYOUTS[name], shards=2, title="two")
    client, prompt = node.client(), a_prompt(space, 70)
    client.register(space)
    for shard in range(2):
        store(client, prompt, shard=shard)
    async with running_control(node.path) as control:
        found = await ask(control, prompt)
    expected = by_hand(client, prompt)
    assert found["chunks"] == expected != []
    assert len({row["checksum"] for row in expected}) == len(expected)
    assert found["sources"] == {"ram": found["num_tokens"]}
    eventually(lambda: client.status()["held"] == NOTHING)


async def test_what_is_not_cached_has_none(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    async with running_control(node.path) as control:
        found = await ask(control, a_prompt(SPACE, 64))
    assert found == {"num_tokens": 0, "sources": {}, "reason": "never_stored", "chunks": []}


async def test_they_stay_the_same_through_a_disk(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=256MiB"]\n')
    node = start_node("--config", str(settings))
    client, prompt = node.client(), a_prompt(SPACE, 70)
    client.register(SPACE)
    store(client, prompt)
    async with running_control(node.path) as control:
        before = await ask(control, prompt)
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        await asyncio.to_thread(flood, client, SPACE)
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        after: dict[str, Any] = {}
        for _ in range(100):  # a busy machine's disk may answer after the API's patience
            after = await ask(control, prompt)
            if after["num_tokens"] == 70:
                break
        status = client.status()
    assert after["chunks"] == before["chunks"] and len(before["chunks"]) == 5
    assert status["counters"].get("kvhold_promoted_chunks", 0) >= 5


async def test_damaged_bytes_are_told_and_removed(node: RunningNode) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    with client.lookup(prompt.query()) as hit:
        lease = client.claim(hit.ticket)
        assert lease is not None
        with lease:
            third = int(lease.chunks().offsets[2])
    async with running_control(node.path) as control:
        with client.reserve(PLAIN, a_prompt(SPACE, 16, seed=1).chunks()) as reservation:
            reservation.buffer[third + 100] ^= 1
            problem = await ask(control, prompt, 409)
        assert problem["reason"] == "damaged"
        found = await ask(control, prompt)
        assert (found["num_tokens"], found["reason"], len(found["chunks"])) == (32, "damaged", 2)
    eventually(lambda: client.status()["held"] == NOTHING)
