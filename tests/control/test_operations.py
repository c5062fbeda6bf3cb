"""Each operation of the API, on a real node."""

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhold.core.keys import Namespace
from kvhold.core.naming import Facts
from kvhold.testing.cache import PLAIN, a_prompt, store
from tests.control.running import RunningControl, running_control, tokens_of
from tests.node.nodes import PATIENT_S, RunningNode, run_kvhold
from tests.programs import needed_program

SPACE = Namespace(
    "content:1", PLAIN, facts=Facts.of({"vllm.dtype": "'float32'"}), title="/models/one"
)
OTHER = Namespace("content:2", PLAIN, facts=Facts.of({"vllm.dtype": "'float16'"}), title="two")
DIGITS = SPACE.digest.hex()


async def test_health_tells_of_the_node(start_node: Callable[..., RunningNode]) -> None:
    node = start_node()
    async with running_control(node.path) as control:
        assert await control.ask("GET", "/health/live") == (200, {"status": "live"})
        assert await control.ask("GET", "/health/ready") == (200, {"status": "ready"})
        node.close()
        status, problem = await control.ask("GET", "/health/ready")
        assert (status, problem["reason"], problem["status"]) == (503, "no_node", 503)
        assert await control.ask("GET", "/health/live") == (200, {"status": "live"})
        start_node()
        await _until_ready(control)


async def test_it_may_start_before_the_node(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    async with running_control(tmp_path / "node.sock") as control:
        assert (await control.ask("GET", "/health/ready"))[0] == 503
        assert "kvhold_up 0.0" in (await control.ask("GET", "/metrics"))[1]
        start_node()
        await _until_ready(control)
        assert "kvhold_up 1.0" in (await control.ask("GET", "/metrics"))[1]


async def test_status_clients_and_kick(node: RunningNode) -> None:
    client = node.client(name="an engine")
    async with running_control(node.path) as control:
        status, found = await control.ask("GET", "/v1/status")
        assert (status, found["pid"], found["socket"]) == (200, node.pid, str(node.path))
        _, found = await control.own("GET", "/v1/clients")
        rows = {row["name"]: row for row in found["clients"]}
        assert rows.keys() == {"an engine", "kvhold control"}
        number = rows["an engine"]["id"]
        status, found = await control.own("POST", "/v1/kick", {"client": number})
        assert (status, [row["id"] for row in found["clients"]]) == (200, [number])
        status, found = await control.own("POST", "/v1/kick", {"client": "c9999"})
        assert (status, found["reason"]) == (404, "no_client")
    client.close()


async def test_namespaces_and_what_they_are_made_of(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    client.register(OTHER)
    store(client, a_prompt(SPACE, 64))
    async with running_control(node.path) as control:
        _, found = await control.ask("GET", "/v1/namespaces")
        assert {row["title"] for row in found["namespaces"]} == {"/models/one", "two"}
        _, found = await control.ask("GET", f"/v1/namespaces?prefix={DIGITS[:12]}")
        assert [row["digest"] for row in found["namespaces"]] == [DIGITS]
        status, found = await control.ask("GET", f"/v1/namespaces/{DIGITS[:12]}")
        assert (status, found["facts"]["vllm.dtype"]) == (200, "'float32'")
        assert found["bytes"] > 0
        for unknown in ("0" * 32, "xyz", "0" * 33):
            status, problem = await control.ask("GET", f"/v1/namespaces/{unknown}")
            assert (status, problem["reason"]) == (404, "no_namespace"), unknown


async def test_a_namespace_is_cleared_and_others_stay(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    client.register(OTHER)
    one, two = a_prompt(SPACE, 64), a_prompt(OTHER, 64)
    client.register(SPACE.of_spans)
    span = a_prompt(SPACE.of_spans, 32)
    for prompt in (one, two, span):
        store(client, prompt)
    async with running_control(node.path) as control:
        status, found = await control.own("POST", "/v1/clear", {"namespace": DIGITS[:12]})
        assert (status, found) == (200, {"chunks": 6})
        with client.lookup(one.query()) as hit, client.spans([span.query()]) as spans:
            assert (hit.num_tokens, len(spans)) == (0, 0)
        with client.lookup(two.query()) as hit:
            assert hit.num_tokens == 64
        assert (await control.own("POST", "/v1/clear", {"all": True}))[1] == {"chunks": 4}
        with client.lookup(two.query()) as hit:
            assert hit.num_tokens == 0


async def test_decisions_are_listed(node: RunningNode) -> None:
    async with running_control(node.path) as control:
        assert await control.ask("GET", "/v1/decisions?request=x") == (200, {"decisions": []})


async def test_a_tier_is_reencoded_by_a_job(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64))
    async with running_control(node.path) as control:
        assert await control.own("POST", "/v1/flush", {"timeout_s": 60}) == (200, {"done": True})
        name = (await control.ask("GET", "/v1/status"))[1]["tiers"][0]["name"]
        order = {"tier": name, "codec": "lossless", "namespace": DIGITS[:8]}
        status, job = await control.own("POST", "/v1/jobs", order)
        assert (status, job["tier"], job["namespace"]) == (201, name, DIGITS)
        progress = await _until_done(control, job["number"])
        assert progress["stopped"] == "" and progress["replaced"] == progress["seen"] == 4
        _, found = await control.ask("GET", "/v1/jobs")
        assert [row["number"] for row in found["jobs"]] == [job["number"]]
        status, found = await control.own("DELETE", f"/v1/jobs/{job['number']}")
        assert (status, found["progress"]) == (200, progress)
        for wrong in ({"tier": "none"}, {"codec": "none"}, {"namespace": "zz"}):
            status, problem = await control.own("POST", "/v1/jobs", order | wrong)
            assert status in (404, 409) and problem["detail"], wrong
        assert (await control.ask("GET", "/v1/jobs/99"))[0] == 404


async def test_a_prompt_is_moved_by_a_job(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    client, prompt, other = node.client(), a_prompt(SPACE, 64), a_prompt(SPACE, 64, seed=7)
    client.register(SPACE)
    for one in (prompt, other):
        store(client, one)
    order = {"namespace": DIGITS[:8], "tokens": tokens_of(prompt), "tier": "disk"}
    async with running_control(node.path) as control:
        for copy, dropped in ((True, 0), (False, 4)):
            status, job = await control.own("POST", "/v1/move", order | {"copy": copy})
            assert (status, job["kind"]) == (201, "copy" if copy else "move"), job
            progress = await _until_done(control, job["number"])
            assert (progress["copied"], progress["dropped"], progress["failed"]) == (4, dropped, 0)
        assert (await control.ask("GET", "/v1/status"))[1]["chunks"] == 4
        _, found = await control.own("POST", "/v1/lookup", {k: order[k] for k in list(order)[:2]})
        assert found["sources"] == {"disk": 64}
        status, found = await control.own("DELETE", f"/v1/jobs/{job['number']}")
        assert (status, found["progress"]) == (200, progress)
        for wrong, expected in (({"tier": "none"}, 409), ({"tokens": None}, 400)):
            status, problem = await control.own("POST", "/v1/move", order | wrong)
            assert status == expected and problem["detail"], wrong
        move = {
            "old_position": [DIGITS, "LocalCPUBackend"],
            "new_position": [DIGITS, "LocalDiskBackend"],
            "tokens": tokens_of(other),
        }
        status, found = await control.own("POST", "/move", move)
        assert status == 200 and found["event_id"] == "move-3"
        assert (await _until_done(control, 3))["dropped"] == 4
        event = {"event_id": "move-3"}
        assert await control.own("POST", "/check_finish", event) == (200, {"status": "done"})
        back = {"old_position": move["new_position"], "new_position": move["old_position"]}
        assert (await control.own("POST", "/move", move | back))[0] == 200
        assert (await _until_done(control, 4))["dropped"] == 4
        assert (await control.ask("GET", "/v1/status"))[1]["chunks"] == 8
        for elsewhere in ({"old_position": [DIGITS, "disk"]}, {"new_position": ["ff", "disk"]}):
            assert (await control.own("POST", "/move", move | elsewhere))[0] == 409, elsewhere


async def test_a_prompt_and_a_namespace_are_moved_between_tiers_by_jobs_and_in_a_shell(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    far = f"disk://{tmp_path}/far?max_bytes=64MiB&name=far&codec=lossless"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB", "{far}"]\n')
    node = start_node("--config", str(settings))
    client, prompt, other = node.client(), a_prompt(SPACE, 64), a_prompt(SPACE, 64, seed=7)
    client.register(SPACE)
    for one in (prompt, other):
        store(client, one)
    order: dict[str, Any] = {"namespace": DIGITS[:8], "tokens": tokens_of(prompt)}
    order["source"] = "disk"
    async with running_control(node.path) as control:
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        await control.own("POST", "/v1/clear", {"all": True, "tier": "far"})
        for target, dropped in (("far", 4), ("ram", 0)):
            status, job = await control.own("POST", "/v1/move", order | {"tier": target})
            assert (status, job["source"], job["tier"]) == (201, "disk", target)
            progress = await _until_done(control, job["number"])
            assert (progress["copied"], progress["dropped"]) == (4, dropped), target
        whole: dict[str, Any] = {"namespace": DIGITS, "source": "disk", "tier": "far", "all": True}
        _, job = await control.own("POST", "/v1/move", whole)
        assert (await _until_done(control, job["number"]))["dropped"] == 4
        for bad in (whole | {"tokens": [1]}, order | {"tokens": None, "tier": "far"}):
            assert (await control.own("POST", "/v1/move", bad))[0] == 400, bad
        for wrong in ({"source": "dusk"}, {"tier": "disk"}, {"tier": "ram"}):
            status, problem = await control.own("POST", "/v1/move", whole | wrong)
            assert (status, problem["reason"]) == (409, "refused"), wrong
        await control.own("POST", "/v1/clear", {"all": True, "tier": "ram"})
        lookup = {"namespace": DIGITS[:8], "tokens": tokens_of(prompt)}
        _, found = await control.own("POST", "/v1/lookup", lookup)
        assert found["sources"] == {"far": 64}
        await control.own("POST", "/v1/clear", {"all": True, "tier": "ram"})
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(tokens_of(prompt)))
    arguments = ("move", DIGITS[:8], "--tokens", str(file), "--socket", str(node.path))
    done = await asyncio.to_thread(run_kvhold, *arguments, "--from", "far", "--to", "ram")
    assert "ram has 4 chunks" in done.stdout and "4 left far" in done.stdout, done.stderr
    with client.lookup(prompt.query(), wait_s=0) as hit:
        assert (hit.num_tokens, hit.sources) == (64, {"ram": 64})


async def test_the_node_is_stopped(start_node: Callable[..., RunningNode]) -> None:
    node = start_node()
    async with running_control(node.path) as control:
        assert await control.own("POST", "/v1/stop") == (200, {"stopped": True})
        await asyncio.to_thread(node.process.wait, 60)


async def test_metrics_are_those_of_the_node(node: RunningNode) -> None:
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    with client.lookup(prompt.query()):
        pass
    async with running_control(node.path) as control:
        status, text = await control.ask("GET", "/metrics")
    values = _values(text)
    assert status == 200
    assert values['kvhold_hit_tokens_total{source="ram"}'] == 64
    assert values["kvhold_lookup_tokens_total"] == 64
    assert values["kvhold_stored_chunks_total"] == values["kvhold_chunks"] == 4
    assert values["kvhold_arena_bytes"] == 16 << 20
    assert values["kvhold_clients"] == 2


def _values(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def _until_ready(control: RunningControl) -> None:
    for _ in range(2000):
        if (await control.ask("GET", "/health/ready"))[0] == 200:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the node is not seen")


async def _until_done(control: RunningControl, number: int) -> Any:
    for _ in range(2000):
        progress = (await control.ask("GET", f"/v1/jobs/{number}"))[1]["progress"]
        if progress["done"]:
            return progress
        await asyncio.sleep(0.01)
    raise AssertionError("the job does not end")


async def test_prometheus_accepts_the_metrics(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    promtool = needed_program("promtool")
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64))
    assert client.flush(deadline_s=PATIENT_S)
    async with running_control(node.path) as control:
        _, text = await control.ask("GET", "/metrics")
    sizes = set(re.findall(r'kvhold_tier_seconds_count\{operation="put",size="(\w+)"', text))
    assert sizes and sizes <= {"64KiB", "1MiB"}
    checked = await asyncio.to_thread(
        subprocess.run, [promtool, "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout


async def test_the_past_is_recorded_and_told(node: RunningNode, tmp_path: Path) -> None:
    client = node.client()
    client.register(SPACE)
    prompt = a_prompt(SPACE, 64)
    store(client, prompt)
    file = tmp_path / "past"
    async with running_control(
        node.path, history_file=str(file), history_interval_s=0.02
    ) as control:
        path = "/v1/history?since_s=60&metrics=kvhold_hit_tokens,kvhold_chunks"
        found: dict[str, Any] = {}
        for _ in range(2000):
            with client.lookup(prompt.query()):
                pass
            found = (await control.ask("GET", path))[1]["series"]
            if any(found.get("kvhold_hit_tokens{source=ram}", [])):
                break
            await asyncio.sleep(0.01)
        assert found.keys() == {"kvhold_hit_tokens{source=ram}", "kvhold_chunks"}
        assert {value for value in found["kvhold_chunks"] if value is not None} == {4}
        for wrong in ("metrics=nothing", "since_s=x", "since_s=0", "since_s=nan", "since_s=1e9"):
            status, problem = await control.ask("GET", f"/v1/history?{wrong}")
            assert (status, problem["reason"]) == (400, "bad_request"), wrong
    async with running_control(node.path, history_interval_s=0) as control:
        assert (await control.ask("GET", "/v1/history"))[1]["reason"] == "no_history"


async def test_the_dashboard_loads_nothing_from_elsewhere(node: RunningNode) -> None:
    async with running_control(node.path) as control, control.tcp.get(control.url) as response:
        page = await response.text()
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        for name in ("dashboard.js", "dashboard.css"):
            assert f'"{name}"' in page
            status, text = await control.ask("GET", f"/{name}")
            assert status == 200 and text
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text
