"""Who may use a proxy, and that no key is ever written down."""

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest

from kvhold.core.errors import ConfigError
from kvhold.core.setting import apply
from kvhold.proxy.server import ProxyServer
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.proxy.scripted import (
    ScriptedEngine,
    engines_and_proxy,
    make_config,
    running_proxy,
    writes,
)

KEY = "sk-do-not-log-me"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return write_key(tmp_path / "key", KEY)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    try:
        return make_certificates(tmp_path_factory.mktemp("certificates"))
    except NotInstalled as error:
        pytest.skip(str(error))


def write_key(path: Path, key: str) -> str:
    path.write_text(key + "\n")
    path.chmod(0o600)
    return str(path)


async def test_a_key_is_needed_if_there_is_one(key_file: str) -> None:
    async with engines_and_proxy(1, 1, api_key_file=key_file) as ([prefill], [decode], proxy):
        body = {"prompt": "x"}
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {KEY}x"},
            {"Authorization": f"Basic {KEY}"},
            {"x-api-key": KEY[:-1]},
            {"Authorization": "Bearer \u00e9"},
        ]
        for headers in wrong:
            for path in ("/v1/completions", "/v1/messages", "/nothing"):
                assert (await proxy.post(path, body, **headers))[0] == 401
            assert (await proxy.get("/v1/models", **headers))[0] == 401
            assert (await proxy.get("/metrics", **headers))[0] == 401
            assert (await proxy.get("/proxy/engines", **headers))[0] == 401
            assert (await proxy.get("/health", **headers))[0] == 200
        assert prefill.seen == decode.seen == []
        for headers in (BEARER, {"x-api-key": KEY}, {"Authorization": f"bearer {KEY}"}):
            assert (await proxy.post("/v1/completions", body, **headers))[0] == 200
            assert (await proxy.get("/metrics", **headers))[0] == 200
            assert (await proxy.get("/proxy/engines", **headers))[0] == 200


async def test_a_refused_client_gets_its_apis_error(key_file: str) -> None:
    async with engines_and_proxy(0, 1, api_key_file=key_file) as (_, _, proxy):
        _, error = await proxy.post("/v1/completions", {})
        assert error["error"]["type"] == "authentication_error"
        _, error = await proxy.post("/v1/messages", {})
        assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


async def test_a_body_is_not_read_without_a_key(key_file: str) -> None:
    async with engines_and_proxy(0, 1, api_key_file=key_file) as (_, _, proxy):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
        assert b" 401 " in await reader.readline()
        assert proxy.server._admission.held_bytes == 0
        writer.close()
        await writer.wait_closed()


async def test_the_clients_key_reaches_both_engines() -> None:
    async with engines_and_proxy(1, 1) as ([prefill], [decode], proxy):
        body = {"prompt": [1] * 300}
        assert (await proxy.post("/v1/completions", body, **BEARER, **{"x-api-key": "b"}))[0] == 200
        for [seen] in (prefill.seen, decode.seen):
            assert seen.headers["authorization"] == f"Bearer {KEY}"
            assert seen.headers["x-api-key"] == "b"


async def test_engines_may_have_a_key_of_their_own(tmp_path: Path) -> None:
    file = write_key(tmp_path / "engines", "engines-key")
    async with engines_and_proxy(1, 1, engine_api_key_file=file) as ([prefill], [decode], proxy):
        body = {"prompt": [1] * 300}
        assert (await proxy.post("/v1/completions", body, **BEARER, **{"x-api-key": "b"}))[0] == 200
        for [seen] in (prefill.seen, decode.seen):
            assert seen.headers["authorization"] == "Bearer engines-key"
            assert "x-api-key" not in seen.headers


async def test_draining_may_need_a_key_of_its_own(tmp_path: Path) -> None:
    file = write_key(tmp_path / "admin", "admin-key")
    async with engines_and_proxy(0, 1, admin_key_file=file) as (_, [decode], proxy):
        command = {"engine": decode.url}
        assert (await proxy.post("/proxy/drain", command))[0] == 401
        assert (await proxy.post("/proxy/drain", command, **BEARER))[0] == 401
        admin = {"Authorization": "Bearer admin-key"}
        assert (await proxy.post("/proxy/drain", command, **admin))[0] == 200


async def test_no_key_is_logged(key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """At any level, whatever fails: an engine, the client, or its HTTP."""
    caplog.set_level(logging.DEBUG)
    async with engines_and_proxy(1, 1, api_key_file=key_file) as ([prefill], [decode], proxy):
        prefill.script = decode.script = writes(b"")
        body = {"prompt": [1] * 300}
        assert (await proxy.post("/v1/completions", body, **BEARER))[0] == 503
        assert (await proxy.post("/nothing", body, **BEARER))[0] == 404
        for raw in (
            f"GET / HTTP/1.1\r\nAuthorization : Bearer {KEY}\r\n\r\n",
            f"GET / HTTP/1.1\r\nAuthorization: Bearer\x00{KEY}\r\n\r\n",
            f"{KEY}\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port)
            writer.write(raw.encode())
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()
    assert caplog.records
    for record in caplog.records:
        if record.name.startswith("kvhold"):
            assert KEY not in caplog.handler.format(record)
    assert KEY not in repr(make_config([], [], api_key=KEY))


async def test_beyond_loopback_a_key_is_needed(key_file: str) -> None:
    for host in ("0.0.0.0", "[::]", "192.0.2.1"):
        with pytest.raises(ConfigError, match=r"proxy\.listen = .*proxy\.api_key_file"):
            ProxyServer(make_config([], [ScriptedEngine()], listen=f"{host}:0"))
    engine = ScriptedEngine()
    async with (
        engine,
        running_proxy([], [engine], listen="0.0.0.0:0", api_key_file=key_file) as proxy,
    ):
        assert (await proxy.complete())[0] == 401
        command = {"engine": engine.url}
        assert (await proxy.post("/proxy/drain", command, **BEARER))[0] == 403


async def test_without_tls_a_warning_is_logged(
    key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    ProxyServer(make_config([], [ScriptedEngine()], listen="0.0.0.0:0", api_key_file=key_file))
    assert "proxy.tls_cert" in caplog.text


async def test_tls_for_clients(certificates: Certificates) -> None:
    engine = ScriptedEngine()
    settings = {"tls_cert": str(certificates.server), "tls_key": str(certificates.server_key)}
    async with engine, running_proxy([], [engine], **settings) as proxy:
        context = ssl.create_default_context(cafile=str(certificates.ca))
        url = f"https://localhost:{proxy.server.port}/v1/models"
        async with aiohttp.ClientSession() as client, client.get(url, ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await proxy.get("/v1/models")


async def test_an_address_that_is_taken_is_an_error_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        server = ProxyServer(make_config([], [ScriptedEngine()], listen=listen))
        with pytest.raises(ConfigError, match=r"proxy\.listen: cannot listen on"):
            await server.serve()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"listen": "nowhere"}, "proxy.listen"),
        ({"listen": "::1:80"}, "proxy.listen"),
        ({"listen": "127.0.0.1:99999"}, "proxy.listen"),
        ({"api_key_file": "/nothing/here"}, "proxy.api_key_file"),
        ({"admin_key_file": "/nothing/here"}, "proxy.admin_key_file"),
        ({"engine_api_key_file": "/nothing/here"}, "proxy.engine_api_key_file"),
        ({"tls_cert": "/nothing/here"}, "proxy.tls_cert"),
        ({"tls_key": "/nothing/here"}, "proxy.tls_key"),
        ({"protocol": "tcp"}, "protocol"),
        ({"max_running": 0}, "max_running"),
        ({"decode": []}, "proxy.decode"),
        ({"decode": ["127.0.0.1:8000"]}, "proxy.decode"),
        ({"decode": ["ftp://a"]}, "proxy.decode"),
        ({"decode": ["http://"]}, "proxy.decode"),
        ({"decode": ["http://a:99999"]}, "proxy.decode"),
        ({"decode": ["http://user:hush@a"]}, "proxy.engine_api_key_file"),
        ({"decode": ["http://a?q2q=1"]}, "proxy.decode"),
        ({"decode": ["http://a#b"]}, "proxy.decode"),
        ({"decode": ["http://a", "http://a/"]}, "proxy.decode"),
        ({"prefill": ["http://a"], "decode": ["http://a"]}, "proxy.prefill"),
        ({"prefill": ["http://a"], "protocol": "p2p"}, "proxy.prefill"),
        ({"prefill": ["http://a?p2p=b"], "protocol": "p2p"}, "proxy.prefill"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProxyServer(apply(make_config([], [ScriptedEngine()]), settings, source="test"))
    assert named in str(caught.value)
    assert "hush" not in str(caught.value)
