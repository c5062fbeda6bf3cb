"""Laws of the parts that do no I/O: reading prompts, choosing engines, the queue."""

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhold.core.proxy_config import ProxyConfig
from kvhold.core.setting import apply
from kvhold.net.addresses import split_address
from kvhold.proxy.admission import Admission, ProxyOverloaded
from kvhold.proxy.engines import EnginePool, ProxiedEngine, make_pools
from kvhold.proxy.headers import answer_headers, request_headers
from kvhold.proxy.prompts import KINDS, NotAnInference, read_fields, read_inference, session_of
from kvhold.proxy.refusals import ProxyRefusal

texts = st.text(st.characters(codec="utf-8"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(["prompt", "messages", "n", "user", "metadata", "stream", "echo"]) | texts,
    values,
    max_size=6,
)


@given(bodies, st.sampled_from(sorted(KINDS)), st.booleans())
def test_any_body_is_read_and_its_values_pass(body: dict[str, Any], path: str, ascii: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii).encode()
    fields, safe = read_fields(raw)
    session_of(fields)
    inference = read_inference(path, fields)
    if "kv_transfer_params" not in body:
        assert safe == raw
    with_params = json.loads(inference.with_params({"a": 1}))
    assert with_params.pop("kv_transfer_params") == {"a": 1}
    assert with_params == {name: value for name, value in body.items() if name in with_params}
    prefill = json.loads(inference.prefill_body({}))
    assert prefill.pop("max_tokens") == 1
    assert prefill.items() <= body.items() if "max_completion_tokens" not in body else True


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        fields, _ = read_fields(raw)
        session_of(fields)
        read_inference("/v1/completions", fields)
    except NotAnInference:
        return
    assert isinstance(json.loads(raw), dict)


@given(st.lists(texts, min_size=1, max_size=4), st.booleans())
def test_a_prompt_has_at_most_one_token_for_each_byte(parts: list[str], is_chat: bool) -> None:
    content: Any = {"prompt": parts[0]}
    text = parts[0]
    if is_chat:
        content = {"messages": [{"role": "user", "content": part} for part in parts]}
        text = "".join(parts)
    for ascii in (True, False):
        fields, _ = read_fields(json.dumps(content, ensure_ascii=ascii).encode())
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        most = read_inference(path, fields).most_tokens
        assert most is not None
        assert most >= len(text.encode())


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=4))
def test_the_length_of_token_ids_is_exact(prompts: list[list[int]]) -> None:
    fields, _ = read_fields(json.dumps({"prompt": prompts}).encode())
    several = read_inference("/v1/completions", fields)
    assert several.most_tokens == max(map(len, prompts))
    assert several.likely_tokens == sum(map(len, prompts))
    assert several.is_single == (len(prompts) == 1)
    fields, _ = read_fields(json.dumps({"prompt": prompts[0]}).encode())
    assert read_inference("/v1/completions", fields).most_tokens == len(prompts[0])


def make_pool(num: int, role: Any = "decode", slack: int = 100) -> EnginePool:
    engines = [ProxiedEngine(role, f"http://e{number}") for number in range(num)]
    for engine in engines:
        engine.is_up = True
    return EnginePool(role, engines, session_slack=slack)


@given(st.lists(texts, min_size=1, max_size=20), st.integers(2, 6), st.integers(0, 5))
def test_only_the_sessions_of_a_lost_engine_move(
    sessions: list[str], num: int, lost_number: int
) -> None:
    pool = make_pool(num)
    lost = pool.engines[lost_number % num]
    before = {session: pool.choose(session) for session in sessions}
    lost.is_draining = True
    for session, engine in before.items():
        after = pool.choose(session)
        assert after is not lost
        assert after is engine or engine is lost
    lost.is_draining = False
    assert {session: pool.choose(session) for session in sessions} == before


def test_sessions_spread_over_engines() -> None:
    pool = make_pool(4)
    found = [pool.choose(f"session {number}") for number in range(400)]
    assert all(50 < found.count(engine) < 200 for engine in pool.engines)


def test_engines_with_equal_load_take_turns() -> None:
    pool = make_pool(3)
    found = [pool.choose(None) for _ in range(9)]
    assert all(found.count(engine) == 3 for engine in pool.engines)


def test_an_engine_that_was_tried_is_left_out() -> None:
    pool = make_pool(2)
    one, other = pool.engines
    assert pool.choose("a", tried=[one]) is other
    assert pool.choose("a", tried=[one, other]) is None
    other.is_up = False
    assert pool.choose(None, tried=[one]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, "here") == expected


def test_an_engines_url_may_have_a_path_and_a_slash_at_its_end() -> None:
    config = apply(ProxyConfig(), {"decode": "http://a:1/b/ https://[::1]:2"}, source="test")
    _, decode = make_pools(config)
    assert [engine.url for engine in decode.engines] == ["http://a:1/b", "https://[::1]:2"]


def test_headers_that_are_not_text_are_dropped() -> None:
    pairs = [("A", "\udcff"), ("B", "é")]
    assert request_headers(pairs, "id", "")[:-1] == answer_headers(pairs, "id")[:-1] == [("B", "é")]


def test_headers_that_a_connection_names_are_dropped() -> None:
    pairs = [("Connection", "a, B"), ("connection", "c"), ("A", "1"), ("b", "2"), ("C", "3")]
    assert request_headers([*pairs, ("D", "4")], "id", "") == [("D", "4"), ("X-Request-Id", "id")]
    answer = answer_headers([*pairs, ("Set-Cookie", "1"), ("Set-Cookie", "2")], "id")
    assert answer == [("Set-Cookie", "1"), ("Set-Cookie", "2"), ("X-Request-Id", "id")]


async def test_the_queue_holds_its_bounds_whoever_leaves() -> None:
    """Clients come, wait, leave and end in random order, while engines come and go."""
    chance = random.Random(1)
    usable = 2
    settings = {"max_running": 2, "max_queued": 3, "queue_timeout_s": 30}
    admission = Admission(apply(ProxyConfig(), settings, source="test"), lambda: usable)
    in_slot, refused = set[int](), 0

    async def client(number: int) -> None:
        nonlocal refused
        try:
            async with admission.slot():
                in_slot.add(number)
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    in_slot.discard(number)
        except ProxyOverloaded:
            refused += 1

    tasks: list[asyncio.Task[None]] = []
    for number in range(2_000):
        tasks.append(asyncio.create_task(client(number)))
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
        if chance.random() < 0.05:
            usable = chance.randrange(3)
            admission.wake()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        assert admission.queued <= 3
        assert len(in_slot) <= admission.running <= 4
    usable = 2
    admission.wake()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert refused > 0
    assert (admission.running, admission.queued) == (0, 0)


def test_a_refusal_has_the_form_of_the_api_that_was_called() -> None:
    refusal = ProxyRefusal(503, "draining", "later")
    openai = json.loads(refusal.body("/v1/chat/completions"))
    assert openai["error"]["message"] == "later"
    anthropic = json.loads(refusal.body("/v1/messages"))
    assert anthropic == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "later"},
    }
