"""Findings B1 to B6: what a request, a stranger, another user or a plain setting could do."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvhold.core.config import Config, EncryptionConfig, NodeConfig, RulesConfig, load_config
from kvhold.core.errors import ConfigError, KVHoldError, TierDenied
from kvhold.core.rules import request_rules
from kvhold.net import central
from kvhold.net.wire import LENGTH_BYTES
from kvhold.node import connect
from kvhold.node.paths import prepare_folder, socket_path
from kvhold.node.start import end_node
from kvhold.testing.cache import PLAIN, fill
from kvhold.testing.tier import make_key, store
from kvhold.tiers.central import CentralTier
from kvhold.tiers.disk import DiskTier
from kvhold.tiers.url import parse_url
from tests.findings.both import PATIENT, PROMPT, SPACE, WITHIN_S, a_node, clean_environ

try:
    from kvhold_lab.servers.central import CentralServer
except ImportError:  # 5f474b0
    from kvhold.testing.servers.central import CentralServer  # type: ignore[import-not-found, no-redef]
try:
    from kvhold.net.login import LoginHello as Hello
except ImportError:  # 5f474b0
    from kvhold.net.central import Hello  # type: ignore[attr-defined, no-redef]

TOKEN = "open-sesame"


class TestB1:
    def test_a_request_does_not_get_another_tenant_than_the_operators(self) -> None:
        try:
            rules = request_rules({"tags": {"tenant": "victim"}}, RulesConfig(tenant="acme"))
        except ConfigError:
            return
        options = rules.store_options if hasattr(rules, "store_options") else rules.terms  # type: ignore[attr-defined]
        assert options.tenant == "acme"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[CentralServer]:
    """A central store with a token."""
    (tmp_path / "token").write_text(TOKEN)
    with CentralServer("--token-file", str(tmp_path / "token")) as server:
        yield server


@pytest.mark.server
class TestB2:
    def test_a_strangers_long_greeting_is_not_logged(self, guarded: CentralServer) -> None:
        body = msgspec.msgpack.encode(Hello("HUSHHUSH" * (1 << 19), central.CENTRAL_VERSION, ""))
        before = len(guarded.log.read_bytes())
        with (
            socket.create_connection(("127.0.0.1", guarded.port), timeout=WITHIN_S) as stranger,
            suppress(ConnectionError),
        ):
            stranger.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)
            while stranger.recv(65536):
                pass
        logged = guarded.log.read_bytes()[before:]
        assert len(logged) < 4096
        assert b"HUSH" not in logged


@pytest.mark.server
class TestB3:
    async def test_silent_connections_do_not_keep_out_a_host_with_the_token(
        self, guarded: CentralServer
    ) -> None:
        silent = [
            socket.create_connection(("127.0.0.1", guarded.port), timeout=WITHIN_S)
            for _ in range(256)
        ]
        tier = CentralTier.from_url(parse_url(guarded.url.replace("//", f"//:{TOKEN}@")))
        try:
            assert await store(tier, {make_key(1): b"x"}) == [True]
        finally:
            await tier.close()
            for connection in silent:
                connection.close()


@pytest.mark.server
class TestB4:
    def test_an_engine_with_an_encrypted_tier_has_nothing_written_in_the_clear(
        self, tmp_path: Path
    ) -> None:
        """It finds a node that somebody has started without encryption."""
        (tmp_path / "key").write_text(os.urandom(32).hex())
        path, folder = tmp_path / "node.sock", tmp_path / "kv"
        engine = Config(
            tiers=(f"disk://{folder}?encrypt=true&direct=never",),
            encryption=EncryptionConfig(keys=(f"=file:{tmp_path}/key",)),
            node=NodeConfig(socket=str(path), autostart=False),
            client=PATIENT,
        )
        with (
            a_node(path, "--tier", f"disk://{folder}?direct=never&max_bytes=64MiB"),
            suppress(KVHoldError),
            connect(engine) as client,
        ):
            client.register(SPACE)
            with client.reserve(PLAIN, PROMPT.chunks()) as room:
                fill(room, PLAIN, PROMPT.chunks())
                at = int(room.chunks().offsets[0])
                plain = room.buffer[at : at + 256].tobytes()
                room.commit()
            client.flush()
            written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
            assert not any(plain in content for content in written)


class TestB5:
    @pytest.mark.server
    def test_a_link_in_the_place_of_a_nodes_file_is_not_followed(self, tmp_path: Path) -> None:
        precious, place = tmp_path / "precious", tmp_path / "run" / "node.sock"
        precious.write_text("precious")
        place.parent.mkdir(mode=0o700)
        Path(f"{place}.start").symlink_to(precious)
        settings = Config(ram_bytes=4 << 20, node=NodeConfig(socket=str(place)), client=PATIENT)
        with suppress(KVHoldError), connect(settings):
            pass
        end_node(place)
        assert precious.read_text() == "precious"

    async def test_a_folder_that_everybody_can_write_to_holds_no_disk_tier(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "kv"
        folder.mkdir()
        folder.chmod(0o777)
        tier = DiskTier.from_url(parse_url(f"disk://{folder}?direct=never&max_bytes=1MiB"))
        try:
            with pytest.raises(TierDenied):
                await tier.check()
        finally:
            await tier.close()


class TestB6:
    def test_an_error_does_not_show_a_token(self) -> None:
        with pytest.raises(ConfigError) as caught:
            load_config({"listen": {"token": 8675309}}, environ={})
        assert "8675309" not in str(caught.value)

    @pytest.mark.server
    @pytest.mark.usefixtures("executed")
    def test_no_node_serves_with_a_secret_on_its_command_line(self, tmp_path: Path) -> None:
        """Every user of the host can read that."""
        command = [
            sys.executable,
            "-m",
            "kvhold",
            "serve",
            "--socket",
            str(tmp_path / "s"),
            "--ram-bytes",
            "4MiB",
        ]
        command += ["--tier", "redis://:hush@127.0.0.1:1/0"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean_environ(),
        ) as node:
            assert node.stdout is not None
            said = node.stdout.readline()
            shown = Path(f"/proc/{node.pid}/cmdline").read_text() if "ready" in said else ""
            node.terminate()
        assert "hush" not in shown

    def test_engines_start_though_somebody_has_taken_the_default_folder(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with tempfile.TemporaryDirectory(
            prefix="kvhold-"
        ) as folder:  # short: a socket's path has at most 107 bytes
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
            monkeypatch.setenv("TMPDIR", folder)
            monkeypatch.setenv("HOME", f"{folder}/home")
            Path(folder, "home").mkdir(mode=0o700)
            Path(folder, f"kvhold-{os.getuid()}").touch()
            place = socket_path("")
            prepare_folder(place)
            assert place.parent.stat().st_mode & 0o777 == 0o700
