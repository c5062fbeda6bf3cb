"""The central cache as a tier: the contract against a real `kvhold serve --listen`, who may use it,
and what it survives.
"""

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhold.core.config import Config, ListenConfig, load_config
from kvhold.core.errors import (
    ConfigError,
    TierDenied,
    TierError,
    TierFull,
    TierIncomplete,
    TierUnavailable,
)
from kvhold.core.store_options import MAX_TTL_S
from kvhold.net import central as c
from kvhold.net import login
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node.central import Central
from kvhold.node.central_store import CentralStore
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.central import CentralTier
from kvhold.tiers.ram import Entry
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.central import CentralServer
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.tiers.conftest import opened
from tests.tiers.memory import PLUGIN, a_place

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

MIB = 1 << 20


async def within_a_minute(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what it looks at says nothing by itself
            await asyncio.sleep(0.005)


def a_tier(url: str) -> CentralTier:
    return opened(CentralTier.from_url(parse_url(url)))


@asynccontextmanager
async def tier_of(server: CentralServer) -> AsyncIterator[CentralTier]:
    tier = a_tier(server.url)
    try:
        yield tier
    finally:
        await tier.close()


@pytest.fixture(scope="module")
def server() -> Iterator[CentralServer]:
    with CentralServer(ram_bytes="32MiB") as server:
        yield server


@pytest.fixture
async def tier(server: CentralServer) -> AsyncIterator[CentralTier]:
    tier = a_tier(server.url)
    yield tier
    await empty(tier)


async def empty(tier: CentralTier) -> None:
    again = opened(CentralTier(tier._config))
    await again.delete(await scanned(again))
    await again.close()


class TestCentralTier(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self, server: CentralServer) -> AsyncIterator[CentralTier]:
        tier = a_tier(server.url)
        yield tier
        await empty(tier)


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


class TestFaults:
    async def test_a_dead_server_is_unavailable_and_used_again_when_it_is_back(self) -> None:
        with CentralServer() as server:
            async with tier_of(server) as tier:
                assert await store(tier, {make_key(1): b"x"}) == [True]
                server.kill()
                for call in (
                    tier.check(),
                    tier.probe([make_key(1)]),
                    tier.delete([make_key(1)]),
                    fetch(tier, [make_key(1)], [1]),
                ):
                    with pytest.raises(TierUnavailable):
                        await call
                server.start()
                assert await fetch(tier, [make_key(1)], [1]) == [None]
                assert await store(tier, {make_key(1): b"y"}) == [True]
                assert await fetch(tier, [make_key(1)], [1]) == [b"y"]

    async def test_a_kill_during_a_put_leaves_no_partial_value(self) -> None:
        with CentralServer(ram_bytes="256MiB") as server:
            async with tier_of(server) as tier:
                values = {make_key(i): make_value(i, 8 * MIB) for i in range(16)}
                call = asyncio.ensure_future(store(tier, values))
                # this loop does the sending: it has begun, and is far from its end
                await asyncio.sleep(0.005)
                server.kill()
                try:
                    stored = await call
                except TierUnavailable:
                    stored = [False] * 16
                assert not all(stored)
                server.start()
                assert await tier.probe(list(values)) == [None] * 16
                assert await store(tier, values) == [True] * 16
                assert await fetch(tier, list(values), [8 * MIB] * 16) == list(values.values())

    async def test_below_it_a_disk_outlives_it(self, tmp_path: Path) -> None:
        with CentralServer(
            "--tier", f"disk://{tmp_path}/d?probe_timeout_s=60&get_timeout_s=60&put_timeout_s=60"
        ) as server:
            values = {make_key(i): make_value(i, 100_000 + i) for i in range(10)}
            async with tier_of(server) as tier:
                assert await store(tier, values) == [True] * 10
            server.stop()  # it writes what waits before it ends
            server.start()
            async with tier_of(server) as tier:
                assert await tier.probe([*values, make_key(99)]) == [
                    *(100_000 + i for i in range(10)),
                    None,
                ]
                assert await fetch(tier, list(values), [200_000] * 10) == list(values.values())
                buffer = bytearray(1000)
                assert await tier.get([make_key(3)], [[memoryview(buffer)]], starts=[500]) == [1000]
                assert bytes(buffer) == values[make_key(3)][500:1500]
                assert await scanned(tier) == sorted(values)
                assert await tier.delete(list(values)) == [True] * 10
                assert await tier.probe(list(values)) == [None] * 10

    async def test_a_too_large_value_is_tier_full_and_the_others_are_stored(
        self, tier: CentralTier
    ) -> None:
        items = [
            (make_key(i), [memoryview(bytes(size))]) for i, size in enumerate((10, 40 * MIB, 10))
        ]
        faults = await tier.put(items)
        assert [type(fault) for fault in faults] == [type(None), TierFull, type(None)]


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


async def all_pages(central_store: CentralStore, most: int) -> list[bytes]:
    page = await central_store.scans.page(b"", b"", most)
    found = list(page.keys)
    while page.more:
        page = await central_store.scans.page(b"", found[-1], most)
        assert 0 < len(page.keys) <= most
        found += page.keys
    assert page.whole
    return found


async def test_a_scan_of_many_pages_lists_what_is_there_once(tmp_path: Path) -> None:
    tiers = (f"disk://{tmp_path / 'kv'}?max_bytes=1MiB",)
    central_store = CentralStore(Config(ram_bytes=16 << 20, huge_pages="never", tiers=tiers))
    try:
        keys = sorted(make_key(number) for number in range(100))
        assert (
            await central_store.ram.put([(key, [memoryview(b"x")]) for key in keys[:70]])
            == [None] * 70
        )
        put = await central_store._stack.guards[0].put(
            [(key, [memoryview(b"x")]) for key in keys[40:]]
        )
        assert put.items == [True] * 60
        for most in (1, 7, 99, 100, 1000):
            found = await all_pages(central_store, most)
            assert sorted(found) == keys, "those that are in both places once"
        assert len(central_store.scans) == 0
        for key in keys:  # scans that nobody goes on with are forgotten
            await central_store.scans.page(b"", key, 1)
            assert await central_store.scans.page(key, b"", 1) == ([key], False, True)
        assert len(central_store.scans) <= 64
    finally:
        await central_store.close()


async def test_probe_and_delete_report_a_tier_below_that_did_not_answer() -> None:
    with a_place() as below:
        settings: dict[str, Any] = {
            "ram_bytes": 16 << 20,
            "huge_pages": "never",
            "listen": ListenConfig(address="127.0.0.1:0"),
        }
        server = Central(
            Config(tiers=(below.url(breaker_failures=1000),), plugins=(PLUGIN,), **settings)
        )
        ready = asyncio.Event()
        serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
        await ready.wait()
        tier = a_tier(f"kvhold://127.0.0.1:{server.port}")
        try:
            key = make_key(1)
            assert await tier.put([(key, [memoryview(b"x")])]) == [None]
            await within_a_minute(lambda: key in below.values)
            below.faults = {
                name: TierError("memory", name, "not now") for name in ("probe", "scan", "delete")
            }
            in_memory, unknown = await tier.probe([key, make_key(2)])
            assert (in_memory, type(unknown)) == (1, TierIncomplete)
            with pytest.raises(TierError, match="a tier below the central cache did not answer"):
                [found async for found in tier.scan(b"")]
            with pytest.raises(TierError, match="a tier below the central cache did not answer"):
                await tier.delete([key])
            below.faults = {}
            assert await tier.probe([key, make_key(2)]) == [1, None]
            assert [found async for found in tier.scan(b"")] == [key]
            assert await tier.delete([key]) == [True]
            assert not below.values
        finally:
            await tier.close()
            server.stop()
            await serving


async def test_a_value_deleted_during_its_write_below_does_not_stay_there() -> None:
    with a_place() as below:
        central_store = CentralStore(
            Config(ram_bytes=16 << 20, huge_pages="never", tiers=(below.url(),), plugins=(PLUGIN,))
        )
        await central_store.start()
        try:
            below.hold("put")
            room = central_store.reserve(make_key(1), 10, None)
            assert isinstance(room, Entry)
            central_store.commit(room)
            await within_a_minute(lambda: below.inside["put"] > 0)
            assert await central_store.delete([make_key(1)], set()) == [True]
            below.let_go("put")
            await within_a_minute(lambda: not central_store._writes and not central_store._tasks)
            assert not below.values
        finally:
            await central_store.close()


@pytest.mark.parametrize(
    ("ttl_s", "below"), [(None, None), (math.inf, math.inf), (50.0, pytest.approx(50, abs=10))]
)
async def test_a_tier_below_keeps_a_value_as_long_as_the_client_says(
    server: CentralServer, ttl_s: float | None, below: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float | None] = []

    async def put(
        tier: Any, items: Sequence[tuple[bytes, Any]], *, ttl_s: float | None = None
    ) -> list[None]:
        written.append(ttl_s)
        return [None] * len(items)

    monkeypatch.setattr("tests.tiers.memory.MemoryTier.put", put)
    with a_place() as place:
        central_store = CentralStore(
            Config(ram_bytes=16 << 20, huge_pages="never", tiers=(place.url(),), plugins=(PLUGIN,))
        )
        await central_store.start()
        try:
            room = central_store.reserve(make_key(1), 10, ttl_s)
            assert isinstance(room, Entry)
            central_store.commit(room)
            await within_a_minute(lambda: not central_store._writes and not central_store._tasks)
            assert written == [below]
        finally:
            await central_store.close()
    tier = a_tier(server.url)
    assert await tier.put([(make_key(1), [memoryview(b"x")])], ttl_s=ttl_s) == [None]
    await tier.close()


@pytest.mark.parametrize("ttl_s", [MAX_TTL_S, math.ceil(MAX_TTL_S + 0.5), 1e300])
async def test_the_longest_time_to_live_is_no_fault(ttl_s: float) -> None:
    listen = ListenConfig(address="127.0.0.1:0")
    server = Central(Config(ram_bytes=16 << 20, huge_pages="never", listen=listen))
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(on_ready=lambda _: ready.set()))
    await ready.wait()
    tier = a_tier(f"kvhold://127.0.0.1:{server.port}")
    try:
        assert await tier.put([(make_key(1), [memoryview(b"x")])], ttl_s=ttl_s) == [None]
        assert await tier.probe([make_key(1)]) == [1]
        async with asyncio.timeout(60):
            stream = await tier._open()  # another client may send more
            await stream.send([encode(c.Put(make_key(2), [1], ttl_s)), b"x"])
            await stream.read(body_length(await stream.read(LENGTH_BYTES), MIB))
            stream.close()
        assert await tier.probe([make_key(2)]) == [1]
    finally:
        await tier.close()
        server.stop()
        await serving


async def test_a_scan_of_many_keys_looks_at_few_of_them_in_one_step() -> None:
    central_store = CentralStore(Config(ram_bytes=64 << 20, huge_pages="never"))
    try:
        num_keys = 10_000
        for begin in range(0, num_keys, 500):
            await central_store.ram.put(
                [(make_key(number), [memoryview(b"x")]) for number in range(begin, begin + 500)]
            )
        steps = 0

        async def count_steps() -> None:
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_steps())
        found = await all_pages(central_store, 5000)
        counting.cancel()
        assert len(set(found)) == len(found) == num_keys
        assert steps >= num_keys // 500
    finally:
        await central_store.close()
