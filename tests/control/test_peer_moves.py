"""Prompts that go to another host: by the API, by LMCache's route and by the command."""

import asyncio
import json
from typing import Any

from kvhold.testing.cache import a_prompt, read, store
from tests.control.running import RunningControl, running_control, tokens_of
from tests.node.fleets import Fleet, fleet
from tests.node.nodes import SPACE, run_kvhold
from tests.node.test_peer_copies import both_joined, pair_of

__all__ = ["fleet"]

DIGITS = SPACE.digest.hex()


async def ended(control: RunningControl, number: int) -> Any:
    for _ in range(2000):
        progress = (await control.ask("GET", f"/v1/jobs/{number}"))[1]["progress"]
        if progress["done"]:
            return progress
        await asyncio.sleep(0.01)
    raise AssertionError("the job does not end")


async def test_a_prompt_is_moved_to_a_peer_by_the_api_and_by_lmcaches_route(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, there = await asyncio.to_thread(both_joined, first, second)
    one, two = a_prompt(SPACE, 64), a_prompt(SPACE, 64, seed=7)
    for prompt in (one, two):
        store(here, prompt)
    order = {"namespace": DIGITS[:8], "tokens": tokens_of(one), "tier": f"host:{address}"}
    async with running_control(first.path) as control:
        status, job = await control.own("POST", "/v1/move", order)
        assert (status, job["kind"], job["tier"]) == (201, "move", f"host:{address}"), job
        progress = await ended(control, job["number"])
        assert (progress["copied"], progress["dropped"], progress["stopped"]) == (4, 4, "")
        assert here.status()["chunks"] == there.status()["chunks"] == 4
        move = {
            "old_position": [DIGITS, "LocalCPUBackend"],
            "new_position": [f"{DIGITS}@{address}", "LocalCPUBackend"],
            "tokens": tokens_of(two),
            "copy": True,
        }
        status, found = await control.own("POST", "/move", move)
        assert status == 200, found
        progress = await ended(control, int(found["event_id"].removeprefix("move-")))
        assert (progress["copied"], progress["dropped"], progress["stopped"]) == (4, 0, "")
        for prompt in (one, two):
            assert read(there, prompt) == 64, "every byte is compared"
        for wrong in ("host:10.0.0.9:7711", "host:", "host"):
            status, problem = await control.own("POST", "/v1/move", order | {"tier": wrong})
            assert status == 409 and wrong in problem["detail"], problem
        for position in ([f"{DIGITS}@10.0.0.9", "ram"], [f"{DIGITS}@{address}", "disk"]):
            status, problem = await control.own("POST", "/move", move | {"new_position": position})
            assert status == 409 and problem["detail"], position
        assert len((await control.own("GET", "/v1/jobs"))[1]["jobs"]) == 2
    assert here.status()["chunks"] == 4


def test_a_prompt_is_moved_to_a_peer_by_the_command(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, there = both_joined(first, second)
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    file = fleet.folder / "tokens.json"
    file.write_text(json.dumps(tokens_of(prompt)))
    order = ("move", DIGITS[:9], "--tokens", str(file), "--socket", str(first.path), "--to")
    done = run_kvhold(*order, f"host:{address}")
    assert f"host:{address} has 4 chunks" in done.stdout, done.stderr
    assert "4 left memory" in done.stdout and there.status()["chunks"] == 4
    refused = run_kvhold(*order, "host:10.0.0.9:7711")
    assert refused.returncode == 1 and "no peers have this name" in refused.stderr
    assert "Traceback" not in refused.stderr
