"""The chat page in a real Chromium: it shows each answer's cache use, and what goes wrong."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.browsing import Page, browser
from tests.proxy.scripted import Script, ScriptedEngine, Seen, engines_and_proxy

__all__ = ["browser"]

pytestmark = pytest.mark.server

ANSWER = "</p><b>bold</b>"


def answering(cached: int | None, *, gate: asyncio.Event | None = None) -> Script:
    """Answers of two pieces, and usage; gate: awaited between the pieces."""

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path == "/v1/models":
            return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": 400, "completion_tokens": 7, "prompt_tokens_details": details}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for text in ("", ANSWER[:5], ANSWER[5:]):
            delta = {"role": "assistant", "content": text}
            await send(response, {"choices": [{"index": 0, "delta": delta}]})
            if text and gate is not None:
                await gate.wait()
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    return script


async def send(response: web.StreamResponse, event: Any) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def asked(engine: ScriptedEngine) -> list[Any]:
    return [seen.body for seen in engine.seen if seen.path == "/v1/chat/completions"]


async def test_each_answer_shows_what_came_from_the_cache(browser: Any) -> None:
    page = Page(browser)
    async with engines_and_proxy(0, 1, chat=True) as (_, [engine], proxy):
        engine.script = answering(300)
        await asyncio.to_thread(page.open, f"{proxy.url}/chat")
        await asyncio.to_thread(page.until, "#model", "one", "two")
        await asyncio.to_thread(page.type, "#text", "hello\n")
        shown = await asyncio.to_thread(page.until, "article.assistant footer", "answered")
        assert "300 of 400 prompt tokens from the cache" in shown
        assert "first token after 0." in shown
        assert "7 tokens answered" in shown
        assert page.text("article.assistant .body") == ANSWER, "text is never markup"
        assert page.count("article b") == 0

        engine.script = answering(None)
        await asyncio.to_thread(page.click, "#keep")
        await asyncio.to_thread(page.click, "summary")
        await asyncio.to_thread(page.type, "#system", "be brief")
        await asyncio.to_thread(page.type, "#most", "9")
        await asyncio.to_thread(page.type, "#text", "and")
        await asyncio.to_thread(page.click, "#send")
        await asyncio.to_thread(
            page.until, "article:nth-of-type(4) footer", "400 prompt tokens, cache unknown"
        )
        first, second = asked(engine)
        assert first["messages"] == [{"role": "user", "content": "hello"}]
        assert [one["role"] for one in second["messages"]] == [
            *("system", "user", "assistant", "user")
        ]
        assert second["messages"][2]["content"] == ANSWER
        assert first["prompt_cache_key"] == second["prompt_cache_key"]
        assert (first.get("max_tokens"), second["max_tokens"]) == (None, 9)
        assert "prompt_cache_options" not in first
        [hint] = second["kv_transfer_params"]["kvhold"]["hints"]
        assert (hint["action"], hint["ttl_s"]) == ("retain", 1800)

        await asyncio.to_thread(page.click, "#new")
        assert page.count("article") == 0
        assert page.errors == []


async def test_an_answer_can_be_stopped(browser: Any) -> None:
    page, gate = Page(browser), asyncio.Event()
    async with engines_and_proxy(0, 1, chat=True) as (_, [engine], proxy):
        engine.script = answering(0, gate=gate)
        await asyncio.to_thread(page.open, f"{proxy.url}/chat")
        await asyncio.to_thread(page.type, "#text", "hello\n")
        await asyncio.to_thread(page.until, "article.assistant .body", ANSWER[:5])
        await asyncio.to_thread(page.click, "#stop")
        await asyncio.to_thread(page.until, "article.assistant footer", "first token")
        await proxy.assert_nothing_is_held()
        assert page.text("#problem") == ""


async def test_what_goes_wrong_is_said_and_the_question_stays(browser: Any) -> None:
    page = Page(browser)
    async with engines_and_proxy(0, 1, chat=True, api_key="secret") as (_, [engine], proxy):
        engine.script = answering(0)
        await asyncio.to_thread(page.open, f"{proxy.url}/chat")
        await asyncio.to_thread(page.until, "#problem", "API key is needed")
        await asyncio.to_thread(page.type, "#key", "secret\n")
        await asyncio.to_thread(page.until, "#model", "one")
        assert page.text("#problem") == ""

        async def refuse(request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.json_response({"error": {"message": "too <i>long</i>"}}, status=400)

        engine.script = refuse
        await asyncio.to_thread(page.type, "#text", "hello\n")
        assert await asyncio.to_thread(page.until, "#problem", "too") == "too <i>long</i>"
        assert page.count("article") == 0
        assert page.run("return document.querySelector('#text').value") == "hello"


async def test_it_fits_a_phone_and_follows_the_scheme(browser: Any) -> None:
    page, grounds = Page(browser), set()
    async with engines_and_proxy(0, 1, chat=True) as (_, [engine], proxy):
        engine.script = answering(0)
        page.resize(360, 640)
        for scheme in ("light", "dark"):
            page.set_scheme(scheme)
            await asyncio.to_thread(page.open, f"{proxy.url}/chat")
            await asyncio.to_thread(page.type, "#text", "word" * 200 + "\n")
            await asyncio.to_thread(page.until, "article.assistant footer", "answered")
            assert page.run("return document.documentElement.scrollWidth") <= 360
            assert (
                page.run("return document.querySelector('#send').getBoundingClientRect().bottom")
                <= 640
            )
            grounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2


async def test_it_is_off_by_default_and_needs_no_outside_resource() -> None:
    async with engines_and_proxy(0, 1) as (_, _, proxy):
        assert (await proxy.get("/chat"))[0] == 404
    async with engines_and_proxy(0, 1, chat=True, api_key="secret") as (_, _, proxy):
        for path in ("/chat", "/chat.css", "/chat.js"):
            async with proxy.client.get(proxy.url + path) as response:
                assert response.status == 200
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'")
                assert "http" not in await response.text()
        assert (await proxy.post("/chat", {}))[0] in (401, 405)


def test_its_files_are_of_the_package() -> None:
    from kvhold.proxy import pages

    folder = Path(pages.__file__).parent
    assert {name for _, name in pages.FILES.values()} == {
        path.name for path in folder.iterdir() if path.suffix in (".html", ".css", ".js")
    }
