"""The hit rate fell: a person finds the reason in the dashboard in three clicks, in Chromium."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhold.core.keys import Namespace
from kvhold.core.store_options import StoreOptions
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, fill
from kvhold_lab.servers.redis import RedisServer
from tests.browsing import Page, browser
from tests.control.running import running_control
from tests.control.test_dashboard import _until_sampled
from tests.node.nodes import PATIENT_S, RunningNode
from tests.tiers.conftest import server_or_skip

__all__ = ["browser"]

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),), title="/models/one")
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),), title="/models/one")
UPGRADED = Namespace("content:1", PLAIN, revision="2", title="/models/one")
MOST_CLICKS = 3

Fall = Callable[[], None]


class Person:
    """Reads the page, and clicks at most three times."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._left = MOST_CLICKS

    async def click(self, selector: str) -> None:
        assert self._left, f"more than {MOST_CLICKS} clicks"
        self._left -= 1
        await asyncio.to_thread(self._page.click, selector)

    async def sees(self, selector: str, *words: str) -> str:
        return await asyncio.to_thread(self._page.until, selector, *words)


def keep(client: NodeClient, space: Namespace, start: int, *, ttl_s: float | None = None) -> Any:
    prompt = space.prompt(list(range(start, start + 640)))
    names = prompt.chunks()
    options = StoreOptions(tenant=space.tenant, ttl_s=ttl_s)
    with client.reserve(PLAIN, names, store_options=options) as reservation:
        fill(reservation, PLAIN, names)
        reservation.commit()
    return prompt


def look(client: NodeClient, prompt: Any, *, tokens: int) -> None:
    with client.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        assert hit.num_tokens == tokens


async def finds(
    node: RunningNode, page: Page, good: Any, fall: Fall, reason: str, *told: str
) -> None:
    """good: a prompt that is found before
    fall: makes the hit rate fall
    told: words of the reason's details
    """
    client = node.client()
    async with running_control(node.path, history_interval_s=0.05) as control:
        await _until_sampled(control.server)
        await asyncio.to_thread(look, client, good, tokens=640)
        await asyncio.to_thread(page.open, control.url)
        person = Person(page)
        await person.sees("#numbers", "100.0 %")
        await asyncio.to_thread(fall)
        await person.click('button[data-since="3600"]')
        for _ in range(200):  # until the sample of the fall is there
            if "100.0 %" not in await person.sees("#numbers", "of tokens found"):
                break
            await asyncio.to_thread(page.run, "show()")
            await asyncio.sleep(0.05)
        await person.sees("#reasons", reason)
        await person.click(f'#reasons tr[data-reason="{reason}"]')
        await person.sees("#reasons tr.evidence", *told)
        assert page.errors == []


async def test_a_tier_is_down(
    tmp_path: Path, start_node: Callable[..., RunningNode], browser: Any
) -> None:
    with server_or_skip(RedisServer) as redis:
        url = f"redis://127.0.0.1:{redis.port}/0?breaker_failures=1&name=store"
        settings = tmp_path / "kvhold.toml"
        settings.write_text(f'tiers = ["{url}"]\n')
        node = start_node("--config", str(settings))
        client = node.client()
        client.register(ACME)
        prompt = keep(client, ACME, 0)
        assert client.flush(deadline_s=PATIENT_S)

        def fall() -> None:
            with client.copy("store", prompt.query(), drop=True) as copying:
                copying.wait(time.monotonic() + PATIENT_S)
            redis.kill()
            look(client, prompt, tokens=0)

        await finds(node, Page(browser), prompt, fall, "tier_down", "tier store is not used")


async def test_one_tenant_evicts_another(node: RunningNode, browser: Any) -> None:
    client = node.client()
    for space in (ACME, GLOBEX):
        client.register(space)
    prompt = keep(client, ACME, 0)

    def fall() -> None:
        for number in range(40):
            keep(client, GLOBEX, 1_000_000 + 1000 * number)
        look(client, prompt, tokens=0)

    await finds(
        node, Page(browser), prompt, fall, "evicted", "tenant globex holds", "100 % of the used"
    )


async def test_an_upgrade_makes_a_new_namespace(node: RunningNode, browser: Any) -> None:
    client = node.client()
    client.register(ACME)
    prompt = keep(client, ACME, 0)

    def fall() -> None:
        time.sleep(1.1)
        client.register(UPGRADED)
        look(client, UPGRADED.prompt(prompt.tokens), tokens=0)

    page = Page(browser)
    new = f"{UPGRADED.digest.hex()[:16]} (/models/one) is here since"
    await finds(
        node, page, prompt, fall, "never_stored", new, "a new namespace, which begins empty"
    )
    shown = page.text("#reasons tr.evidence")
    assert shown.index(UPGRADED.digest.hex()[:16]) < shown.index(ACME.digest.hex()[:16])


async def test_chunks_outlive_their_time(node: RunningNode, browser: Any) -> None:
    client = node.client()
    client.register(ACME)
    good, short = keep(client, ACME, 0), keep(client, ACME, 5000, ttl_s=1)

    def fall() -> None:
        time.sleep(2.1)
        look(client, short, tokens=0)

    await finds(node, Page(browser), good, fall, "expired", "rules.ttl_s")
