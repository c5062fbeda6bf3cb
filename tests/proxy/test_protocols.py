"""What the two engines of a request are told about the hand-over, by each protocol."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.scripted import (
    LONG,
    PREFILL_PARAMS,
    ScriptedEngine,
    Seen,
    answers,
    engines_and_proxy,
    eventually,
    never,
)

FORGED = {
    "kvhold": {"store": False},
    "do_remote_prefill": True,
    "remote_host": "10.9.9.9",
    "remote_prefiller": {"remote_host": "10.9.9.9"},
    "kv_hint": {"source_control_endpoint": "10.9.9.9"},
}
OWN = {"kvhold": {"store": False}}


@pytest.mark.parametrize("protocol", ["shared", "nixl", "p2p"])
async def test_clients_cannot_name_hosts_or_blocks(protocol: str) -> None:
    async with engines_and_proxy(1, 1, protocol=protocol) as ([prefill], [decode], proxy):
        assert (await proxy.complete(kv_transfer_params=FORGED))[0] == 200
        assert (await proxy.complete("short", kv_transfer_params=FORGED))[0] == 200
        for seen in (*prefill.seen, *decode.seen):
            assert b"10.9.9.9" not in seen.raw
            assert seen.params["kvhold"] == {"store": False}
        assert decode.seen[1].params == OWN


async def test_shared_storage_tells_the_engines_nothing() -> None:
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        assert (await proxy.complete())[0] == 200
        assert prefill.seen[0].params is None
        assert decode.seen[0].params is None


async def test_nixl_gives_the_prefill_engines_answer_to_the_decode_engine() -> None:
    async with engines_and_proxy(1, 1, protocol="nixl") as ([prefill], [decode], proxy):
        assert (await proxy.complete(kv_transfer_params=OWN))[0] == 200
        assert prefill.seen[0].params == {
            **OWN,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        assert decode.seen[0].params == {**OWN, **PREFILL_PARAMS}
        assert (decode.seen[0].body["max_tokens"], decode.seen[0].body["prompt"]) == (8, LONG)


@pytest.mark.parametrize(
    "content", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": 3}, [], "garbage", None]
)
async def test_nixl_without_usable_fields_lets_the_decode_engine_compute(content: Any) -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response(content)

    async with engines_and_proxy(1, 1, protocol="nixl") as ([prefill], [decode], proxy):
        prefill.script = script
        assert (await proxy.complete())[0] == 200
        assert (len(prefill.seen), decode.seen[0].params) == (1, None)
        assert await proxy.metric("prefills_total", result="failed") == 1


@pytest.mark.parametrize("protocol", ["nixl", "p2p"])
@pytest.mark.parametrize(
    "fields",
    [{"prompt": [LONG, LONG]}, {"n": 2}, {"best_of": 2}, {"use_beam_search": True}],
)
async def test_one_hand_over_is_for_one_answer(protocol: str, fields: dict[str, Any]) -> None:
    async with engines_and_proxy(1, 1, protocol=protocol) as ([prefill], [decode], proxy):
        status, _ = await proxy.post("/v1/completions", {"prompt": LONG, **fields})
        assert status == 200
        assert (len(prefill.seen), decode.seen[0].params) == (0, None)


async def test_nixl_blocks_are_not_fetched_twice() -> None:
    """The first decode engine that fetches them may have freed them."""
    async with engines_and_proxy(1, 2, protocol="nixl") as (_, decode, proxy):
        for engine in decode:
            engine.script = answers(500)
        assert (await proxy.complete())[0] == 500
        params = [seen.params for engine in decode for seen in engine.seen]
        assert sorted(params, key=str) == [None, PREFILL_PARAMS]


async def test_nixl_blocks_that_nobody_has_fetched_go_to_the_next_engine() -> None:
    async with engines_and_proxy(1, 2, protocol="nixl") as (_, decode, proxy):
        gone, other = decode
        proxy.engine(other).last_chosen = 1e18  # so the other one is chosen first
        await gone.stop()
        proxy.engine(gone).is_up = True  # as long as no probe has noticed
        assert (await proxy.complete())[0] == 200
        assert [seen.params for seen in other.seen] == [PREFILL_PARAMS]


def is_paired(prefill: Seen, decode: Seen) -> bool:
    name = prefill.params["remote_decoder"]["kv_request_id"]
    return bool(
        prefill.params == {"remote_decoder": {"kv_request_id": name}}
        and decode.params
        == {
            "remote_prefiller": {
                "kv_request_id": name,
                "remote_host": "10.0.0.1",
                "remote_port": 7777,
            }
        }
    )


async def test_p2p_asks_both_engines_at_once() -> None:
    both = asyncio.Barrier(2)

    def meets(engine: ScriptedEngine) -> Any:
        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            await both.wait()
            return await engine.answer(request, seen)

        return script

    async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [decode], proxy):
        prefill.script, decode.script = meets(prefill), meets(decode)
        headers = {"X-Request-Id": "always-the-same"}
        for _ in range(2):
            body = {"prompt": LONG}
            assert (await proxy.post("/v1/completions", body, **headers))[0] == 200
        pairs = list(zip(prefill.seen, decode.seen, strict=True))
        assert all(is_paired(*pair) for pair in pairs)
        names = {pair[0].params["remote_decoder"]["kv_request_id"] for pair in pairs}
        assert len(names) == 2
        assert "always-the-same" not in names
        await proxy.assert_nothing_is_held()


@pytest.mark.parametrize("status", [400, 503])
async def test_p2p_without_its_prefill_asks_the_decode_engine_again(status: int) -> None:
    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.params is not None:
            return await never(request, seen)  # it waits for the prefill engine
        return await decode.answer(request, seen)

    async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [decode], proxy):
        prefill.script, decode.script = answers(status), script
        assert (await proxy.complete())[0] == 200
        assert [seen.params is None for seen in decode.seen] == [False, True]
        await eventually(lambda: decode.left == 1)
        assert await proxy.metric("retries_total") == 0
        await proxy.assert_nothing_is_held()


async def test_p2p_ends_a_prefill_that_nobody_waits_for() -> None:
    async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [_], proxy):
        prefill.script = never
        assert (await proxy.complete())[0] == 200
        if prefill.seen:  # the answer may have been faster
            await eventually(lambda: prefill.left == 1)
        assert await proxy.metric("prefills_total", result="abandoned") == 1
        await proxy.assert_nothing_is_held()
