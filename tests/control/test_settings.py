"""Settings and quotas of a running node."""

from typing import Any

from kvhold.core.keys import Namespace
from kvhold.testing.cache import PLAIN, a_prompt, store
from tests.control.running import flood, running_control
from tests.node.nodes import RunningNode, eventually, run_kvhold

SPACE = Namespace("content:1", PLAIN, title="one")
OTHER = Namespace("content:2", PLAIN, title="two")
MIB = 1 << 20

REFUSED: list[tuple[Any, int, str]] = [
    ({"tiers": []}, 409, "tiers cannot change in a running node: tiers are opened"),
    ({"rules": {"plan": True}}, 409, "rules (a section) cannot change"),
    ({"policy": "fifo"}, 409, "policy cannot change in a running node: the order of eviction"),
    ({"event_buffer": 9}, 409, "event_buffer cannot change in a running node: the node reads it"),
    ({"ram_byte": 9}, 409, "did you mean 'ram_bytes'"),
    ({"ram_bytes": "many"}, 409, "settings: ram_bytes = 'many'"),
    ({"ram_bytes": "1TiB"}, 409, "the node has 16777216 bytes"),
    ({"ram_bytes": 0}, 409, "ram_bytes = 0"),
    ({"ram_bytes": 1 << 70}, 400, "cannot be encoded"),
    ({"write_behind_bytes": 0}, 409, "write_behind_bytes = 0"),
    ({"drain_timeout_s": -1}, 409, "drain_timeout_s = -1"),
    ({"log_level": "LOUD"}, 409, "log_level = 'LOUD'"),
    ({"namespace_quotas": [1]}, 409, "namespace_quotas: must be a table"),
    ({"namespace_quotas": {"ffff": 1}}, 404, "no namespace that begins with"),
    ({"namespace_quotas": {SPACE.digest.hex(): "x"}}, 409, "'x'"),
    ([1], 400, "the body"),
]


async def test_what_may_change_is_changed_and_the_rest_is_refused_by_name(
    node: RunningNode,
) -> None:
    client = node.client()
    client.register(SPACE)
    async with running_control(node.path) as control:
        status, before = await control.ask("GET", "/v1/settings")
        assert (status, before["settings"]["ram_bytes"]) == (200, 16 * MIB)
        for changes, expected, told in REFUSED:
            both = changes | {"scrub_interval_s": 7} if isinstance(changes, dict) else changes
            status, problem = await control.own("PATCH", "/v1/settings", both)
            assert (status, told in problem["detail"]) == (expected, True), (changes, problem)
        assert (await control.ask("GET", "/v1/settings"))[1] == before, "all or none"
        changes = {
            "scrub_interval_s": 7.5,
            "drain_timeout_s": 1,
            "write_behind_bytes": "1MiB",
            "log_level": "debug",
        }
        status, after = await control.own("PATCH", "/v1/settings", changes)
        changed = changes | {"write_behind_bytes": MIB, "log_level": "DEBUG"}
        assert (status, after["settings"]) == (200, before["settings"] | changed)
        assert client.status()["scrub"]["interval_s"] == 7.5


async def test_memory_shrinks_to_its_limit_and_to_quotas(node: RunningNode) -> None:
    client = node.client()
    for space in (SPACE, OTHER):
        client.register(space)
        flood(client, space, num_prompts=3)
    prompt = a_prompt(OTHER, 64)
    async with running_control(node.path) as control:
        quota = {"namespace_quotas": {SPACE.digest.hex()[:8]: "256KiB"}}
        _, found = await control.own("PATCH", "/v1/settings", quota)
        assert found["settings"]["namespace_quotas"] == {SPACE.digest.hex(): 256 << 10}, found
        eventually(lambda: client.status()["namespaces"][SPACE.digest.hex()] <= 256 << 10)
        flood(client, SPACE, num_prompts=1)
        assert client.status()["namespaces"][SPACE.digest.hex()] <= 256 << 10
        assert client.status()["namespaces"][OTHER.digest.hex()] > 256 << 10
        await control.own("PATCH", "/v1/settings", {"ram_bytes": "1MiB"})
        eventually(lambda: client.status()["used_bytes"] <= MIB)
        store(client, prompt)
        flood(client, OTHER, num_prompts=3)
        assert 0 < client.status()["used_bytes"] <= MIB
        ended = {"ram_bytes": "16MiB", "namespace_quotas": {SPACE.digest.hex(): 0}}
        _, found = await control.own("PATCH", "/v1/settings", ended)
        assert found["settings"]["namespace_quotas"] == {}
        flood(client, SPACE, num_prompts=3)
        assert client.status()["used_bytes"] > 2 * MIB


def test_they_are_changed_in_a_shell(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    quota = f"namespace_quotas.{SPACE.digest.hex()[:8]}=2MiB"
    done = run_kvhold("settings", "ram_bytes=8MiB", quota, "--socket", str(node.path))
    assert f"ram_bytes = {8 * MIB}" in done.stdout, done.stderr
    assert f"namespace_quotas.{SPACE.digest.hex()} = {2 * MIB}" in done.stdout
