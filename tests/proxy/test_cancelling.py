"""A client that leaves: its request ends at the engines, and nothing stays held."""

import asyncio

import pytest
from aiohttp import web

from tests.proxy.scripted import LONG, Seen, engines_and_proxy, eventually, never


async def test_in_the_queue() -> None:
    async with engines_and_proxy(0, 1, max_running=1) as (_, [decode], proxy):
        decode.script = never
        first = asyncio.create_task(proxy.complete())
        await eventually(lambda: decode.seen)
        second = asyncio.create_task(proxy.complete())
        third = asyncio.create_task(proxy.complete())
        admission = proxy.server._admission
        await eventually(lambda: admission.queued == 2)
        second.cancel()
        await eventually(lambda: admission.queued == 1)
        decode.script = decode.answer
        first.cancel()
        assert (await third)[0] == 200
        assert len(decode.seen) == 2
        assert await proxy.metric("clients_left_total", stage="before") == 1
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize("protocol", ["shared", "nixl"])
async def test_in_the_prefill(protocol: str) -> None:
    async with engines_and_proxy(1, 1, protocol=protocol) as ([prefill], [decode], proxy):
        prefill.script = never
        client = asyncio.create_task(proxy.complete())
        await eventually(lambda: prefill.seen)
        client.cancel()
        await eventually(lambda: prefill.left == 1)
        await proxy.assert_nothing_is_held()
        assert decode.seen == []
        assert await proxy.metric("clients_left_total", stage="prefill") == 1
        assert await proxy.metric("prefills_total", result="abandoned") == 1


async def test_in_both_parts_at_once() -> None:
    async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [decode], proxy):
        prefill.script = decode.script = never
        client = asyncio.create_task(proxy.complete())
        await eventually(lambda: prefill.seen and decode.seen)
        client.cancel()
        await eventually(lambda: (prefill.left, decode.left) == (1, 1))
        await proxy.assert_nothing_is_held()
        assert await proxy.metric("clients_left_total", stage="decode") == 1


async def test_before_the_first_byte() -> None:
    async with engines_and_proxy(1, 1) as ([_], [decode], proxy):
        decode.script = never
        client = asyncio.create_task(proxy.complete())
        await eventually(lambda: decode.seen)
        client.cancel()
        await eventually(lambda: decode.left == 1)
        await proxy.assert_nothing_is_held()


async def test_in_the_middle_of_a_stream() -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await decode.stream(request, 2, asyncio.Event().wait())

    async with engines_and_proxy(1, 1) as ([_], [decode], proxy):
        decode.script = script
        body = {"prompt": LONG, "stream": True}
        async with proxy.client.post(proxy.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            response.close()
        await eventually(lambda: decode.left == 1)
        await proxy.assert_nothing_is_held()


async def test_between_the_parts() -> None:
    async with engines_and_proxy(1, 1, protocol="nixl") as ([prefill], [decode], proxy):

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            client.cancel()
            return await prefill.answer(request, seen)

        prefill.script, decode.script = script, never
        client = asyncio.create_task(proxy.complete())
        await eventually(lambda: client.done())
        await proxy.assert_nothing_is_held()
        await eventually(lambda: len(decode.seen) == decode.left)


async def test_with_half_a_body() -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await eventually(lambda: proxy.server._admission.held_bytes == 1)
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: proxy.server._admission.held_bytes == 0)
        await proxy.assert_nothing_is_held()
        assert decode.seen == []
