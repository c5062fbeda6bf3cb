"""Who may use the central cache, and what strangers and hostile clients can do to it."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhold.core.config import load_config
from kvhold.core.errors import ConfigError, TierDenied, TierError, TierUnavailable
from kvhold.net import central as c
from kvhold.net import login
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.central import Central
from kvhold.testing.tier import fetch, make_key, make_value, store
from kvhold.tiers.central import CentralTier
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.central import CentralServer
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.tiers.central_tiers import MIB, a_tier, server, tier

__all__ = ["server", "tier"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    try:
        return make_certificates(tmp_path_factory.mktemp("certificates"))
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CentralServer]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("open sesame\n")
    with CentralServer("--token-file", str(token)) as server:
        yield server


class TestAccess:
    async def test_who_knows_the_token_is_served(self, guarded: CentralServer) -> None:
        tier = a_tier(guarded.url.replace("//", "//:open%20sesame@"))
        assert await store(tier, {make_key(1): b"x"}) == [True]
        await tier.close()

    @pytest.mark.parametrize(
        ("credentials", "told"), [("", "a token is needed"), (":wrong@", "the token is wrong")]
    )
    async def test_who_does_not_is_refused_and_told_why(
        self, guarded: CentralServer, credentials: str, told: str
    ) -> None:
        tier = a_tier(guarded.url.replace("//", f"//{credentials}"))
        with pytest.raises(TierDenied, match=told) as caught:
            await tier.probe([make_key(1)])
        assert "wrong" not in str(caught.value).replace("the token is wrong", "")
        await tier.close()

    async def test_tls_with_client_certificates(self, certificates: Certificates) -> None:
        joined = certificates.server.parent / "joined.pem"
        joined.write_text(certificates.server.read_text() + certificates.server_key.read_text())
        with CentralServer(
            "--tls-cert", str(joined), "--tls-client-ca", str(certificates.ca)
        ) as server:
            options = f"?ca_file={certificates.ca}"
            own = f"&cert_file={certificates.client}&key_file={certificates.client_key}"
            tier = a_tier(server.url.replace("kvhold:", "kvholds:") + options + own)
            value = make_value(1, 3 * MIB)
            assert await store(tier, {make_key(1): value}) == [True]
            assert await fetch(tier, [make_key(1)], [3 * MIB]) == [value]
            await tier.close()
            for url in (server.url.replace("kvhold:", "kvholds:") + options, server.url):
                tier = a_tier(url)
                with pytest.raises(TierError):
                    await tier.probe([make_key(1)])
                await tier.close()

    async def test_a_server_with_an_untrusted_certificate_is_not_used(
        self, certificates: Certificates
    ) -> None:
        joined = certificates.server.parent / "joined.pem"
        joined.write_text(certificates.server.read_text() + certificates.server_key.read_text())
        with CentralServer("--tls-cert", str(joined)) as server:
            tier = a_tier(server.url.replace("kvhold:", "kvholds:"))
            with pytest.raises(TierUnavailable, match="certificate verify failed"):
                await tier.check()
            await tier.close()

    @pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:7710"])
    def test_no_client_beyond_loopback_is_served_without_authentication(self, address: str) -> None:
        with pytest.raises(ConfigError, match=r"listen\.address.*token"):
            Central(load_config({"ram_bytes": "4MiB", "listen": {"address": address}}, environ={}))

    def test_beyond_the_loopback_interface_a_token_needs_tls(
        self, certificates: Certificates
    ) -> None:
        listen: dict[str, object] = {"address": "0.0.0.0:0", "token": "hush"}
        with pytest.raises(ConfigError, match=r"clear text; set listen\.tls_cert") as caught:
            Central(load_config({"ram_bytes": "4MiB", "listen": listen}, environ={}))
        assert "hush" not in str(caught.value)
        tls = {"tls_cert": str(certificates.server), "tls_key": str(certificates.server_key)}
        for enough in ({"insecure": True}, tls):
            central = Central(
                load_config({"ram_bytes": "4MiB", "listen": listen | enough}, environ={})
            )
            central.central_store.arena.close()

    @pytest.mark.parametrize(
        "host", ["10.0.0.5", "cache.example", "[2001:db8::1]", "[::ffff:10.0.0.5]"]
    )
    def test_a_token_is_not_sent_to_another_host_in_clear_text(self, host: str) -> None:
        with pytest.raises(ConfigError, match=r"clear text; write kvholds://") as caught:
            a_tier(f"kvhold://:hush@{host}:7710")
        assert "hush" not in str(caught.value)
        for fine in (
            f"kvholds://:hush@{host}:7710",
            f"kvhold://:hush@{host}:7710?insecure=true",
            f"kvhold://{host}:7710",
        ):
            a_tier(fine)

    @pytest.mark.parametrize(
        ("listen", "told"),
        [
            ({"address": "7710"}, "write HOST:PORT"),
            ({"address": "127.0.0.1:x"}, "write HOST:PORT"),
            ({"address": "127.0.0.1:0", "token_file": "/nowhere"}, r"listen\.token_file"),
            (
                {"address": "127.0.0.1:0", "tls_cert": "/nowhere"},
                r"listen\.tls_cert_file: cannot use /nowhere",
            ),
            ({"address": "127.0.0.1:0", "tls_client_ca": "/nowhere"}, r"need listen\.tls_cert"),
        ],
    )
    def test_settings_that_cannot_be_are_named(self, listen: dict[str, str], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            Central(load_config({"ram_bytes": "4MiB", "listen": listen}, environ={}))

    @pytest.mark.parametrize(
        ("url", "told"),
        [
            ("kvhold://", "write kvhold://host"),
            ("kvhold://a:1,b:2", "write kvhold://host"),
            ("kvhold://a:1/x", "write kvhold://host"),
            ("kvhold://token@a:1", "with a colon before the token"),
            ("kvhold://a:1?ca_file=x", "are for TLS"),
            ("kvhold://a:1?token_file=/nowhere", "token_file"),
            ("kvholds://a:1?ca_file=/nowhere", "ca_file"),
        ],
    )
    def test_urls_that_cannot_be_are_named(self, url: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            a_tier(url)


class TestHostileClients:
    def ask(self, server: CentralServer, *says: bytes) -> bytes:
        """All that the server answers until it hangs up."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            for data in says:
                sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while more := sock.recv(65536):
                    answer += more
            except ConnectionResetError:
                pass
            return answer

    HELLO = bytes(encode(login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION, "")))

    @pytest.mark.parametrize(
        ("says", "told"),
        [
            ((b"GET / HTTP/1.1\r\n\r\n",), b"must be its Hello, of at most 4096 bytes"),
            ((bytes(encode(login.LoginHello("x", 1, ""))),), b"must be its Hello"),
            (
                (bytes(encode(login.LoginHello(c.CENTRAL_MAGIC, 99, ""))),),
                b"protocol %d" % c.CENTRAL_VERSION,
            ),
            ((HELLO, b"\xff\xff\xff\xff"), b"announced"),
            ((HELLO, b"\x05\x00\x00\x00hello"), b"not a message"),
            ((HELLO, bytes(encode(c.Probe(b"short")))), b"not keys"),
            ((HELLO, bytes(encode(c.Get(make_key(1), [])))), b"unequal length"),
            ((HELLO, bytes(encode(c.Get(make_key(1), [1], [-1])))), b"before its value"),
            ((HELLO, bytes(encode(c.Put(make_key(1), [0])))), b"without bytes"),
            ((HELLO, bytes(encode(c.Put(make_key(1), [1], -1.0)))), b"time to live"),
            ((HELLO, bytes(encode(c.Scan(b"x" * 41, b"")))), b"invalid size"),
        ],
    )
    async def test_whoever_breaks_the_rules_is_told_and_hung_up_on(
        self, server: CentralServer, tier: CentralTier, says: tuple[bytes, ...], told: bytes
    ) -> None:
        assert told in self.ask(server, *says)
        await tier.check()

    async def test_a_put_of_which_half_arrives_leaves_nothing(
        self, server: CentralServer, tier: CentralTier
    ) -> None:
        self.ask(server, self.HELLO, bytes(encode(c.Put(make_key(1), [1000]))), bytes(500))
        assert await tier.probe([make_key(1)]) == [None]
        assert await store(tier, {make_key(1): b"whole"}) == [True]

    async def test_a_put_of_terabytes_allocates_nothing(
        self, server: CentralServer, tier: CentralTier
    ) -> None:
        before = resident_bytes(server.pid)
        self.ask(
            server,
            self.HELLO,
            bytes(encode(c.Put(make_key(1) * 3, [1 << 50, 1 << 40, 1 << 62]))),
            bytes(100_000),
        )
        assert resident_bytes(server.pid) < before + 16 * MIB
        assert await tier.probe([make_key(1)]) == [None]

    def test_a_client_of_another_version_is_told_which_one_speaks(
        self, server: CentralServer
    ) -> None:
        answer = self.ask(
            server, bytes(encode(login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION + 1, "")))
        )
        greeting = Decoder[c.Greeting](c.Greeting).decode(
            answer[LENGTH_BYTES : LENGTH_BYTES + body_length(answer)]
        )
        assert isinstance(greeting, login.LoginRefused)
        assert not greeting.denied


class TestStrangers:
    """Clients that have not logged in: what they may cost, and whom they may keep out."""

    def say(self, server: CentralServer, data: bytes) -> bytes:
        """All that the server answers until it hangs up.

        It may hang up before it has read everything.
        """
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            answer = b""
            with suppress(ConnectionError):
                sock.sendall(data)
                while more := sock.recv(65536):
                    answer += more
            return answer

    def log_of(self, server: CentralServer) -> str:
        return server.log.read_text()

    @pytest.mark.parametrize(
        "hello",
        [
            login.LoginHello("HUSHHUSH" * ((1 << 20) - 100), c.CENTRAL_VERSION, ""),
            login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION, "HUSHHUSH" * (1 << 19)),
            login.LoginHello("HUSHHUSH" * 500, c.CENTRAL_VERSION, ""),
            login.LoginHello(c.CENTRAL_MAGIC, c.CENTRAL_VERSION, "HUSHHUSH" * 500),
            login.LoginHello(c.CENTRAL_MAGIC, 99, "HUSHHUSH"),
            c.Probe(b"HUSHHUSH" * 100),
        ],
        ids=["magic of 8 MiB", "token of 4 MiB", "magic", "token", "version", "no Hello"],
    )
    def test_what_a_stranger_says_is_neither_kept_nor_logged_nor_sent_back(
        self, guarded: CentralServer, hello: Any
    ) -> None:
        data, before, logged = (
            bytes(_raw(hello)),
            resident_bytes(guarded.pid),
            len(self.log_of(guarded)),
        )
        for _ in range(4):
            assert b"HUSH" not in self.say(guarded, data)
        assert resident_bytes(guarded.pid) < before + 2 * MIB
        assert "HUSH" not in self.log_of(guarded)
        assert len(self.log_of(guarded)) < logged + 4 * 1000

    async def test_silent_connections_keep_nobody_out_however_often_they_are_renewed(
        self, guarded: CentralServer
    ) -> None:
        silent: list[socket.socket] = []
        try:
            for _ in range(3):
                silent += [
                    socket.create_connection(("127.0.0.1", guarded.port), timeout=60)
                    for _ in range(256)
                ]
                tier = a_tier(guarded.url.replace("//", "//:open%20sesame@"))
                assert await store(tier, {make_key(1): b"x"}) == [True]
                await tier.close()
        finally:
            for sock in silent:
                sock.close()

    async def test_whoever_has_logged_in_stays_while_strangers_come(
        self, guarded: CentralServer
    ) -> None:
        tier = a_tier(guarded.url.replace("//", "//:open%20sesame@"))
        await tier.check()
        (stream,) = tier._questions._idle
        silent = [
            socket.create_connection(("127.0.0.1", guarded.port), timeout=60) for _ in range(300)
        ]
        await tier.check()
        assert list(tier._questions._idle) == [stream], "the same connection as before"
        for sock in silent:
            sock.close()
        await tier.close()

    async def test_whoever_comes_when_all_places_are_taken_is_told(self) -> None:
        with CentralServer(environ={"KVHOLD_LISTEN_MAX_CONNECTIONS": "1"}) as server:
            first, second = a_tier(server.url), a_tier(server.url)
            await first.check()
            with pytest.raises(TierUnavailable, match=r"listen\.max_connections = 1 are in use"):
                await second.check()
            await first.close()
            await second.close()


def _raw(record: Any) -> bytes:
    body = msgspec.msgpack.encode(record)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * 4096
