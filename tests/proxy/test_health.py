"""Engines that come and go, drain and resume; and the proxy's own readiness and end."""

import asyncio
import json

import pytest

from kvhold.core.proxy_config import ProxyConfig
from kvhold.core.setting import apply
from kvhold.proxy.engines import ProxiedEngine
from kvhold.proxy.faults import EngineFault
from kvhold.proxy.health import HealthProber
from tests.proxy.scripted import (
    RunningProxy,
    ScriptedEngine,
    engines_and_proxy,
    eventually,
    never,
    running_proxy,
)


async def test_an_engine_that_says_it_is_ill_is_not_used_until_it_is_well() -> None:
    async with engines_and_proxy(1, 2) as ([prefill], [ill, well], proxy):
        ill.is_healthy = prefill.is_healthy = False
        await eventually(lambda: not proxy.engine(ill).is_up and not proxy.engine(prefill).is_up)
        for _ in range(3):
            assert (await proxy.complete())[0] == 200
        assert (len(prefill.seen), len(ill.seen), len(well.seen)) == (0, 0, 3)
        assert await proxy.metric("prefills_total", result="no_engine") == 3
        assert await proxy.metric("engine_usable", role="decode") == 1
        ill.is_healthy = prefill.is_healthy = True
        await eventually(lambda: proxy.engine(ill).is_up and proxy.engine(prefill).is_up)
        assert (await proxy.complete())[0] == 200
        assert (len(prefill.seen), len(ill.seen)) == (1, 1)


async def test_one_failed_probe_is_no_illness() -> None:
    async with engines_and_proxy(0, 1, probe_failures=1_000) as (_, [decode], proxy):
        decode.is_healthy = False
        await eventually(lambda: proxy.engine(decode).num_failures >= 2)
        assert (await proxy.complete())[0] == 200
        await decode.stop()  # but refused connections are
        await eventually(lambda: not proxy.engine(decode).is_up)


async def test_an_engine_that_stays_away_is_probed_less_and_less_often() -> None:
    asked = asyncio.Semaphore(0)
    answered = asyncio.Semaphore(0)

    async def probe(engine: ProxiedEngine) -> None:
        asked.release()
        await answered.acquire()
        raise EngineFault("refused", "it is away", is_sent=False)

    settings = {"probe_interval_s": 1, "probe_max_interval_s": 8}
    config = apply(ProxyConfig(), settings, source="test")
    engine = ProxiedEngine("decode", "http://127.0.0.1:1")
    prober = HealthProber([engine], probe, config, on_change=lambda: None)
    pauses = []
    for engine.num_failures in range(1, 7):
        pauses.append(prober._pause_s(engine))
    for pause_s, expected_s in zip(pauses, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * expected_s <= pause_s <= expected_s
    engine.num_failures, engine.is_up = 0, True
    assert prober._pause_s(engine) == 1
    prober.start()
    await asked.acquire()
    answered.release()
    await eventually(lambda: not engine.is_up)
    await prober.close()


async def test_an_engine_that_breaks_connections_is_probed_at_once() -> None:
    probes = asyncio.Semaphore(0)

    async def probe(engine: ProxiedEngine) -> None:
        probes.release()

    config = apply(ProxyConfig(), {"probe_interval_s": 1_000}, source="test")
    engine = ProxiedEngine("decode", "http://127.0.0.1:1")
    prober = HealthProber([engine], probe, config, on_change=lambda: None)
    prober.start()
    await probes.acquire()
    await eventually(lambda: engine.is_up)
    prober.note_fault(engine, EngineFault("timeout", "slow"))
    assert probes.locked()
    prober.note_fault(engine, EngineFault("disconnected", "it broke"))
    assert engine.is_up
    async with asyncio.timeout(60):
        await probes.acquire()
    await prober.close()


async def test_readiness_needs_a_decode_engine() -> None:
    async with engines_and_proxy(1, 1) as (_, [decode], proxy):
        for path in ("/health", "/health/ready"):
            status, text = await proxy.get(path)
            assert status == 200
            assert json.loads(text) == {
                "status": "ready",
                "prefill": {"usable": 1, "all": 1},
                "decode": {"usable": 1, "all": 1},
            }
        decode.is_healthy = False
        await eventually(lambda: not proxy.engine(decode).is_up)
        assert (await proxy.get("/health"))[0] == 503
        assert (await proxy.get("/health/live"))[0] == 200


async def drain(proxy: RunningProxy, what: str, engine: ScriptedEngine) -> None:
    status, answer = await proxy.post(f"/proxy/{what}", {"engine": engine.url})
    assert status == 200
    assert [one["draining"] for one in answer["engines"]] == [what == "drain"]


async def test_an_engine_that_drains_ends_what_it_runs_and_gets_no_more() -> None:
    async with engines_and_proxy(0, 2) as (_, [one, other], proxy):
        one.script = other.script = never
        running = [asyncio.create_task(proxy.complete()) for _ in range(2)]
        await eventually(lambda: one.seen and other.seen)
        await drain(proxy, "drain", one)
        other.script = other.answer
        for _ in range(3):
            assert (await proxy.complete())[0] == 200
        assert (len(one.seen), one.left) == (1, 0)
        text = (await proxy.get("/proxy/engines"))[1]
        shown = {engine["url"]: engine for engine in json.loads(text)["engines"]}
        assert (shown[one.url]["draining"], shown[one.url]["running"]) == (True, 1)
        await drain(proxy, "resume", one)
        one.script = one.answer
        for _ in range(3):
            assert (await proxy.complete())[0] == 200
        assert len(one.seen) > 1
        for task in running:
            task.cancel()
        await proxy.assert_nothing_is_held()


async def test_a_resumed_engine_serves_those_who_wait() -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        await drain(proxy, "drain", decode)
        waiting = asyncio.create_task(proxy.complete())
        await eventually(lambda: proxy.server._admission.queued == 1)
        await drain(proxy, "resume", decode)
        assert (await waiting)[0] == 200


@pytest.mark.parametrize("body", [{}, {"engine": 3}, {"engine": "http://other:1"}, [], "x" * 9_000])
async def test_only_an_engine_of_the_proxy_can_drain(body: object) -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        assert (await proxy.post("/proxy/drain", body))[0] in (400, 404, 413)
        assert proxy.engine(decode).is_usable


async def test_a_proxy_that_ends_lets_requests_end_and_refuses_others() -> None:
    async with engines_and_proxy(0, 1) as (_, [decode], proxy):
        gate = asyncio.Event()
        decode.script = lambda request, seen: decode.stream(request, 2, gate.wait())
        running = asyncio.create_task(proxy.complete())
        await eventually(lambda: decode.seen)
        proxy.server.stop()
        front = proxy.server._front
        assert front is not None
        await eventually(lambda: front.is_draining)
        async with proxy.client.post(proxy.url + "/v1/completions", json={}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
        assert json.loads((await proxy.get("/health"))[1])["status"] == "draining"
        assert not running.done()
        gate.set()
        await eventually(lambda: running.done())
        # the JSON of a stream is none, but it is whole
        with pytest.raises(json.JSONDecodeError):
            running.result()


async def test_what_does_not_end_in_time_is_ended() -> None:
    decode = ScriptedEngine()
    async with decode, running_proxy([], [decode], drain_timeout_s=0.05) as proxy:
        decode.script = never
        running = asyncio.create_task(proxy.complete())
        await eventually(lambda: decode.seen)
        proxy.server.stop()
        await eventually(lambda: running.done() and decode.left == 1)
        assert running.exception() is not None
