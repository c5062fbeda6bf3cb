"""The client against a real HTTP server that streams as vLLM does, or does anything but."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvhold.core.errors import ConfigError
from kvhold_lab.bench.load.client import Endpoint, LoadClient, checked_url
from kvhold_lab.bench.load.work import Reply, Request, Turn
from tests.lab.bench.load.server import Exchange, TestServer, serving

TEXT = Request(
    "g", (Turn("system", "one two"), Turn("user", " three"), Turn("user", " four")), max_tokens=3
)
TOKENS = Request("g", (Turn("system", [1, 2]), Turn("user", [3, 4])), max_tokens=3)


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    async with serving() as server:
        yield server


async def send(server: TestServer, request: Request, **settings: object) -> Reply:
    endpoint = replace(Endpoint(server.base_url, "model", timeout_s=30.0), **settings)  # type: ignore[arg-type]
    async with LoadClient(endpoint) as client:
        return await client.send(request)


async def test_text_is_sent_joined_and_what_came_is_timed_and_counted(server: TestServer) -> None:
    reply = await send(server, TEXT)
    assert (reply.error, reply.text, reply.output_tokens) == (None, " w0 w1 w2", 3)
    assert (reply.input_tokens, reply.cached_tokens) == (4, 2)
    assert reply.ttft_s is not None
    assert 0 < reply.ttft_s <= reply.latency_s
    assert len(reply.gaps_s) == 2
    [seen] = server.seen
    assert (seen.path, seen.body["prompt"], seen.body["ignore_eos"]) == (
        "/v1/completions",
        "one two three four",
        True,
    )
    assert (seen.body["stream"], seen.body["stream_options"], seen.body["temperature"]) == (
        True,
        {"include_usage": True},
        0.0,
    )
    assert "authorization" not in seen.headers


async def test_token_ids_go_and_come(server: TestServer) -> None:
    reply = await send(server, replace(TOKENS, needs_content=True))
    assert (reply.content, server.seen[0].body["prompt"]) == ([0, 1, 2], [1, 2, 3, 4])
    await send(server, TOKENS)
    assert "return_token_ids" not in server.seen[1].body


async def test_chat_joins_neighbours_of_one_role(server: TestServer) -> None:
    reply = await send(server, TEXT, api="chat")
    assert (reply.error, reply.text) == (None, " w0 w1 w2")
    assert server.seen[0].path == "/v1/chat/completions"
    assert server.seen[0].body["messages"] == [
        {"role": "system", "content": "one two"},
        {"role": "user", "content": " three four"},
    ]


async def test_key_and_further_fields_are_sent_and_the_key_is_not_shown(server: TestServer) -> None:
    await send(server, TEXT, api_key="secret", ignore_eos=False, extra_body={"priority": 3})
    assert server.seen[0].headers["authorization"] == "Bearer secret"
    assert server.seen[0].body["priority"] == 3
    assert "ignore_eos" not in server.seen[0].body
    assert "secret" not in repr(Endpoint("http://x/v1", "m", api_key="secret"))


async def test_many_requests_are_in_flight_at_once(server: TestServer) -> None:
    """More than the hundred that the library would allow by itself."""
    together = asyncio.Barrier(150)

    async def wait_for_all(exchange: Exchange) -> None:
        await together.wait()
        await exchange.whole(503, b"")

    server.answer = wait_for_all
    async with LoadClient(Endpoint(server.base_url, "model")) as client:
        replies = await asyncio.gather(*(client.send(TEXT) for _ in range(150)))
    assert {reply.error for reply in replies} == {"http 503"}


async def test_an_http_error_is_told_in_the_servers_words(server: TestServer) -> None:
    async def too_long(exchange: Exchange) -> None:
        await exchange.whole(
            400, b'{"error": {"message": "the prompt is too long"}}' + b" " * 100_000
        )

    server.answer = too_long
    reply = await send(server, TEXT)
    assert reply.error == "http 400"
    assert "the prompt is too long" in reply.detail
    assert len(reply.detail) <= 2_000


async def test_a_redirect_is_not_followed(server: TestServer) -> None:
    async def away(exchange: Exchange) -> None:
        exchange.writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.invalid/\r\nContent-Length: "
            b"0\r\n\r\n"
        )

    server.answer = away
    assert (await send(server, TEXT, api_key="secret")).error == "http 302"


async def stall(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event({"choices": [{"text": "a"}]})
    await asyncio.Event().wait()


async def cut(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event({"choices": [{"text": "a"}]})
    exchange.cut()


async def hang_up(exchange: Exchange) -> None:
    exchange.cut()


async def stop_early(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event({"choices": [{"text": "a"}]})
    await exchange.end()


async def tell_an_error(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.event({"error": {"message": "the engine is dead"}})
    await exchange.end()


async def bad_json(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.piece(b"data: {what?\n\n")
    await exchange.end()


async def no_end_of_line(exchange: Exchange) -> None:
    await exchange.begin()
    for _ in range(40):
        await exchange.piece(b"x" * (1 << 20))


async def not_http(exchange: Exchange) -> None:
    exchange.writer.write(b"whatever\r\n\r\n")
    exchange.cut()


@pytest.mark.parametrize(
    ("answer", "error", "has_begun"),
    [
        (stall, "timeout", True),
        (cut, "disconnected", True),
        (hang_up, "disconnected", False),
        (stop_early, "cut short", True),
        (tell_an_error, "server error", False),
        (bad_json, "bad stream", False),
        (no_end_of_line, "bad stream", False),
        (not_http, "disconnected", False),
    ],
)
async def test_a_misbehaving_server_is_an_error_of_its_kind(
    server: TestServer, answer: object, error: str, has_begun: bool
) -> None:
    server.answer = answer  # type: ignore[assignment]
    reply = await send(server, TEXT, timeout_s=1.0 if answer is stall else 30.0)
    assert reply.error == error
    assert reply.detail
    assert (reply.ttft_s is not None) == has_begun
    assert reply.latency_s > 0


async def test_after_an_error_the_client_goes_on(server: TestServer) -> None:
    async with LoadClient(Endpoint(server.base_url, "model")) as client:
        well, server.answer = server.answer, cut
        assert (await client.send(TEXT)).error == "disconnected"
        server.answer = well
        assert (await client.send(TEXT)).error is None


async def test_nobody_there_is_an_error_of_its_kind() -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        reply = await send(TestServer(taken.getsockname()[1]), TEXT)
    assert reply.error == "connect"


async def test_the_only_model_is_found_and_several_are_an_error(server: TestServer) -> None:
    async with LoadClient(Endpoint(server.base_url, "")) as client:
        assert await client.only_model() == "model"
        server.models = ["one", "two"]
        with pytest.raises(ConfigError, match=r"2 models \(one, two\); choose with --model"):
            await client.only_model()
    with pytest.raises(ConfigError, match="is the server up"):
        async with LoadClient(Endpoint("http://127.0.0.1:9/v1", "")) as client:
            await client.only_model()


@pytest.mark.parametrize(
    "page", [b"<html>", b"\xff", b"[" * 100_000, b"[]", b'{"data": 3}', b'{"data": [{}]}']
)
async def test_what_is_no_list_of_models_is_an_error_that_says_what_to_do(
    server: TestServer, page: bytes
) -> None:
    server.models_page = page
    async with LoadClient(Endpoint(server.base_url, "")) as client:
        with pytest.raises(ConfigError, match="Name the model with --model"):
            await client.only_model()


async def test_metrics_are_beside_the_api_or_not_at_all(server: TestServer) -> None:
    async with LoadClient(Endpoint(server.base_url, "model")) as client:
        assert await client.metrics_page() is None
        server.metrics = b"up 1\n"
        assert await client.metrics_page() == "up 1\n"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("https://host/", "https://host/v1"),
        ("http://host/v1/", "http://host/v1"),
        ("http://[::1]:8000/api/v2", "http://[::1]:8000/api/v2"),
    ],
)
def test_a_base_url_has_a_path(given: str, used: str) -> None:
    assert checked_url(given) == used


@pytest.mark.parametrize(
    "given",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://h/v1?a=b",
    ],
)
def test_what_is_no_base_url_is_an_error(given: str) -> None:
    with pytest.raises(ConfigError, match="http://localhost:8000/v1"):
        checked_url(given)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        checked_url("http://user:secret@host/v1")
    assert "secret" not in str(caught.value)
