"""Lookup, prefetch and pins of a prompt by its tokens, on a real node."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhold.control.pins import bytes_of
from kvhold.core.keys import Namespace
from kvhold.node import NodeClient
from kvhold.testing.cache import HYBRID, LAYOUTS, PLAIN, a_prompt, store
from tests.control.running import RunningControl, flood, running_control, tokens_of
from tests.node.nodes import RunningNode, eventually

SPACE = Namespace("content:1", PLAIN, title="one")
DIGITS = SPACE.digest.hex()
ARENA = 16 << 20


async def ask(
    control: RunningControl, path: str, prompt: Any, status: int = 200, **more: Any
) -> Any:
    order = {"namespace": DIGITS[:10], "tokens": tokens_of(prompt)} | more
    answered, found = await control.own("POST", path, order)
    assert answered == status, found
    return found


async def test_a_prompt_is_found_by_its_tokens(node: RunningNode) -> None:
    client = node.client()
    async with running_control(node.path) as control:
        for layout in LAYOUTS.values():
            await _is_found(client, control, Namespace("content:2", layout, shards=2, title="two"))


async def _is_found(client: NodeClient, control: RunningControl, space: Namespace) -> None:
    client.register(space)
    prompt = a_prompt(space, 70)
    for shard in range(2):
        store(client, prompt, shard=shard)
    with client.lookup(prompt.query()) as hit:
        expected = hit.num_tokens
    order: dict[str, Any] = {"namespace": space.digest.hex(), "tokens": tokens_of(prompt)}
    _, found = await control.own("POST", "/v1/lookup", order)
    assert expected > 0
    assert (found["num_tokens"], found["sources"]) == (expected, {"ram": expected})
    tokens = tokens_of(prompt)
    order["tokens"] = [tokens[0] + 1, *tokens[1:]]
    _, found = await control.own("POST", "/v1/lookup", order)
    assert (found["num_tokens"], found["reason"]) == (0, "never_stored")


async def test_a_prompt_is_cleared_for_good(
    start_node: Callable[..., RunningNode], tmp_path: Path
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    client, prompt, other = node.client(), a_prompt(SPACE, 64), a_prompt(SPACE, 64, seed=7)
    client.register(SPACE)
    for one in (prompt, other):
        store(client, one)
    async with running_control(node.path) as control:
        assert await control.own("POST", "/v1/flush", {"timeout_s": 60}) == (200, {"done": True})
        assert await ask(control, "/v1/clear", prompt) == {"chunks": 4}
        await ask(control, "/v1/prefetch", prompt)
        assert (await ask(control, "/v1/lookup", prompt))["num_tokens"] == 0
        assert (await ask(control, "/v1/lookup", other))["num_tokens"] == 64
        for wrong in ({"all": True}, {"tokens": None, "only_end": True}, {"text": "two"}):
            assert (await ask(control, "/v1/clear", other, 400, **wrong))["reason"] == "bad_request"
        assert (await ask(control, "/v1/lookup", other))["num_tokens"] == 64
    client.close()
    node.close()
    client = start_node("--config", str(settings)).client()
    client.register(SPACE)
    with client.lookup(prompt.query()) as hit, client.lookup(other.query()) as of_other:
        assert (hit.num_tokens, of_other.num_tokens) == (0, 64)


async def test_a_pinned_prompt_stays_while_others_go(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    pinned, loose = a_prompt(SPACE, 64), SPACE.prompt(list(range(9000, 9064)))
    for prompt in (pinned, loose):
        store(client, prompt)
    async with running_control(node.path) as control:
        pin = await ask(control, "/v1/pins", pinned, 201, ttl_s=3600, owner="me")
        assert (pin["num_tokens"], pin["owner"], pin["namespace"]) == (64, "me", DIGITS)
        assert pin["bytes"] == bytes_of(PLAIN, 64) == 4 * PLAIN.chunk_bytes(0, 16)
        assert 3590 < pin["left_s"] <= 3600
        await asyncio.to_thread(flood, client, SPACE)
        assert (await ask(control, "/v1/lookup", pinned))["num_tokens"] == 64
        assert (await ask(control, "/v1/lookup", loose))["num_tokens"] == 0
        _, found = await control.own("GET", "/v1/pins")
        assert [row["number"] for row in found["pins"]] == [pin["number"]]
        status, _ = await control.own("DELETE", f"/v1/pins/{pin['number']}")
        assert status == 200
        assert (await control.own("DELETE", f"/v1/pins/{pin['number']}"))[0] == 404
        await asyncio.to_thread(flood, client, SPACE)
        assert (await ask(control, "/v1/lookup", pinned))["num_tokens"] == 0
    eventually(lambda: client.status()["pinned_chunks"] == 0)


async def test_a_pin_ends_with_its_time_and_with_the_api(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    async with running_control(node.path) as control:
        await ask(control, "/v1/pins", prompt, 201, ttl_s=0.05)
        for _ in range(2000):
            if client.status()["pinned_chunks"] == 0:
                break
            await asyncio.sleep(0.01)
        assert (await control.own("GET", "/v1/pins"))[1] == {"pins": []}
        await ask(control, "/v1/pins", prompt, 201)
        assert client.status()["pinned_chunks"] == 4
    eventually(lambda: client.status()["pinned_chunks"] == 0)


async def test_pins_take_no_more_than_their_share(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    prompt, more = a_prompt(SPACE, 64), SPACE.prompt(list(range(9000, 9064)))
    for each in (prompt, more):
        store(client, each)
    size = bytes_of(PLAIN, 64)
    async with running_control(node.path, max_pinned_bytes=2 * size - 1) as control:
        first = await ask(control, "/v1/pins", prompt, 201)
        found = await ask(control, "/v1/pins", more, 409)
        assert found["reason"] == "quota" and "control.max_pinned_bytes" in found["detail"]
        assert client.status()["pinned_chunks"] == 4
        await control.own("DELETE", f"/v1/pins/{first['number']}")
        await ask(control, "/v1/pins", more, 201)


async def test_pins_of_a_lost_node_are_gone(start_node: Callable[..., RunningNode]) -> None:
    node = start_node()
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    async with running_control(node.path) as control:
        await ask(control, "/v1/pins", prompt, 201)
        client.close()
        node.close()
        start_node()
        for _ in range(2000):
            if (await control.own("GET", "/health/ready"))[0] == 200:
                break
            await asyncio.sleep(0.01)
        assert (await control.own("GET", "/v1/pins"))[1] == {"pins": []}


async def test_what_is_on_a_disk_is_prefetched(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=256MiB"]\n')
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    async with running_control(node.path) as control:
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        await asyncio.to_thread(flood, client, SPACE)
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        before = client.status()["counters"].get("kvhold_promoted_chunks", 0)
        await ask(control, "/v1/prefetch", prompt)
        for _ in range(2000):
            if client.status()["counters"].get("kvhold_promoted_chunks", 0) >= before + 4:
                break
            await asyncio.sleep(0.01)
        found = await ask(control, "/v1/lookup", prompt)
        assert found["sources"] == {"ram": 64}


BAD_ORDERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/lookup", {"tokens": [1 << 40]}, "bad_request"),
    ("/v1/lookup", {"tokens": ["a"]}, "bad_request"),
    ("/v1/lookup", {"namespace": "ffff"}, "no_namespace"),
    ("/v1/pins", {"ttl_s": 0}, "bad_request"),
    ("/v1/pins", {"ttl_s": 1e9}, "bad_request"),
    ("/v1/pins", {"owner": "x" * 101}, "bad_request"),
    ("/v1/pins", {"tokens": [1, 2, 3]}, "not_cached"),
    ("/v1/prefetch", {"token": []}, "bad_request"),
    ("/v1/checksums", {"tokens": [1 << 40]}, "bad_request"),
    ("/v1/checksums", {"namespace": "ffff"}, "no_namespace"),
    ("/v1/lookup", {"tokens": None}, "bad_request"),
    ("/v1/lookup", {"text": "twice"}, "bad_request"),
    ("/v1/pins", {"messages": []}, "bad_request"),
    ("/v1/pins", {"tokens": None, "messages": [{"role": "user"}]}, "bad_request"),
    ("/v1/pins", {"tokens": None, "text": ["a"]}, "bad_request"),
    ("/v1/pins", {"tokens": None, "text": "a"}, "no_tokenizer"),
]


async def test_a_bad_order_pins_nothing(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    async with running_control(node.path) as control:
        for path, more, reason in BAD_ORDERS:
            order = {"namespace": DIGITS, "tokens": [1, 2, 3]} | more
            status, problem = await control.own("POST", path, order)
            assert (400 <= status < 500, problem["reason"]) == (True, reason), more
        assert (await control.own("GET", "/v1/pins"))[1] == {"pins": []}
    assert client.status()["pinned_chunks"] == 0


def test_the_bytes_of_all_groups_count() -> None:
    by_hand = sum(
        2 * HYBRID.chunk_bytes(group, 16) + HYBRID.chunk_bytes(group, 5) for group in range(3)
    )
    assert bytes_of(HYBRID, 37) == by_hand
