"""The outcome of a job outlives the API."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from kvhold.testing.cache import a_prompt, store
from tests.control.running import running_control, tokens_of
from tests.node.nodes import SPACE, RunningNode


async def test_outcomes_outlive_the_api(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(
        f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB", '
        f'"faults+disk://{tmp_path}/slow?faults=put:hang:1&put_timeout_s=60&name=slow"]\n'
    )
    client = start_node("--config", str(settings)).client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    order = {"namespace": SPACE.digest.hex(), "tokens": tokens_of(prompt), "copy": True}
    async with running_control(client.path) as control:
        for number, tier in enumerate(("disk", "slow", "slow"), 1):
            status, job = await control.own("POST", "/v1/move", order | {"tier": tier})
            assert (status, job["number"]) == (201, number)
        await control.own("DELETE", "/v1/jobs/2")
        for _ in range(2000):
            _, done = await control.own("GET", "/v1/jobs/1")
            if done["progress"]["done"]:
                break
            await asyncio.sleep(0.01)
    async with running_control(client.path) as control:
        kept = [(await control.own("GET", f"/v1/jobs/{number}"))[1] for number in (1, 2, 3)]
        first, second, third = kept
        assert first == done and first["progress"]["copied"] == 4
        assert second["progress"]["stopped"] == "cancelled"
        assert third["progress"]["stopped"] == "the API ended"
        _, listed = await control.own("GET", "/v1/jobs")
        assert [row["number"] for row in listed["jobs"]] == [3, 2, 1]
        _, job = await control.own("POST", "/v1/move", order | {"tier": "disk"})
        assert job["number"] == 4
