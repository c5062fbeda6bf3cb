"""Which engine gets which part of a request, and what of it passes unchanged."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from tests.proxy.scripted import (
    LONG,
    ScriptedEngine,
    Seen,
    answers,
    engines_and_proxy,
    eventually,
    never,
)

IDS = list(range(300))


async def test_a_prompt_goes_to_a_prefill_engine_and_then_unchanged_to_a_decode_engine() -> None:
    raw = (
        b'{"prompt": "' + LONG.encode() + b'", "temperature": 0.10000000000000000001,\n'
        b'"max_tokens": 7, "min_tokens": 3, "stream": true, "stream_options": {"x": 1}, "n": 1,'
        b' "seed": 18446744073709551616}'
    )
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        url = URL(proxy.url + "/v1/completions?a=%2F", encoded=True)
        async with proxy.client.post(url, data=raw) as response:
            assert response.status == 200
            await response.read()
        [first], [second] = prefill.seen, decode.seen
        assert second.raw == raw
        assert first.path == second.path == "/v1/completions?a=%2F"
        assert first.body.keys() == {"prompt", "temperature", "max_tokens", "seed"}
        assert (first.body["prompt"], first.body["max_tokens"]) == (LONG, 1)
        assert b"0.10000000000000000001" in first.raw
        assert b"18446744073709551616" in first.raw
        assert await proxy.metric("prefills_total", result="done") == 1
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_chats_and_messages_have_a_prefill_too(path: str) -> None:
    body = {
        "messages": [{"role": "user", "content": LONG}],
        "tools": [{"name": "t"}],
        "max_completion_tokens": 9,
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        assert (await proxy.post(path, body))[0] == 200
        assert decode.seen[0].body == body
        assert prefill.seen[0].body == {
            "messages": body["messages"],
            "tools": body["tools"],
            "max_completion_tokens": 1,
            "max_tokens": 1,
        }


@pytest.mark.parametrize(
    ("fields", "result"),
    [
        ({"prompt": "short"}, "short"),
        ({"prompt": IDS[:255]}, "short"),
        ({"prompt": ["short", "too"]}, "short"),
        ({"prompt": IDS[:256]}, "done"),
        ({"prompt": ["short", LONG]}, "done"),
        ({"prompt": LONG, "n": 2}, "done"),
        ({"prompt": LONG, "prompt_logprobs": 0}, "unsupported"),
        ({"prompt": LONG, "echo": True, "logprobs": 1}, "unsupported"),
        ({"prompt": LONG, "echo": True}, "done"),
        ({"prompt_embeds": "x" * 999}, "unsupported"),
    ],
)
async def test_a_prefill_engine_is_asked_only_if_it_can_help(
    fields: dict[str, Any], result: str
) -> None:
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        status, _ = await proxy.post("/v1/completions", {"max_tokens": 4, **fields})
        assert status == 200
        assert len(prefill.seen) == (result == "done")
        assert len(decode.seen) == 1
        assert await proxy.metric("prefills_total", result=result) == 1


async def test_a_prompt_that_goes_on_from_an_answered_one_has_no_prefill() -> None:
    async with engines_and_proxy(1, 2, skip_answered_s=60) as ([prefill], _, proxy):

        async def prefills_of(path: str = "/v1/completions", **fields: Any) -> int:
            before = len(prefill.seen)
            assert (await proxy.post(path, {"max_tokens": 4, **fields}))[0] == 200
            return len(prefill.seen) - before

        assert await prefills_of(prompt=LONG * 3) == 1
        assert await prefills_of(prompt=LONG * 3) == 0
        assert await prefills_of(prompt=LONG * 3 + "more " * 50) == 0
        assert await prefills_of(prompt=LONG * 3 + "x" * 3_000) == 1
        assert await prefills_of(prompt="y" + LONG * 3) == 1
        assert await prefills_of(prompt=LONG * 3, model="other") == 1
        assert await prefills_of(prompt=LONG * 3, cache_salt="other") == 1
        assert await prefills_of(prompt=[LONG, LONG]) == 1
        assert await prefills_of(prompt=[LONG, LONG]) == 1, "several prompts are not remembered"
        chat = "/v1/chat/completions"
        turns = [{"role": "user", "content": LONG * 3}]
        assert await prefills_of(chat, messages=turns) == 1
        turns += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
        assert await prefills_of(chat, messages=turns) == 0
        assert await prefills_of(chat, messages=turns, tools=[{"name": "t"}]) == 1
        assert await proxy.metric("prefills_total", result="hit") == 3


async def test_a_prompt_that_no_engine_answered_is_not_remembered() -> None:
    async with engines_and_proxy(1, 1, skip_answered_s=60) as ([prefill], [decode], proxy):
        decode.script = answers(400)
        for expected in (1, 2):
            assert (await proxy.complete(LONG))[0] == 400
            assert len(prefill.seen) == expected


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        ("short", False),
        ([{"type": "text", "text": "short"}], False),
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], True),
        ("é" * 200, True),  # a token may be one byte
    ],
)
async def test_a_chat_is_short_only_if_it_cannot_be_long(content: Any, asked: bool) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    async with engines_and_proxy(1, 1) as ([prefill], [_], proxy):
        assert (await proxy.post("/v1/chat/completions", body))[0] == 200
        assert len(prefill.seen) == asked


async def test_messages_that_think_have_no_prefill() -> None:
    """An engine refuses a budget that is not below `max_tokens`."""
    body = {
        "messages": [{"role": "user", "content": LONG}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 2048,
    }
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        assert (await proxy.post("/v1/messages", body))[0] == 200
        assert (len(prefill.seen), len(decode.seen)) == (0, 1)


async def test_a_stream_passes_piece_by_piece() -> None:
    gate = asyncio.Event()

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await decode.stream(request, 3, gate.wait())

    async with engines_and_proxy(1, 1) as ([_], [decode], proxy):
        decode.script = script
        body = {"prompt": LONG, "stream": True}
        async with proxy.client.post(proxy.url + "/v1/completions", json=body) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert await response.content.readany() == b'data: {"n": 0}\n\n'
            gate.set()
            rest = await response.content.read()
        assert rest == b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'


async def test_other_paths_go_to_a_decode_engine_with_their_query_and_body() -> None:
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        assert await proxy.get("/v1/models?x=1") == (200, '{"engine": "decode 0"}')
        body = {"input": LONG, "kv_transfer_params": {"remote_host": "evil"}}
        assert (await proxy.post("/v1/embeddings", body))[0] == 200
        form = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        url = proxy.url + "/v1/audio/transcriptions"
        async with proxy.client.post(url, data=form, headers=headers) as response:
            assert response.status == 200
        async with proxy.client.head(proxy.url + "/v1/models") as response:
            assert response.status == 200
        assert [seen.path for seen in decode.seen] == [
            "/v1/models?x=1",
            "/v1/embeddings",
            "/v1/audio/transcriptions",
            "/v1/models",
        ]
        assert decode.seen[1].body == {"input": LONG, "kv_transfer_params": {}}
        assert decode.seen[2].raw == form
        assert prefill.seen == []


@pytest.mark.parametrize(
    "path",
    ["/pause", "/collective_rpc", "/v1/load_lora_adapter", "/v1/../pause", "/v1/%2e%2e/pause", "/"],
)
async def test_paths_that_change_an_engine_are_not_served(path: str) -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert b" 404 " in await reader.readline()
        writer.close()
        await writer.wait_closed()
        assert decode.seen == []


async def test_a_proxy_without_prefill_engines_spreads_requests() -> None:
    async with engines_and_proxy(0, 2) as (_, decode, proxy):
        for _ in range(4):
            assert (await proxy.complete())[0] == 200
        assert [len(engine.seen) for engine in decode] == [2, 2]


async def test_the_engine_with_the_least_work_is_chosen() -> None:
    """A prefill engine's work is tokens, a decode engine's is requests."""
    async with engines_and_proxy(2, 2) as (prefill, decode, proxy):
        for engine in prefill:
            engine.script = never
        long = asyncio.create_task(proxy.complete(IDS * 10))
        await eventually(lambda: any(engine.seen for engine in prefill))
        busy = next(engine for engine in prefill if engine.seen)
        free = next(engine for engine in prefill if engine is not busy)
        others = []
        for number in range(1, 6):  # 5 x 300 tokens are less than 3,000
            others.append(asyncio.create_task(proxy.complete(IDS)))
            await eventually(lambda: len(free.seen) == number)  # noqa: B023
        assert len(busy.seen) == 1
        for task in (long, *others):
            task.cancel()
        await asyncio.gather(long, *others, return_exceptions=True)
        await eventually(lambda: sum(engine.left for engine in prefill) == 6)

        for engine in decode:
            engine.script = never
        tasks = [asyncio.create_task(proxy.complete("short")) for _ in range(6)]
        await eventually(lambda: sum(len(engine.seen) for engine in decode) == 6)
        assert [len(engine.seen) for engine in decode] == [3, 3]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await proxy.assert_nothing_is_held()


def sent(engines: list[ScriptedEngine]) -> list[list[str]]:
    return [[seen.body["mark"] for seen in engine.seen if seen.body] for engine in engines]


@pytest.mark.parametrize("by", ["header", "session_id", "prompt_cache_key", "user", "metadata"])
async def test_a_session_stays_with_its_engines(by: str) -> None:
    async with engines_and_proxy(3, 3) as (prefill, decode, proxy):
        for session in ("a", "b", "c", "d"):
            for _ in range(4):
                body: dict[str, Any] = {"prompt": LONG, "mark": session}
                headers = {}
                if by == "header":
                    headers = {"X-Session-ID": session}
                elif by == "metadata":
                    body["metadata"] = {"user_id": session}
                else:
                    body[by] = session
                assert (await proxy.post("/v1/completions", body, **headers))[0] == 200
        for engines in (prefill, decode):
            marks = sent(engines)
            assert sorted(mark for one in marks for mark in one) == sorted("abcd" * 4)
            for session in "abcd":
                assert sorted(one.count(session) for one in marks) == [0, 0, 4]


async def test_a_session_leaves_an_engine_that_is_much_busier() -> None:
    async with engines_and_proxy(0, 2, session_slack=2) as (_, decode, proxy):
        for engine in decode:
            engine.script = never
        tasks = [asyncio.create_task(proxy.complete("x", user="one")) for _ in range(8)]
        await eventually(lambda: sum(len(engine.seen) for engine in decode) == 8)
        # 3 more than the other one: then every second one leaves
        assert sorted(len(engine.seen) for engine in decode) == [3, 5]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("given", ["mine-1", "", "x" * 129])
async def test_a_request_has_one_name_at_all_engines(given: str) -> None:
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        headers = {"X-Request-Id": given} if given else {}
        body = {"prompt": LONG}
        async with proxy.client.post(
            proxy.url + "/v1/completions", json=body, headers=headers
        ) as response:
            name = response.headers["X-Request-Id"]
        assert (name == given) == (given == "mine-1")
        assert name
        for [seen] in (prefill.seen, decode.seen):
            assert seen.headers["x-request-id"] == name
        status, text = await proxy.get("/nothing", **{"X-Request-Id": "mine-2"})
        assert (status, json.loads(text)["error"]["code"]) == (404, 404)


async def test_header_values_pass_byte_for_byte() -> None:
    value = "é".encode()

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        assert (b"X-B", value) in request.raw_headers
        return web.json_response({}, headers={"X-C": value.decode()})

    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = script
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-A: \xff\r\nX-B: " + value
        writer.write(head + b"\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"X-C: " + value in answer
        assert "x-a" not in decode.seen[0].headers


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "FOO"])
async def test_unusual_methods_are_refused(method: str) -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
        writer.write(f"{method} /v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] in (b"405", b"400", b"404")
        writer.close()
        await writer.wait_closed()
        assert decode.seen == []


async def test_headers_of_one_connection_do_not_pass() -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({}, headers={"X-Engine": "1", "Keep-Alive": "timeout=5"})

    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = script
        headers = {
            "Connection": "keep-alive, X-Mine",
            "X-Mine": "1",
            "X-Other": "2",
            "TE": "trailers",
            "x-prefiller-host-port": "evil:1",
            "X-data-parallel-rank": "1",
        }
        url = proxy.url + "/v1/completions"
        async with proxy.client.post(url, json={"prompt": "x"}, headers=headers) as response:
            assert response.headers["X-Engine"] == "1"
            assert "Keep-Alive" not in response.headers
        got = decode.seen[0].headers.keys()
        assert {"x-other", "x-data-parallel-rank"} <= got
        assert not got & {"x-mine", "te", "x-prefiller-host-port"}
