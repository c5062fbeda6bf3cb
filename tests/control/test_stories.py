"""The story of a request, without a planner: on its route, and as a waterfall in Chromium."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhold.core.keys import Namespace
from kvhold.core.planning import RequestInfo
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, flood, store
from tests.browsing import Page, browser
from tests.control.running import running_control
from tests.node.nodes import PATIENT_S, RunningNode

__all__ = ["browser"]

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),))
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),))


def look(client: NodeClient, space: Namespace, request: str, *, more: int = 0) -> int:
    prompt = a_prompt(space, 640).followed_by(list(range(more)))
    info = RequestInfo(request, f"session of {request}", prompt.num_tokens + 1)
    with client.lookup(prompt.query(), info=info, wait_s=PATIENT_S) as hit:
        client.report_timing(request, load_s=0.02, compute_s=0.08)
        return hit.num_tokens


async def test_a_tenants_token_reads_its_own_stories(node: RunningNode, tmp_path: Path) -> None:
    client = node.client()
    for space in (ACME, GLOBEX):
        client.register(space)
        for number in range(25):
            look(client, space, f"{space.tenant} {number}")
    files = {}
    for name in ("acme", "read"):
        files[name] = tmp_path / name
        files[name].write_text(f"t-{name}")
        files[name].chmod(0o600)
    tokens = {
        "tenant_read_token_files": {"acme": str(files["acme"])},
        "read_token_file": str(files["read"]),
    }
    async with running_control(node.path, **tokens) as control:
        for query, tenants in (("", {"acme"}), ("?request=globex", set())):
            _, found = await control.ask(
                "GET", f"/v1/decisions{query}", headers={"Authorization": "Bearer t-acme"}
            )
            assert {one["tenant"] for one in found["decisions"]} == tenants
        _, found = await control.ask(
            "GET", "/v1/decisions?request=acme%207", headers={"Authorization": "Bearer t-read"}
        )
        [story] = found["decisions"]
        assert (story["request"], story["session"]) == ("acme 7", "session of acme 7")
        assert (story["num_tokens"], story["reason"]) == (641, "never_stored")
        assert (story["load_s"], story["compute_s"]) == (0.02, 0.08)
        assert story["alternatives"] == {}
        assert (await control.ask("GET", "/v1/decisions"))[0] == 401


async def test_the_page_tells_what_was_found_where_and_when(
    tmp_path: Path, start_node: Callable[..., RunningNode], browser: Any
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB&name=nvme"]\n')
    client = start_node("--config", str(settings)).client(name="an <i>engine</i>")
    client.register(ACME)
    await asyncio.to_thread(store, client, a_prompt(ACME, 640))
    assert client.flush(deadline_s=PATIENT_S)
    await asyncio.to_thread(flood, client, ACME)
    assert look(client, ACME, "cmpl-<b>9</b>", more=32) == 640
    page = Page(browser)
    async with running_control(client.path, history_interval_s=0.05) as control:
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.type, "#find", "cmpl")
        await asyncio.to_thread(
            page.until, "#requests", "cmpl-<b>9</b>", "640", "an <i>engine</i>", "never stored"
        )
        page.run("document.querySelector('#requests tr[tabindex]').click()")
        told = await asyncio.to_thread(
            page.until, "#requests .story", "640 tokens found in nvme", "33 tokens not found"
        )
        assert "tenant: acme, session: session of cmpl-<b>9</b>" in told
        for step in ("waited", "loaded", "20.0 ms", "computed", "80.0 ms"):
            assert step in page.text(".fall")
        begins = page.run(
            "return [...document.querySelectorAll('.fall .track div')]"
            ".map((one) => one.getBoundingClientRect()).map((one) => [one.left, one.right])"
        )
        waited, loaded, computed = begins
        assert waited[1] <= loaded[0] + 3 and loaded[1] <= computed[0] + 3
        assert computed[1] - computed[0] > 3 * (loaded[1] - loaded[0])
        page.resize(390, 800)
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert page.count("#requests b") == page.count("#requests i:not(.legend i)") == 0
        assert page.errors == []
