"""Prompts by worth: hits, bytes held and seconds saved, in bounded memory."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhold.cache.chores import finish
from kvhold.cache.local import LocalCache
from kvhold.cache.prompt_worths import MOST_KEPT, MOST_SHOWN
from kvhold.cache.state import CacheState
from kvhold.core.config import load_config
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.planning import RequestInfo
from kvhold.core.usage import PromptWorth
from kvhold.node import NodeClient
from kvhold.testing.cache import HYBRID, PLAIN, a_prompt, flood, store
from tests.browsing import Page, browser
from tests.control.running import running_control, tokens_of
from tests.control.test_held import keep
from tests.node.nodes import RunningNode

__all__ = ["browser"]

ACME = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),))
GLOBEX = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),))
MIXED = Namespace("content:1", HYBRID)


@pytest.fixture
def cache() -> Iterator[LocalCache]:
    settings = {"ram_bytes": "16MiB", "huge_pages": "never"}
    with LocalCache(load_config(settings, environ={})) as cache:
        for space in (ACME, GLOBEX, MIXED):
            cache.register(space)
        yield cache


def worths(state: CacheState, tenant: str = "") -> list[PromptWorth]:
    return finish(state.usage.worths_turns(state.reencodings.tenant_of, tenant))


def look(cache: Any, prompt: Prompt, *, session: str = "", had: int = 0, request: str = "") -> int:
    info = RequestInfo(request, session, prompt.num_tokens + 1, had)
    with cache.lookup(prompt.query(), info=info) as hit:
        return int(hit.num_tokens)


def test_requests_that_share_a_beginning_are_one_prompt(cache: LocalCache) -> None:
    shared = a_prompt(ACME, 64)
    store(cache, shared)
    for number in range(5):
        asked = shared.followed_by([1000 * number] * 40)
        assert look(cache, asked, had=16, request=f"r{number}") == 64
    [worth] = worths(cache._state)
    assert (worth.hits, worth.hit_tokens, worth.num_tokens) == (5, 320, 64)
    assert (worth.tenant, worth.namespace) == ("", ACME.digest.hex()), "no tenant has stored it"
    assert worth.prompt == shared.hash_at(3).hex()
    assert worth.held_bytes == worth.nbytes == cache.status()["used_bytes"]
    assert worth.saved_s is None and not worth.pinned
    cache.report_timing("r4", load_s=None, compute_s=0.41)  # 105 tokens, 64 of them found
    assert worths(cache._state)[0].saved_s is None, "too few tokens to tell a speed"
    look(cache, a_prompt(ACME, 100, seed=5), request="computed")
    cache.report_timing("computed", load_s=None, compute_s=1.01)
    [worth] = worths(cache._state)
    assert worth.saved_s == pytest.approx(5 * 48 * 0.01), "what the engine had, saves nothing"


def test_a_session_is_its_latest_turn(cache: LocalCache) -> None:
    for turns in range(1, 4):
        prompt = a_prompt(ACME, 64 * turns)
        keep(cache, ACME, num_tokens=64 * turns)
        assert look(cache, prompt, session="chat") == 64 * turns
    [worth] = worths(cache._state)
    assert (worth.session, worth.hits, worth.hit_tokens) == ("chat", 3, 64 + 128 + 192)
    assert (worth.num_tokens, worth.tenant) == (192, "acme")


def test_bytes_held_follow_evictions_and_pins(cache: LocalCache) -> None:
    long = a_prompt(ACME, 640)
    store(cache, long)
    look(cache, long)
    with cache.lookup(long.query(), uses="none"):
        assert worths(cache._state)[0].pinned
    assert worths(cache._state)[0].hits == 1, "an operator's lookup is no use"
    for key in [long.chunk_key(chunk) for chunk in range(20, 40)]:
        entry = cache._state.ram.find(key)
        assert entry is not None
        cache._state.ram.remove(entry)
    [worth] = worths(cache._state)
    assert worth.held_bytes == pytest.approx(worth.nbytes / 2, rel=0.07)
    flood(cache, GLOBEX)
    assert (worths(cache._state)[0].held_bytes, worths(cache._state)[0].pinned) == (0, False)


def test_prompts_with_windows_and_tails_alone(cache: LocalCache) -> None:
    whole, tail = a_prompt(MIXED, 640), a_prompt(MIXED, 7, seed=3)
    for prompt in (whole, tail):
        store(cache, prompt)
        assert look(cache, prompt) == prompt.num_tokens
    long, short = worths(cache._state)
    assert (long.num_tokens, short.num_tokens) == (640, 7)
    assert long.held_bytes == long.nbytes < cache.status()["used_bytes"], "old windows save nothing"
    assert short.held_bytes == short.nbytes > 0


def test_of_many_prompts_the_most_used_are_kept(cache: LocalCache) -> None:
    often = a_prompt(ACME, 64, seed=7)
    keep(cache, ACME, seed=7)
    keep(cache, GLOBEX)
    state = cache._state
    for number in range(3 * MOST_KEPT):
        look(cache, a_prompt(GLOBEX, 64), session=f"once {number}")
        if number % 3 == 0:
            look(cache, often)
    assert len(state.usage.prompts) == len(state.usage.prompts._prompts._heap) == MOST_KEPT
    found = worths(state)
    assert len(found) == MOST_SHOWN
    assert found[0].prompt == often.hash_at(3).hex() and found[0].hits == MOST_KEPT
    assert [one.tenant for one in worths(state, "acme")] == ["acme"]


def _work(client: NodeClient) -> None:
    for space in (ACME, GLOBEX):
        client.register(space)
        keep(client, space)
        look(client, a_prompt(space, 320, seed=9), request=f"{space.tenant} computes")
    client.report_timing("acme computes", load_s=None, compute_s=32.1)
    for _ in range(3):
        look(client, a_prompt(ACME, 64))
    look(client, a_prompt(GLOBEX, 64), session="chat")


async def test_the_page_shows_them_and_a_tenants_token_its_own(
    node: RunningNode, tmp_path: Path, browser: Any
) -> None:
    await asyncio.to_thread(_work, node.client())
    file, page = tmp_path / "acme", Page(browser)
    file.write_text("t-acme")
    file.chmod(0o600)
    async with running_control(node.path, history_interval_s=0.05) as control:
        prompt = {"namespace": ACME.digest.hex(), "tokens": tokens_of(a_prompt(ACME, 64))}
        assert (await control.own("POST", "/v1/pins", prompt | {"ttl_s": 600}))[0] == 201
        _, found = await control.own("GET", "/v1/prompts")
        first, second = found["prompts"]
        assert (first["tenant"], first["hits"], first["pinned"]) == ("acme", 4, True)
        assert first["saved_s"] == pytest.approx(4 * 64 * 0.1)
        assert (second["tenant"], second["session"]) == ("globex", "chat")
        assert second["saved_s"] is None and second["held_bytes"] == second["nbytes"]
        await asyncio.to_thread(page.open, control.url)
        await asyncio.to_thread(page.until, "#prompts", "acme", "25.6 s", "yes", "session chat")
        assert "unknown" in page.text("#prompts")
        assert page.errors == []
    tokens = {"tenant_read_token_files": {"acme": str(file)}}
    async with running_control(node.path, **tokens) as control:
        status, found = await control.ask(
            "GET", "/v1/prompts", headers={"Authorization": "Bearer t-acme"}
        )
        assert (status, [one["tenant"] for one in found["prompts"]]) == (200, ["acme"])
        assert (await control.ask("GET", "/v1/prompts"))[0] == 401
