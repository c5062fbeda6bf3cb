"""Too much, too large, too slow: what is refused, and that it costs nothing afterwards."""

import asyncio
import io
import json
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.scripted import (
    LONG,
    RunningProxy,
    Seen,
    engines_and_proxy,
    eventually,
    never,
)


async def raw_request(proxy: RunningProxy, request: bytes) -> bytes:
    """Send bytes, and return all that comes until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
    with suppress(ConnectionError):
        writer.write(request)
        await writer.drain()
    answer = b""
    with suppress(ConnectionError):
        answer = await reader.read()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return answer


def head(*lines: str) -> bytes:
    text = ("POST /v1/completions HTTP/1.1", "Host: x", *lines, "", "")
    return "\r\n".join(text).encode()


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_large_body_is_refused_before_it_is_read(is_chunked: bool) -> None:
    async with engines_and_proxy(0, 1, max_body_bytes="1KiB") as (_, [decode], proxy):
        if is_chunked:
            request = head("Transfer-Encoding: chunked") + b"401\r\n" + b" " * 0x401
        else:
            request = head("Content-Length: 1000000000")
        answer = await raw_request(proxy, request)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"proxy.max_body_bytes" in answer
        assert decode.seen == []
        fits = b'{"prompt": "' + b"a" * 1010 + b'"}'
        async with proxy.client.post(proxy.url + "/v1/completions", data=fits) as response:
            assert response.status == 200
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize(
    "lines",
    [
        ("X-A: " + "a" * 20_000, "Connection: close"),
        ("X-A: a",) * 5_000,
    ],
    ids=["a long one", "many"],
)
async def test_large_headers_are_refused(lines: tuple[str, ...]) -> None:
    async with engines_and_proxy(0, 1, max_header_bytes="16KiB") as (_, [decode], proxy):
        answer = await raw_request(proxy, head(*lines))
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/1.1 431 "))
        assert decode.seen == []
        assert (await proxy.complete())[0] == 200


async def test_bodies_together_are_bounded() -> None:
    async with engines_and_proxy(0, 1, max_held_bytes=2_000) as (_, [decode], proxy):
        decode.script = never
        first = asyncio.create_task(proxy.complete("a" * 1_500))
        await eventually(lambda: decode.seen)
        status, answer = await proxy.complete("b" * 1_500)
        assert status == 503
        assert "proxy.max_held_bytes" in answer["error"]["message"]
        first.cancel()
        await proxy.assert_nothing_is_held()
        decode.script = decode.answer
        assert (await proxy.complete("b" * 1_500))[0] == 200


async def test_a_full_queue_refuses_and_says_when_to_try_again() -> None:
    async with engines_and_proxy(0, 2, max_running=1, max_queued=2) as (_, decode, proxy):
        gate = asyncio.Event()

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            await gate.wait()
            return web.json_response({})

        for engine in decode:
            engine.script = script
        tasks = [asyncio.create_task(proxy.complete()) for _ in range(4)]
        admission = proxy.server._admission
        await eventually(lambda: (admission.running, admission.queued) == (2, 2))
        await eventually(lambda: [len(engine.seen) for engine in decode] == [1, 1])
        url = proxy.url + "/v1/completions"
        async with proxy.client.post(url, json={"prompt": LONG}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "overloaded_error"
        assert await proxy.metric("refused_total", reason="queue_full") == 1
        gate.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 4
        await proxy.assert_nothing_is_held()


async def test_the_queue_is_served_in_its_order() -> None:
    async with engines_and_proxy(0, 1, max_running=1) as (_, [decode], proxy):
        order: list[str] = []
        gates = {name: asyncio.Event() for name in "abc"}

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            order.append(seen.body["mark"])
            await gates[seen.body["mark"]].wait()
            return web.json_response({})

        decode.script = script
        tasks = []
        for number, name in enumerate("abc"):
            tasks.append(asyncio.create_task(proxy.complete(mark=name)))
            admission = proxy.server._admission
            await eventually(lambda: admission.running + admission.queued == number + 1)  # noqa: B023
        for name in "abc":
            gates[name].set()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"]


async def test_a_request_does_not_wait_for_ever() -> None:
    settings = {"max_running": 1, "queue_timeout_s": 0.05}
    async with engines_and_proxy(0, 1, **settings) as (_, [decode], proxy):
        decode.script = never
        first = asyncio.create_task(proxy.complete())
        await eventually(lambda: decode.seen)
        status, answer = await proxy.complete()
        assert status == 503
        assert "proxy.queue_timeout_s" in answer["error"]["message"]
        first.cancel()
        await proxy.assert_nothing_is_held()


async def test_a_body_that_does_not_arrive_is_refused() -> None:
    async with engines_and_proxy(0, 1, client_timeout_s=0.1) as (_, [decode], proxy):
        answer = await raw_request(proxy, head("Content-Length: 10") + b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert decode.seen == []
        await proxy.assert_nothing_is_held()


async def test_a_client_that_does_not_read_is_dropped() -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await decode.stream(request, 1_000_000)

    async with engines_and_proxy(0, 1, client_timeout_s=0.1) as (_, [decode], proxy):
        decode.script = script
        body = b'{"prompt": "x", "stream": true}'
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port, limit=1)
        writer.write(head(f"Content-Length: {len(body)}") + body)
        await eventually(lambda: proxy.server._metrics.refused.labels("slow_client")._value.get())
        await eventually(lambda: decode.left == 1)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        del reader
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"text"',
        b"\xff",
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"prompt": NaN}',
        b'{"prompt": "x", "kv_transfer_params": {"a": NaN}}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"session_id": "\xff"}',
        b"",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
async def test_a_body_that_is_not_json_is_refused(path: str, body: bytes) -> None:
    """Engines would read some of these; then fields of theirs would pass unseen."""
    if path == "/v1/embeddings" and not body:
        return
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        async with proxy.client.post(proxy.url + path, data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert prefill.seen == decode.seen == []
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": None},
        {"prompt": 3},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [{}, None]},
        {"prompt": {"a": 1}},
        {"messages": 3},
        {"messages": [3, {"content": [3]}]},
        {"n": "many"},
        {"n": None},
        {"kv_transfer_params": 3},
        {"metadata": 3},
        {"user": 3, "session_id": {}},
        {},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_odd_values_are_for_the_engine_to_refuse(path: str, fields: dict[str, Any]) -> None:
    async with engines_and_proxy(1, 1, protocol="nixl", min_prefill_tokens=0) as (
        _,
        [decode],
        proxy,
    ):
        assert (await proxy.post(path, fields))[0] == 200
        assert (
            decode.seen[-1].body.items()
            >= {
                name: value for name, value in fields.items() if name != "kv_transfer_params"
            }.items()
        )


async def test_compressed_requests_are_refused() -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        headers = {"Content-Encoding": "gzip"}
        url = proxy.url + "/v1/completions"
        async with proxy.client.post(url, data=b"x", headers=headers) as response:
            assert response.status == 415
        assert decode.seen == []


async def test_a_compressed_answer_passes_as_it_is() -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "gzip, deflate"
        response = web.json_response({"text": "a" * 1_000})
        response.enable_compression(web.ContentCoding.gzip)
        return response

    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = script
        headers = {"Accept-Encoding": "gzip, deflate"}
        url = proxy.url + "/v1/completions"
        async with proxy.client.post(url, json={"prompt": "x"}, headers=headers) as response:
            assert response.headers["Content-Encoding"] == "gzip"
            assert await response.json() == {"text": "a" * 1_000}


async def test_a_large_answer_passes_whole() -> None:
    content = bytes(range(256)) * (5 << 12)  # 5 MiB

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/octet-stream")

    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = script
        async with proxy.client.post(proxy.url + "/v1/audio/speech", json={}) as response:
            assert await response.read() == content


async def test_a_large_request_passes_whole() -> None:
    prompt = "é" * (3 << 20)
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        body = io.BytesIO(json.dumps({"prompt": prompt}, ensure_ascii=False).encode())
        async with proxy.client.post(proxy.url + "/v1/completions", data=body) as response:
            assert response.status == 200
        assert prefill.seen[0].body["prompt"] == decode.seen[0].body["prompt"] == prompt


async def test_many_requests_at_once_are_all_answered() -> None:
    """Some with engines that come and go."""
    async with engines_and_proxy(2, 2, max_running=8, max_queued=200) as (prefill, decode, proxy):
        tasks = [asyncio.create_task(proxy.complete(mark=n)) for n in range(100)]
        await eventually(lambda: sum(len(engine.seen) for engine in decode) > 10)
        await prefill[0].stop()
        await decode[0].stop()
        until = time.monotonic() + 60
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() < until
        assert not [one for one in found if isinstance(one, aiohttp.ClientError)]
        assert [one for one in found if not isinstance(one, tuple) or one[0] != 200] == []
        await proxy.assert_nothing_is_held()
