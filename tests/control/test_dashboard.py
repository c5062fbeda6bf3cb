"""The dashboard in a real Chromium: it shows why tokens are missed, and opens what is clicked."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhold.core.keys import Namespace
from kvhold.core.planning import ComputeCost
from kvhold.core.store_options import StoreOptions
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill, store
from tests.browsing import Page, browser
from tests.control.running import running_control
from tests.node.nodes import RunningNode

__all__ = ["browser"]

SPACE = Namespace("content:1", PLAIN, title="/models/<b>one</b>")
UPGRADED = Namespace("content:1", PLAIN, revision="2", title="/models/upgraded")
COST = ComputeCost("request-<i>7</i>", 64, step_s=1e-3, token_s=1e-3)


def miss(client: NodeClient, prompt: Any, **more: Any) -> None:
    with client.lookup(prompt.query(), **more):
        pass


def cause_all(client: NodeClient) -> None:
    """Of an expired prompt, an evicted one, and one of a namespace that is new."""
    for space in (SPACE, UPGRADED):
        client.register(space)
    prompt = a_prompt(SPACE, 64)
    names = prompt.chunks()
    with client.reserve(PLAIN, names, store_options=StoreOptions(ttl_s=1)) as reservation:
        fill(reservation, PLAIN, names)
        reservation.commit()
    time.sleep(2.1)
    miss(client, prompt)
    evicted = SPACE.prompt(list(range(9000, 9064)))
    store(client, evicted)
    for number in range(40):
        start = 1_000_000 + 1000 * number
        store(client, SPACE.prompt(list(range(start, start + 640))))
    miss(client, evicted)
    miss(client, a_prompt(UPGRADED, 64))
    last = SPACE.prompt(list(range(1_039_000, 1_039_064)))
    miss(client, last, cost=COST)


async def test_a_fall_of_the_hit_rate_is_explained(node: RunningNode, browser: Any) -> None:
    client = node.client(name="an engine")
    page = Page(browser)
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(cause_all, client)
        await asyncio.to_thread(page.open, control.url)
        shown = await asyncio.to_thread(
            page.until, "#reasons", "expired", "evicted", "never_stored"
        )
        for action in ("rules.ttl_s", "more ram_bytes", "none for new text"):
            assert action in shown
        assert "up" in page.text("#node")
        assert "an engine" in page.text("#clients")
        names = await asyncio.to_thread(page.until, "#namespaces", "upgraded")
        assert "/models/<b>one</b>" in names, "text is never markup"
        assert page.count("#namespaces b") == page.count("#requests i") == 0
        await asyncio.to_thread(page.until, "#requests", "request-<i>7</i>")
        await asyncio.to_thread(page.click, "#requests tr[tabindex]")
        await asyncio.to_thread(page.until, "#requests", "waited", "64 tokens found in ram")
        await asyncio.to_thread(page.click, 'button[data-since="3600"]')
        await asyncio.to_thread(page.until, "#reasons", "evicted")
        assert page.count("#missed svg polygon") >= 3
        assert page.errors == []


async def test_a_tier_that_is_down_is_shown_with_its_fault(
    tmp_path: Path, start_node: Callable[..., RunningNode], browser: Any
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text('tiers = ["redis://127.0.0.1:1/0?breaker_failures=1"]\n')
    node = start_node("--config", str(settings))
    client, page = node.client(), Page(browser)
    client.register(SPACE)
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(miss, client, a_prompt(SPACE, 64))
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#reasons", "tier_down", "kvhold doctor")
        await asyncio.to_thread(page.until, "#tiers", "redis", "not used")


async def test_a_token_is_asked_for_where_reading_needs_one(
    tmp_path: Path, node: RunningNode, browser: Any
) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    file.chmod(0o600)
    page = Page(browser)
    async with running_control(node.path, read_token_file=str(file)) as control:
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#problem", "a token is needed")
        field = browser.find_element("css selector", "#token")
        await asyncio.to_thread(field.send_keys, "s3cret\n")
        await asyncio.to_thread(page.until, "#node", "node")
        assert not browser.find_element("css selector", "#problem").is_displayed()


async def test_without_a_node_it_says_so(tmp_path: Path, browser: Any) -> None:
    page = Page(browser)
    async with running_control(tmp_path / "node.sock") as control:
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#problem", "no node")


async def _until_sampled(server: Any) -> None:
    """The first sample is not counted."""
    for _ in range(2000):
        if (await server._recorder.read("kvhold_up", "60"))["series"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no sample was taken")
