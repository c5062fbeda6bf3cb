"""How the proxy carries out cache settings: hints to engines, refusals, and the answer's usage."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvhold.proxy import cache_usage
from tests.proxy.scripted import (
    LONG,
    PREFILL_PARAMS,
    RunningProxy,
    Script,
    ScriptedEngine,
    Seen,
    answers,
    engines_and_proxy,
    never,
    writes,
)

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": LONG, "cache_control": HOUR}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
    "cache_control": MARK,
}
CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}
COUNT = "/v1/messages/count_tokens"
SYSTEM_TOKENS = 300


def of_messages(read: int, created: int, rest: int) -> dict[str, int]:
    """vLLM's usage."""
    cache = {"cache_read_input_tokens": read, "cache_creation_input_tokens": created}
    return {"input_tokens": rest, "output_tokens": 5, **cache}


def of_chat(prompt: int, cached: int, created: int | None = None) -> dict[str, Any]:
    details = {"cached_tokens": cached, "created_cache_tokens": created}
    return {"prompt_tokens": prompt, "total_tokens": prompt + 1, "prompt_tokens_details": details}


def engine_with(usage: dict[str, Any], **more: Any) -> Script:
    """It counts SYSTEM_TOKENS for a prefix, and answers with this usage."""

    async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path in (COUNT, "/tokenize"):
            return web.json_response({"input_tokens": SYSTEM_TOKENS})
        if not seen.body.get("stream"):
            return web.json_response({"usage": usage, "number": 1.0, **more})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(usage):
            half = len(event) // 2
            await response.write(event[:half])
            await response.write(event[half:])
        return response

    return script


def events(usage: dict[str, Any]) -> list[bytes]:
    delta = {"type": "message_delta", "usage": usage}
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 1000}}}
    return [
        b'event: x\ndata: {"text": "the \\"usage\\": 1.0"}\n\n',
        b"event: message_start\ndata: " + json.dumps(start).encode() + b"\n\n",
        b"event: message_delta\ndata: " + json.dumps(delta).encode() + b"\n\n",
        b"data: [DONE]\n\n",
    ]


async def usage_of(proxy: RunningProxy, path: str, body: dict[str, Any]) -> Any:
    status, answer = await proxy.post(path, body)
    assert status == 200
    return answer["usage"]


async def last_usage(proxy: RunningProxy, path: str, body: dict[str, Any]) -> Any:
    """Of a stream, whose other events pass unchanged."""
    async with proxy.client.post(proxy.url + path, json={**body, "stream": True}) as response:
        text = await response.read()
    got = text.split(b"\n\n")
    sent = b"".join(events({})).split(b"\n\n")
    assert len(got) == len(sent)
    assert [*got[:2], *got[3:]] == [*sent[:2], *sent[3:]]
    assert got[2].startswith(b"event: message_delta\ndata: ")
    return json.loads(got[2].split(b"data: ")[1])["usage"]


def hints_of(engine: ScriptedEngine) -> Any:
    return engine.seen[-1].params["kvhold"]["hints"]


class TestHints:
    async def test_breakpoints_become_retains_of_both_engines(self) -> None:
        async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
            decode.script = engine_with({})
            assert (await proxy.post("/v1/messages", MESSAGES))[0] == 200
            assert [seen.path for seen in decode.seen] == [COUNT, "/v1/messages"]
            assert decode.seen[0].body["system"] == MESSAGES["system"]
            assert hints_of(decode) == hints_of(prefill)
            assert hints_of(decode) == [
                {
                    "id": "system.0.cache_control 1h",
                    "action": "retain",
                    "ttl_s": 3600,
                    "num_tokens": SYSTEM_TOKENS,
                },
                {"id": "cache_control 5m", "action": "retain", "ttl_s": 300},
            ]
            assert await proxy.metric("retains_total", result="asked") == 2
            await proxy.assert_nothing_is_held()

    async def test_a_prefix_is_counted_once(self) -> None:
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with({})
            for _ in range(3):
                await proxy.post("/v1/messages", MESSAGES)
            assert [seen.path for seen in decode.seen].count(COUNT) == 1
            await proxy.post("/v1/messages", {**MESSAGES, "system": [{"text": "", **MARKED}]})
            assert [seen.path for seen in decode.seen].count(COUNT) == 2

    @pytest.mark.parametrize(
        "script",
        [
            answers(500),
            answers(404),
            writes(b"HTTP/1.1 200 OK\r\n\r\n{"),
            writes(b'HTTP/1.1 200 OK\r\n\r\n{"input_tokens": 0}'),
            writes(b'HTTP/1.1 200 OK\r\n\r\n{"input_tokens": "many"}'),
            writes(b""),
        ],
    )
    async def test_a_prefix_that_no_engine_counts_is_left_out(self, script: Script) -> None:
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):

            async def counts_nothing(request: web.Request, seen: Seen) -> web.StreamResponse:
                return await (script if seen.path == COUNT else decode.answer)(request, seen)

            decode.script = counts_nothing
            assert (await proxy.post("/v1/messages", MESSAGES))[0] == 200
            assert [hint["id"] for hint in hints_of(decode)] == ["cache_control 5m"]
            assert await proxy.metric("retains_total", result="unplaced") == 1

    async def test_a_clients_own_hints_stay(self) -> None:
        own = {"store": True, "hints": [{"action": "demote"}]}
        body = {**CHAT, "prompt_cache_retention": "24h"}
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            params = {"kvhold": own, "max_load_tokens": 1}
            await proxy.post("/v1/chat/completions", {**body, "kv_transfer_params": params})
            [demote, retain] = hints_of(decode)
            assert (demote, retain["ttl_s"]) == ({"action": "demote"}, 86_400)
            assert decode.seen[-1].params["max_load_tokens"] == 1
            assert decode.seen[-1].params["kvhold"]["store"] is True

    @pytest.mark.parametrize(
        "params", [{"kvhold": {"hints": [{"action": "demote"}] * 16}}, {"kvhold": 5}, 7]
    )
    async def test_params_without_room_for_a_hint_pass_unchanged(self, params: Any) -> None:
        body = {**CHAT, "prompt_cache_retention": "24h", "kv_transfer_params": params}
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with({})
            assert (await proxy.post("/v1/chat/completions", body))[0] == 200
            assert decode.seen[-1].params == params

    async def test_responses_keep_their_whole_prompt(self) -> None:
        body = {"input": LONG, "prompt_cache_options": {"ttl": "12h"}, "n": 18446744073709551616}
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            assert (await proxy.post("/v1/responses", body))[0] == 200
            assert [hint["ttl_s"] for hint in hints_of(decode)] == [43_200]
            assert b"18446744073709551616" in decode.seen[-1].raw

    async def test_a_cache_key_is_a_session_of_the_proxy_only(self) -> None:
        async with engines_and_proxy(0, 3) as (_, decode, proxy):
            for _ in range(6):
                body = {**CHAT, "prompt_cache_key": "k"}
                assert (await proxy.post("/v1/chat/completions", body))[0] == 200
            assert sorted(len(engine.seen) for engine in decode) == [0, 0, 6]
            assert all(seen.body == body for engine in decode for seen in engine.seen)

    async def test_they_may_be_left_to_the_engine(self) -> None:
        async with engines_and_proxy(0, 1, cache_settings=False) as (_, [decode], proxy):
            decode.script = engine_with(of_messages(100, 200, 700))
            bad = {**MESSAGES, "cache_control": "bad"}
            assert await usage_of(proxy, "/v1/messages", bad) == of_messages(100, 200, 700)
            assert [seen.body for seen in decode.seen] == [bad]


class TestRefusals:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
    async def test_openais_form_names_the_field(self, path: str) -> None:
        async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
            status, answer = await proxy.post(path, {"prompt_cache_options": {"ttl": "1h"}})
            assert status == 400
            assert answer["error"]["param"] == "prompt_cache_options.ttl"
            assert answer["error"]["type"] == "invalid_request_error"
            assert "'30m' or '12h'" in answer["error"]["message"]
            assert prefill.seen == decode.seen == []
            assert await proxy.metric("refused_total", reason="bad_request") == 1
            await proxy.assert_nothing_is_held()

    async def test_anthropics_form_names_the_field(self) -> None:
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            body = {**MESSAGES, "cache_control": {"type": "ephemeral", "ttl": "1d"}}
            assert await proxy.post("/v1/messages", body) == (
                400,
                {
                    "type": "error",
                    "error": {
                        "type": "invalid_request_error",
                        "message": "cache_control.ttl: must be '5m' or '1h'",
                    },
                },
            )
            assert decode.seen == []


MARKED = {"type": "text", "cache_control": HOUR}
RECONCILED = [
    # vLLM's read, created and rest of 1,000 tokens -> 1h, 5m and what is left
    ((0, 900, 100), (SYSTEM_TOKENS, 600, 100)),
    ((200, 700, 100), (100, 600, 100)),
    ((500, 400, 100), (0, 400, 100)),
    ((900, 0, 100), (0, 0, 100)),
]


class TestUsage:
    @pytest.mark.parametrize(("engine", "expected"), RECONCILED)
    @pytest.mark.parametrize("ask", [usage_of, last_usage])
    async def test_computed_tokens_are_divided_at_breakpoints(
        self, engine: tuple[int, ...], expected: tuple[int, ...], ask: Any
    ) -> None:
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with(of_messages(*engine))
            hour, short, rest = expected
            assert await ask(proxy, "/v1/messages", MESSAGES) == {
                "input_tokens": rest,
                "output_tokens": 5,
                "cache_read_input_tokens": engine[0],
                "cache_creation_input_tokens": hour + short,
                "cache_creation": {
                    "ephemeral_1h_input_tokens": hour,
                    "ephemeral_5m_input_tokens": short,
                },
            }

    async def test_without_a_breakpoint_nothing_is_created(self) -> None:
        plain = {"messages": MESSAGES["messages"], "max_tokens": 9}
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with(of_messages(200, 700, 100))
            usage = await usage_of(proxy, "/v1/messages", plain)
            assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (200, 800)
            assert usage["cache_creation_input_tokens"] == 0

    async def test_what_the_prefill_engine_computed_is_not_read_from_the_cache(self) -> None:
        async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
            prefill.script = engine_with(of_messages(300, 600, 100))
            decode.script = engine_with(of_messages(900, 0, 100))
            usage = await usage_of(proxy, "/v1/messages", MESSAGES)
            assert (usage["cache_read_input_tokens"], usage["input_tokens"]) == (300, 100)
            assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == 600

    @pytest.mark.parametrize("protocol", ["shared", "nixl"])
    async def test_of_two_engines_the_smaller_hit_counts(self, protocol: str) -> None:
        async with engines_and_proxy(1, 1, protocol=protocol) as ([prefill], [decode], proxy):
            prefill.script = engine_with(of_chat(1000, 300), kv_transfer_params=PREFILL_PARAMS)
            decode.script = engine_with(of_chat(1000, 900))
            usage = await usage_of(proxy, "/v1/chat/completions", CHAT)
            assert usage == of_chat(1000, 300)
            decode.script = engine_with(of_chat(1000, 0))
            assert await usage_of(proxy, "/v1/chat/completions", CHAT) == of_chat(1000, 0)

    async def test_a_prefill_that_failed_changes_nothing(self) -> None:
        async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
            prefill.script = answers(400)
            decode.script = engine_with(of_chat(1000, 900))
            assert await usage_of(proxy, "/v1/chat/completions", CHAT) == of_chat(1000, 900)

    async def test_a_prefill_engine_that_does_not_tell_leaves_it_unknown(self) -> None:
        async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
            prefill.script = engine_with({"prompt_tokens": 1000})
            decode.script = engine_with(of_chat(1000, 900))
            usage = await usage_of(proxy, "/v1/chat/completions", CHAT)
            assert usage["prompt_tokens_details"] is None
            decode.script = engine_with(of_messages(900, 50, 50))
            usage = await usage_of(proxy, "/v1/messages", MESSAGES)
            assert usage["input_tokens"] == 1000
            assert not usage.get("cache_read_input_tokens")

    @pytest.mark.parametrize("ask", [usage_of, last_usage])
    async def test_a_decode_engine_may_answer_before_the_prefill_engine(self, ask: Any) -> None:
        answered = asyncio.Event()

        async def late(request: web.Request, seen: Seen) -> web.StreamResponse:
            await answered.wait()
            return await engine_with(of_chat(1000, 300))(request, seen)

        async def early(request: web.Request, seen: Seen) -> web.StreamResponse:
            answered.set()
            return await engine_with(of_chat(1000, 900))(request, seen)

        async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [decode], proxy):
            prefill.script, decode.script = late, early
            assert await ask(proxy, "/v1/chat/completions", CHAT) == of_chat(1000, 300)

    async def test_a_prefill_engine_that_never_answers_leaves_it_unknown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache_usage, "_PREFILL_END_S", 0.01)
        async with engines_and_proxy(1, 1, protocol="p2p") as ([prefill], [decode], proxy):
            prefill.script, decode.script = never, engine_with(of_chat(1000, 900))
            usage = await usage_of(proxy, "/v1/chat/completions", CHAT)
            assert usage["prompt_tokens_details"] is None
            await proxy.assert_nothing_is_held()

    async def test_openais_written_tokens_are_those_of_breakpoints(self) -> None:
        body = {**CHAT, "prompt_cache_options": {"mode": "implicit"}}
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with(of_chat(1000, 300, 600))
            details = (await last_usage(proxy, "/v1/chat/completions", body))[
                "prompt_tokens_details"
            ]
            assert (details["cached_tokens"], details["cache_write_tokens"]) == (300, 600)
            usage = await usage_of(proxy, "/v1/chat/completions", CHAT)
            assert usage == of_chat(1000, 300, 600)

    async def test_several_prompts_have_no_cached_tokens(self) -> None:
        """vLLM tells those of the last prompt only."""
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = engine_with(of_chat(1000, 300))
            usage = await usage_of(proxy, "/v1/completions", {"prompt": ["a", "b"]})
            assert usage["prompt_tokens_details"] is None
            assert await usage_of(proxy, "/v1/completions", {"prompt": ["a"]}) == of_chat(1000, 300)

    @pytest.mark.parametrize(
        "raw",
        [b'{"usage": null, "x": 1.0}', b'{"usage": {"input_tokens": 1}}', b"[1.0]", b"{", b"\xff"],
    )
    async def test_an_answer_without_usage_passes_unchanged(self, raw: bytes) -> None:
        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.Response(body=raw, content_type="application/json")

        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = script
            plain = {**MESSAGES, "system": "s"}
            async with proxy.client.post(proxy.url + "/v1/messages", json=plain) as response:
                assert await response.read() == raw

    async def test_an_error_passes_unchanged(self) -> None:
        usage = of_messages(1, 2, 3)

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.json_response({"usage": usage}, status=400)

        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = script
            plain = {**MESSAGES, "system": "s"}
            assert await proxy.post("/v1/messages", plain) == (400, {"usage": usage})

    async def test_other_fields_of_an_answer_pass_byte_by_byte(self) -> None:
        raw = b'{"big": 18446744073709551616, "usage": %s, "f": 0.10000000000000000001}'
        sent = raw % json.dumps(of_messages(10, 0, 5)).encode()

        async def script(request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.Response(body=sent, content_type="application/json")

        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = script
            plain = {**MESSAGES, "system": "s"}
            async with proxy.client.post(proxy.url + "/v1/messages", json=plain) as response:
                text = await response.read()
            assert b"18446744073709551616" in text
            assert b"0.10000000000000000001" in text
            assert json.loads(text)["usage"]["cache_read_input_tokens"] == 10

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_answer_that_breaks_off_is_cut(self, stream: bool) -> None:
        kind = b"text/event-stream" if stream else b"application/json"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: 5000000\r\n\r\n" % kind
        part = b'data: {"a": 1}\n\ndata: {"us' if stream else b'{"usage": {"input'
        async with engines_and_proxy(0, 1) as (_, [decode], proxy):
            decode.script = writes(head + part)
            plain = {**MESSAGES, "system": "s", "stream": stream}
            async with proxy.client.post(proxy.url + "/v1/messages", json=plain) as response:
                assert response.status == 200
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            assert await proxy.metric("cut_answers_total") == 1
            await proxy.assert_nothing_is_held()
