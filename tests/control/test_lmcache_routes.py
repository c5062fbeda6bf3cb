"""The routes of LMCache's controller, on a real node."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.keys import Namespace
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, store
from tests.control.running import running_control, tokens_of
from tests.node.nodes import RunningNode, eventually

SPACE = Namespace("content:1", PLAIN, shards=2, title="one")
OTHER = Namespace("content:2", HYBRID, title="two")
ONE, TWO = SPACE.digest.hex(), OTHER.digest.hex()


def store_both(node: RunningNode) -> None:
    client = node.client()
    for space in (SPACE, OTHER):
        client.register(space)
        for shard in range(space.shards):
            store(client, a_prompt(space, 64), shard=shard)


async def test_a_prompt_is_found_in_each_instance(node: RunningNode) -> None:
    store_both(node)
    client = node.client()
    with client.lookup(a_prompt(OTHER, 64).query()) as hit:
        expected = hit.num_tokens
    async with running_control(node.path) as control:
        order = {"tokens": tokens_of(a_prompt(SPACE, 70))}
        status, found = await control.own("POST", "/lookup", order)
        assert status == 200 and found["event_id"].startswith("lookup-")
        assert found["layout_info"] == {
            ONE: ["LocalCPUBackend", 64],
            TWO: ["LocalCPUBackend", expected],
        }
        _, found = await control.own("POST", "/lookup", {"tokens": [1, 2, 3]})
        assert found["layout_info"] == {}


async def test_an_address_of_this_host_has_an_instance(node: RunningNode) -> None:
    client = node.client()
    async with running_control(node.path) as control:
        order = {"event_id": "mine", "ip": "127.0.0.1"}
        status, problem = await control.ask("POST", "/query_instance", order)
        assert (status, problem["reason"]) == (404, "no_instance")
        client.register(SPACE)
        answered = await control.ask("POST", "/query_instance", order)
        assert answered == (200, {"event_id": "mine", "res": ONE})
        for ip, expected in (("192.0.2.1", 404), ("0.0.0.0", 404), ("host", 400), ("", 400)):
            assert (await control.ask("POST", "/query_instance", {"ip": ip}))[0] == expected, ip
        client.register(OTHER)
        assert (await control.ask("POST", "/query_instance", order))[0] == 409


async def test_an_instance_is_cleared_and_others_stay(node: RunningNode) -> None:
    store_both(node)
    client = node.client()
    async with running_control(node.path) as control:
        order = {"instance_id": ONE, "location": "all"}
        status, found = await control.own("POST", "/clear", order)
        assert (status, found["num_tokens"]) == (200, 64)
    for space, is_left in ((SPACE, False), (OTHER, True)):
        with client.lookup(a_prompt(space, 64).query()) as hit:
            assert bool(hit.num_tokens) == is_left


async def test_a_prompt_is_pinned_for_a_week(node: RunningNode) -> None:
    store_both(node)
    tokens = tokens_of(a_prompt(SPACE, 64))
    async with running_control(node.path) as control:
        order = {"instance_id": ONE, "location": "LocalCPUBackend", "tokens": tokens}
        status, found = await control.own("POST", "/pin", order)
        assert (status, found["num_tokens"]) == (200, 64)
        [pin] = (await control.own("GET", "/v1/pins"))[1]["pins"]
        assert found["event_id"] == f"pin-{pin['number']}"
        assert (pin["owner"], pin["namespace"]) == ("lmcache", ONE)
        assert 6 * 86400 < pin["left_s"] <= 7 * 86400


async def test_a_served_instance_is_healthy(start_node: Callable[..., RunningNode]) -> None:
    node = start_node()
    store_both(node)
    async with running_control(node.path) as control:
        status, found = await control.ask("POST", "/health", {"instance_id": ONE[:9]})
        assert (status, found["error_codes"]) == (200, {"0": 0, "1": 0})
        status, problem = await control.ask("POST", "/health", {"instance_id": "ffff"})
        assert (status, problem["reason"]) == (404, "no_namespace")
        node.close()
        assert (await control.ask("POST", "/health", {"instance_id": ONE}))[0] == 503


async def test_a_prompt_on_a_disk_is_compressed_and_decompressed(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    store_both(node)
    order: dict[str, Any] = {
        "instance_id": ONE,
        "location": "LocalDiskBackend",
        "method": "lossless",
        "tokens": tokens_of(a_prompt(SPACE, 32)),
    }
    async with running_control(node.path) as control:
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        for number, name in enumerate(("compress", "decompress"), 1):
            status, found = await control.own("POST", f"/{name}", order)
            assert (status, found) == (200, {"event_id": f"{name}-{number}", "num_tokens": 0})
            for _ in range(2000):
                event = {"event_id": found["event_id"]}
                _, checked = await control.ask("POST", "/check_finish", event)
                if checked != {"status": "running"}:
                    break
            _, job = await control.ask("GET", f"/v1/jobs/{number}")
            assert checked == {"status": "done"}, job
            assert job["progress"]["replaced"] == 4  # two chunks of two shards
            assert job["codec"] == {"compress": "lossless", "decompress": "raw"}[name]


async def test_all_of_an_instance_moves_to_the_disk_and_memory_alone_is_cleared(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    store_both(node)
    async with running_control(node.path) as control:

        async def places() -> list[str]:
            order = {"namespace": ONE, "tokens": tokens_of(a_prompt(SPACE, 64))}
            return sorted((await control.own("POST", "/v1/lookup", order))[1]["sources"])

        order = {"old_position": [ONE, "ram"], "new_position": [ONE, "LocalDiskBackend"]}
        status, found = await control.own("POST", "/move", order | {"copy": True})
        assert status == 200, found
        event = {"event_id": found["event_id"]}
        for _ in range(2000):
            _, checked = await control.ask("POST", "/check_finish", event)
            if checked != {"status": "running"}:
                break
        assert checked == {"status": "done"}
        assert await places() == ["ram"]
        clear = {"instance_id": ONE, "location": "LocalCPUBackend"}
        status, found = await control.own("POST", "/clear", clear)
        assert (status, found["num_tokens"]) == (200, 64)
        assert await places() == ["disk"]


BAD_ORDERS: list[tuple[str, dict[str, Any], int]] = [
    ("clear", {"location": "LocalDiskBackend"}, 409),
    ("clear", {"location": "ssd"}, 409),
    ("clear", {"instance_id": ""}, 404),
    ("clear", {"instance_id": "ffff"}, 404),
    ("clear", {"tokens": [1]}, 400),
    ("clear", {"location": None}, 400),
    ("pin", {"location": "LocalDiskBackend", "tokens": []}, 409),
    ("pin", {"location": "ram", "tokens": ["a"]}, 400),
    ("pin", {"location": "ram", "tokens": [1 << 40]}, 400),
    ("pin", {"location": "ram"}, 400),
    ("compress", {"method": "raw", "location": "LocalCPUBackend"}, 409),
    ("compress", {"method": "raw", "location": "LocalDiskBackend"}, 409),
    ("compress", {"method": "raw", "instance_id": "", "location": "ram"}, 404),
    ("decompress", {"location": "LocalDiskBackend"}, 400),
    ("lookup", {}, 400),
    ("query_instance", {"ip": 7}, 400),
    ("check_finish", {"event_id": "compress-7"}, 400),
    ("move", {}, 400),
]


async def test_a_bad_order_changes_nothing(node: RunningNode) -> None:
    store_both(node)
    client = node.client()
    async with running_control(node.path) as control:
        for path, more, expected in BAD_ORDERS:
            order = {"instance_id": ONE, "location": "all"} | more
            status, problem = await control.own("POST", f"/{path}", order)
            assert status == expected and problem["detail"], (path, more, problem)
        for event, reason in (("compress-7", "no_job"), ("pin-1", "no_event"), ("", "no_event")):
            status, problem = await control.own("POST", "/check_finish", {"event_id": event})
            assert (status, problem["reason"]) == (404, reason)
        assert (await control.own("GET", "/v1/pins"))[1] == {"pins": []}
        assert (await control.own("GET", "/v1/jobs"))[1] == {"jobs": []}
    with client.lookup(a_prompt(SPACE, 64).query()) as hit:
        assert hit.num_tokens == 64
    eventually(lambda: client.status()["pinned_chunks"] == 0)
