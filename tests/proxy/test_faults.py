"""Engines that refuse, die, stop, or answer garbage: a request fails only if no engine is left."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.proxy.scripted import (
    LONG,
    RunningProxy,
    Script,
    ScriptedEngine,
    Seen,
    answers,
    engines_and_proxy,
    eventually,
    never,
    running_proxy,
    writes,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN: dict[str, Callable[[], Script]] = {
    "refuses the request": lambda: answers(400),
    "has no such model": lambda: answers(404),
    "fails": lambda: answers(500),
    "is overloaded": lambda: answers(503),
    "redirects": lambda: answers(302, Location="http://127.0.0.1:1/"),
    "dies before it answers": lambda: writes(b""),
    "dies in its answer": lambda: writes(HEAD + b"Content-Length: 100\r\n\r\n{"),
    "dies in a chunk": lambda: writes(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"),
    "answers garbage": lambda: writes(b"\x00\xff garbage\r\n\r\n"),
    "has an endless header": lambda: writes(HEAD + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n"),
    "has endless headers": lambda: writes(HEAD + b"X-A: a\r\n" * 2_000 + b"\r\n"),
    "does not answer in time": lambda: never,
}


@pytest.mark.parametrize("protocol", ["shared", "nixl", "p2p"])
@pytest.mark.parametrize("fault", [*BROKEN, "refuses connections", "sends endless data"])
async def test_without_its_prefill_the_decode_engine_computes(protocol: str, fault: str) -> None:
    settings = {"protocol": protocol, "prefill_timeout_s": 0.5}
    async with engines_and_proxy(1, 1, **settings) as ([prefill], [decode], proxy):
        if fault == "refuses connections":
            await prefill.stop()
            proxy.engine(prefill).is_up = True  # as long as no probe has noticed
        elif fault == "sends endless data":
            prefill.script = endless
        else:
            prefill.script = BROKEN[fault]()
        status, answer = await proxy.complete()
        assert (status, answer["engine"]) == (200, "decode 0")
        if protocol != "p2p":
            assert decode.seen[-1].params is None
            assert await proxy.metric("prefills_total", result="failed") == 1
        await proxy.assert_nothing_is_held()


async def endless(request: web.Request, seen: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    piece = b" " * (1 << 20)
    for _ in range(1_000):  # the proxy reads 16 MiB
        await response.write(piece)
    raise AssertionError("it was read to its end")


@pytest.mark.parametrize("fault", ["fails", "is overloaded", "dies before it answers"])
async def test_a_prefill_is_tried_at_another_engine(fault: str) -> None:
    async with engines_and_proxy(2, 1) as (prefill, [decode], proxy):
        prefill[0].script = BROKEN[fault]()
        for _ in range(2):
            assert (await proxy.complete())[0] == 200
        assert [len(engine.seen) for engine in prefill][1] == 2
        assert await proxy.metric("prefills_total", result="done") == 2
        assert len(decode.seen) == 2


@pytest.mark.parametrize(
    "fault",
    [
        "fails",
        "is overloaded",
        "dies before it answers",
        "dies in its answer",
        "answers garbage",
        "has an endless header",
        "has endless headers",
        "refuses connections",
    ],
)
async def test_another_decode_engine_answers(fault: str) -> None:
    async with engines_and_proxy(0, 2) as (_, decode, proxy):
        bad, good = decode
        proxy.engine(good).last_chosen = 1e18
        if fault == "refuses connections":
            await bad.stop()
            proxy.engine(bad).is_up = True
        else:
            bad.script = BROKEN[fault]()
        status, answer = await proxy.complete()
        assert (status, answer["engine"]) == (200, "decode 1")
        assert len(bad.seen) == (fault != "refuses connections")
        assert await proxy.metric("retries_total", part="decode") == 1
        assert await proxy.metric("engine_faults_total", role="decode") == 1
        await proxy.assert_nothing_is_held()


async def test_a_stream_that_dies_before_its_first_byte_is_begun_by_another_engine() -> None:
    async with engines_and_proxy(0, 2) as (_, [bad, good], proxy):
        proxy.engine(good).last_chosen = 1e18
        bad.script = writes(SSE)
        body = {"prompt": LONG, "stream": True}
        async with proxy.client.post(proxy.url + "/v1/completions", json=body) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (len(bad.seen), len(good.seen)) == (1, 1)


EVENT = b'data: {"n": 0}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)


async def read_cut_answer(proxy: RunningProxy, path: str, body: Any) -> bytes:
    """Return what comes of an answer without an end."""
    got = b""
    async with proxy.client.post(proxy.url + path, json=body) as response:
        try:
            while piece := await response.content.readany():
                got += piece
        except aiohttp.ClientPayloadError:
            return got
    pytest.fail("the answer has an end")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_stream_that_dies_later_ends_with_an_error_and_is_not_repeated(path: str) -> None:
    async with engines_and_proxy(0, 2) as (_, decode, proxy):
        for engine in decode:
            engine.script = writes(SSE + CHUNK)
        body = {"prompt": LONG, "messages": [], "stream": True}
        got = await read_cut_answer(proxy, path, body)
        assert got.startswith(EVENT)
        *_, last = got.removesuffix(b"\n\n").split(b"\n")
        error = json.loads(last.removeprefix(b"data: "))
        assert "the engine failed" in error["error"]["message"]
        assert (b"event: error" in got) == (path == "/v1/messages")
        assert sum(len(engine.seen) for engine in decode) == 1
        assert await proxy.metric("cut_answers_total") == 1
        await proxy.assert_nothing_is_held()


async def test_an_event_that_is_cut_is_not_completed() -> None:
    half = EVENT[:8]
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = writes(SSE + b"%x\r\n%b\r\n" % (len(half), half))
        body = {"prompt": LONG, "stream": True}
        assert await read_cut_answer(proxy, "/v1/completions", body) == half


async def test_a_stream_that_stops_is_cut() -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await decode.stream(request, 2, asyncio.Event().wait())

    async with engines_and_proxy(0, 1, idle_timeout_s=0.1) as (_, [decode], proxy):
        decode.script = script
        body = {"prompt": LONG, "stream": True}
        async with proxy.client.post(proxy.url + "/v1/completions", json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        await eventually(lambda: decode.left == 1)


async def test_the_only_engine_is_tried_again() -> None:
    """A server may close an idle connection just when it is used."""

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        if len(decode.seen) == 1:
            return await writes(b"")(request, seen)
        return await decode.answer(request, seen)

    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        decode.script = script
        assert (await proxy.complete())[0] == 200
        assert len(decode.seen) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_an_engines_refusal_passes(status: int) -> None:
    async with engines_and_proxy(1, 2) as ([_], decode, proxy):
        for engine in decode:
            engine.script = answers(status)
        assert await proxy.complete() == (status, {"error": {"message": "scripted"}})
        assert sum(len(engine.seen) for engine in decode) == 1


async def test_the_last_engines_error_passes() -> None:
    async with engines_and_proxy(0, 2) as (_, decode, proxy):
        for engine in decode:
            engine.script = answers(503)
        assert await proxy.complete() == (503, {"error": {"message": "scripted"}})
        assert [len(engine.seen) for engine in decode] == [1, 1]


async def test_no_more_engines_are_tried_than_the_setting_allows() -> None:
    async with engines_and_proxy(0, 4, max_attempts=2) as (_, decode, proxy):
        for engine in decode:
            engine.script = writes(b"")
        status, answer = await proxy.complete()
        assert status == 503
        assert "decode engine failed" in answer["error"]["message"]
        assert sum(len(engine.seen) for engine in decode) == 2


async def test_a_request_that_may_have_an_effect_is_not_repeated() -> None:
    async with engines_and_proxy(0, 2) as (_, decode, proxy):
        for engine in decode:
            engine.script = writes(b"")
        assert (await proxy.post("/v1/files", {}))[0] == 503
        assert sum(len(engine.seen) for engine in decode) == 1
        assert (await proxy.get("/v1/models"))[0] == 503
        assert sum(len(engine.seen) for engine in decode) > 2


async def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    async with engines_and_proxy(0, 2, first_byte_timeout_s=0.1) as (_, decode, proxy):
        for engine in decode:
            engine.script = never
        assert (await proxy.complete())[0] == 504
        assert sum(len(engine.seen) for engine in decode) == 1
        await eventually(lambda: sum(engine.left for engine in decode) == 1)


async def test_without_a_decode_engine_requests_are_refused_for_a_while() -> None:
    gone = ScriptedEngine()
    async with running_proxy([], [gone], queue_timeout_s=0.05) as proxy:
        async with proxy.client.post(proxy.url + "/v1/completions", json={"prompt": "x"}) as got:
            assert got.status == 503
            assert int(got.headers["Retry-After"]) >= 1
            assert "queue_timeout_s" in (await got.json())["error"]["message"]
        async with gone:
            await eventually(lambda: proxy.engine(gone).is_up)
            assert (await proxy.complete())[0] == 200


async def test_a_request_waits_for_an_engine_that_restarts() -> None:
    gone = ScriptedEngine()
    async with running_proxy([], [gone]) as proxy:
        waiting = asyncio.create_task(proxy.complete())
        await eventually(lambda: proxy.server._admission.queued == 1)
        async with gone:
            assert (await waiting)[0] == 200
            await proxy.assert_nothing_is_held()


SILENT = {"probe_timeout_s": 0.05, "probe_failures": 2, "prefill_timeout_s": 600}


@pytest.mark.parametrize("protocol", ["shared", "nixl", "p2p"])
async def test_nobody_waits_for_a_prefill_engine_that_is_stopped(protocol: str) -> None:
    async with engines_and_proxy(1, 1, protocol=protocol, **SILENT) as ([prefill], [_], proxy):
        prefill.script, prefill.is_silent = never, True
        assert (await proxy.complete())[0] == 200
        await proxy.assert_nothing_is_held()


async def test_another_engine_answers_for_a_decode_engine_that_is_stopped() -> None:
    async with engines_and_proxy(0, 2, **SILENT) as (_, [stopped, other], proxy):
        proxy.engine(other).last_chosen = 1e18
        stopped.script, stopped.is_silent = never, True
        status, answer = await proxy.complete()
        assert (status, answer["engine"]) == (200, "decode 1")
        assert len(stopped.seen) == 1
        assert await proxy.metric("engine_faults_total", reason="silent") == 1
        await eventually(lambda: stopped.left >= 1)


async def test_the_only_decode_engine_may_be_slow() -> None:
    async with engines_and_proxy(0, 1, **SILENT) as (_, [decode], proxy):
        gate = asyncio.Event()

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            await gate.wait()
            return await decode.answer(request, seen)

        decode.script, decode.is_silent = script, True
        waiting = asyncio.create_task(proxy.complete())
        await eventually(lambda: not proxy.engine(decode).is_up)
        assert (await proxy.get("/health"))[0] == 503
        gate.set()
        assert (await waiting)[0] == 200


async def test_a_bug_of_the_proxy_ends_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: object, request: object, deliver: object) -> None:
        raise RuntimeError("a bug")

    async with engines_and_proxy(1, 1) as (_, [decode], proxy):
        with monkeypatch.context() as patch:
            patch.setattr("kvhold.proxy.forwarding.Forwarder.forward", broken)
            status, answer = await proxy.complete()
        assert (status, answer["error"]["message"]) == (500, "the proxy failed")
        assert "RuntimeError: a bug" in caplog.text
        assert await proxy.metric("refused_total", reason="bug") == 1
        assert (await proxy.complete())[0] == 200
        assert len(decode.seen) == 1
        await proxy.assert_nothing_is_held()
