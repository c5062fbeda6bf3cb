"""Who may do what through the API; and what is refused changes nothing."""

import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvhold.control.access import Access, Caller, ControlRole
from kvhold.control.routes import ROUTES
from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import ConfigError, NodeError
from kvhold.core.setting import apply
from kvhold.testing.cache import a_prompt, store
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.control.running import running_control, tokens_of
from tests.node.nodes import SPACE, RunningNode

TOKENS = {"read": "t-read", "operate": "t-operate", "administer": "t-administer"}
RANK = {"": 0, "read": 1, "operate": 2, "administer": 3}
BODIES: dict[str, Any] = {
    "kick": {"client": "c9999"},
    "clear": {"namespace": "0" * 32},
    "flush": {"timeout_s": 0},
    "reencode": {"tier": "none", "codec": "raw"},
    "lookup": {"namespace": "00", "tokens": []},
    "change_settings": {},
    "move": {"namespace": "00", "tokens": [], "tier": "none"},
    "prefetch": {"namespace": "00", "tokens": []},
    "pin": {"namespace": "00", "tokens": []},
    "checksums": {"namespace": "00", "tokens": []},
    "lmcache_query_instance": {"ip": "192.0.2.1"},
    "lmcache_lookup": {"tokens": []},
    "lmcache_clear": {"instance_id": "00", "location": "all"},
    "lmcache_pin": {"instance_id": "00", "location": "ram", "tokens": []},
    "lmcache_compress": {"instance_id": "00", "location": "none", "method": "raw"},
    "lmcache_decompress": {"instance_id": "00", "location": "none", "method": "raw"},
    "lmcache_move": {
        "old_position": ["00", "ram"],
        "new_position": ["00", "none"],
        "tokens": [],
    },
    "lmcache_health": {"instance_id": "00"},
    "lmcache_check_finish": {"event_id": "compress-7"},
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The settings of three tokens."""
    settings = {}
    for role, token in TOKENS.items():
        path = tmp_path / role
        path.write_text(token + "\n")
        path.chmod(0o600)
        settings[f"{role}_token_file"] = str(path)
    return settings


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    try:
        return make_certificates(tmp_path_factory.mktemp("certificates"))
    except NotInstalled as error:
        pytest.skip(str(error))


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[role]}"} if role else {}


async def test_each_role_may_do_what_its_row_says_and_no_more(
    node: RunningNode, files: dict[str, str]
) -> None:
    async with running_control(node.path, **files) as control:
        for role, rank in RANK.items():
            for route in ROUTES:
                if route.name == "stop" and rank == RANK["administer"]:
                    continue  # it would
                path = route.path.replace("{digest}", "00").replace("{number}", "7")
                status, answer = await control.ask(
                    route.method, path, BODIES.get(route.name), bearer(role)
                )
                refused = rank < int(route.role)
                assert (status in (401, 403)) == refused, (role, route.path, answer)
                assert refused or status not in (400, 500), (route.path, answer)  # a good body
                if refused:
                    assert status == (403 if role else 401)
            status, _ = await control.ask("GET", "/metrics", headers=bearer(role))
            assert status == (200 if rank else 401)
        for route in ROUTES:
            wrong = {"Authorization": "Bearer t-administerx"}
            path = route.path.replace("{digest}", "00").replace("{number}", "7")
            status, _ = await control.ask(route.method, path, BODIES.get(route.name), wrong)
            assert (status == 401) == (route.role is not ControlRole.NONE), route.path
        assert (await control.ask("GET", "/health/ready"))[0] == 200


async def test_to_clear_everything_takes_the_highest_role(
    node: RunningNode, files: dict[str, str]
) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    async with running_control(node.path, **files) as control:
        one = {"namespace": SPACE.digest.hex(), "tokens": tokens_of(prompt)}
        for role in ("", "read"):
            status, _ = await control.ask("POST", "/v1/clear", one, bearer(role))
            assert status == (403 if role else 401)
        for role in ("", "read", "operate"):
            status, _ = await control.ask("POST", "/v1/clear", {"all": True}, bearer(role))
            assert status == (403 if role else 401)
        with client.lookup(prompt.query()) as hit:
            assert hit.num_tokens == 64
        status, _ = await control.ask("POST", "/v1/clear", {"all": True}, bearer("administer"))
        assert status == 200


async def test_without_tokens_loopback_reads_and_the_own_socket_does_all(
    node: RunningNode,
) -> None:
    async with running_control(node.path) as control:
        assert (await control.ask("GET", "/v1/status"))[0] == 200
        assert (await control.ask("POST", "/v1/flush", {}))[0] == 403
        assert (await control.own("POST", "/v1/flush", {}))[0] == 200
        wrong = {"Authorization": "Bearer guessed"}
        assert (await control.ask("GET", "/v1/status", headers=wrong))[0] == 401
        assert control.server.path.stat().st_mode & 0o777 == 0o600


async def test_a_page_of_another_name_reads_nothing(node: RunningNode) -> None:
    async with running_control(node.path) as control:
        for host in ("evil.example", "evil.example:7780", "10.0.0.1", "[2001:db8::1]"):
            for path in ("/v1/status", "/metrics"):
                status, problem = await control.ask("GET", path, headers={"Host": host})
                assert (status, problem["reason"]) == (403, "host"), host
        for good in ("localhost", "127.0.0.1:1", "[::1]:7780"):
            assert (await control.ask("GET", "/v1/status", headers={"Host": good}))[0] == 200


@pytest.mark.parametrize(
    "authorization",
    ["Bearer", "Bearer ", "Basic t-administer", "t-administer", "Bearer t-administerx", "Bearer é"],
)
def test_a_wrong_token_gives_no_role(files: dict[str, str], authorization: str) -> None:
    access = Access(apply(ControlConfig(), files, source="test"), "127.0.0.1")
    assert access.caller_on_tcp(authorization) == Caller(ControlRole.NONE)
    assert access.caller_on_tcp("bearer  t-administer") == Caller(ControlRole.ADMINISTER)


def test_what_would_be_exposed_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    def access(host: str, **settings: Any) -> Access:
        return Access(apply(ControlConfig(listen=f"{host}:1"), settings, source="test"), host)

    with pytest.raises(ConfigError, match="only the loopback interface is served without"):
        access("0.0.0.0")
    with pytest.raises(ConfigError, match="tokens need TLS"):
        access("0.0.0.0", **files)
    assert access("0.0.0.0", insecure=True, **files).caller_on_tcp("") == Caller(ControlRole.NONE)
    with pytest.raises(ConfigError, match=r"control\.operate_token_file: another role"):
        access("127.0.0.1", read_token_file=files["read_token_file"],
               operate_token_file=files["read_token_file"])  # fmt: skip
    with pytest.raises(ConfigError, match=r"control\.read_token_file: cannot read"):
        access("127.0.0.1", read_token_file=str(tmp_path / "none"))


async def test_with_tls_only_tls_is_spoken(
    node: RunningNode, files: dict[str, str], certificates: Certificates
) -> None:
    settings = {
        "tls_cert": str(certificates.server),
        "tls_key": str(certificates.server_key),
        **files,
    }
    async with running_control(node.path, **settings) as control:
        context = ssl.create_default_context(cafile=str(certificates.ca))
        url = f"https://localhost:{control.server.port}/v1/status"
        async with control.tcp.get(url, ssl=context, headers=bearer("read")) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await control.ask("GET", "/v1/status")


BAD_REQUESTS: list[tuple[str, Any, str]] = [
    ("/v1/clear", {}, "bad_request"),
    ("/v1/clear", {"namespace": "00", "all": True}, "bad_request"),
    ("/v1/clear", {"namespace": 7}, "bad_request"),
    ("/v1/clear", {"namespaces": "00"}, "bad_request"),
    ("/v1/clear", [], "bad_request"),
    ("/v1/kick", {"client": "12"}, "bad_request"),
    ("/v1/kick", {"client": "c1", "pid": 1}, "bad_request"),
    ("/v1/kick", {"pid": -1}, "bad_request"),
    ("/v1/flush", {"timeout_s": -1}, "bad_request"),
    ("/v1/flush", {"timeout_s": 1e9}, "bad_request"),
    ("/v1/jobs", {"tier": "x"}, "bad_request"),
    ("/v1/nothing", {}, "no_path"),
    ("/v1/status", {}, "method"),
]


async def test_a_bad_request_is_refused_and_changes_nothing(node: RunningNode) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    async with running_control(node.path) as control:
        for path, body, reason in BAD_REQUESTS:
            status, problem = await control.own("POST", path, body)
            assert (400 <= status < 500, problem["reason"]) == (True, reason), (path, body)
            assert problem["detail"] and problem["status"] == status
    with client.lookup(prompt.query()) as hit:
        assert hit.num_tokens == 64


async def test_sizes_and_parameters_are_bounded(node: RunningNode) -> None:
    async with running_control(node.path, max_body_bytes=1000) as control:
        for route in ROUTES:
            if route.body is not None:
                large = {"namespace": "0" * 2000}
                status, problem = await control.own(route.method, route.path, large)
                assert (status, problem["reason"]) == (413, "too_large"), route.path
        assert (await control.ask("GET", "/v1/status?x=1"))[1]["reason"] == "bad_request"
        assert (await control.ask("GET", "/v1/jobs/-1"))[1]["reason"] == "bad_request"
        assert (await control.ask("GET", "/v1/jobs/" + "9" * 40))[1]["reason"] == "bad_request"


async def test_two_do_not_share_a_socket(node: RunningNode) -> None:
    async with running_control(node.path):
        with pytest.raises(NodeError, match=r"an API is running on .*control\.socket"):
            async with running_control(node.path):
                pass


async def test_a_taken_port_is_named(node: RunningNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"control\.listen: cannot listen on"):
            async with running_control(node.path, listen=f"127.0.0.1:{port}"):
                pass


async def test_a_certificate_gives_its_role(
    node: RunningNode, files: dict[str, str], certificates: Certificates
) -> None:
    settings = {
        "tls_cert": str(certificates.server),
        "tls_key": str(certificates.server_key),
        "tls_client_ca": str(certificates.ca),
        "certificate_role": "operate",
        "administer_token_file": files["administer_token_file"],
    }
    async with running_control(node.path, **settings) as control:
        context = ssl.create_default_context(cafile=str(certificates.ca))
        url = f"https://localhost:{control.server.port}/v1"
        with pytest.raises(aiohttp.ClientError):
            await control.tcp.get(f"{url}/status", ssl=context)
        context.load_cert_chain(certificates.client, certificates.client_key)
        asked: tuple[tuple[str, dict[str, bool], str, int], ...] = (
            ("flush", {}, "", 200),
            ("clear", {"all": True}, "", 403),
            ("clear", {"all": True}, "administer", 200),
        )
        for name, body, role, wanted in asked:
            async with control.tcp.post(
                f"{url}/{name}", ssl=context, json=body, headers=bearer(role)
            ) as response:
                assert response.status == wanted, name
        wrong = {"Authorization": "Bearer guessed"}
        async with control.tcp.get(f"{url}/status", ssl=context, headers=wrong) as response:
            assert response.status == 401


def test_a_role_of_certificates_needs_an_authority() -> None:
    def access(**settings: str) -> Access:
        return Access(apply(ControlConfig(listen="0.0.0.0:1"), settings, source="test"), "0.0.0.0")

    with pytest.raises(ConfigError, match=r"set control\.tls_client_ca"):
        access(certificate_role="read")
    with pytest.raises(ConfigError, match=r"or control\.certificate_role"):
        access(tls_cert="a", tls_client_ca="b")
    exposed = access(tls_cert="a", tls_client_ca="b", certificate_role="read")
    assert exposed.caller_on_tcp("") == Caller(ControlRole.READ)
    assert not exposed.needs_host_check
    with pytest.raises(ConfigError, match="certificate_role"):
        access(tls_cert="a", tls_client_ca="b", certificate_role="root")
