"""`kvhold probe`: its exit code is what a kubelet or a container engine acts on."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvhold.testing.cache import a_prompt, store
from kvhold_lab.servers.base import NotInstalled, free_port
from kvhold_lab.servers.central import CentralServer
from kvhold_lab.servers.certificates import Certificates, make_certificates
from tests.node.nodes import SPACE, RunningNode, clean_environ, eventually, run_kvhold

PATIENT = ("--timeout-s", "60")


def probe(*arguments: str, **environ: str) -> tuple[int, str]:
    """The exit code, and what it says."""
    done = run_kvhold("probe", *arguments, **environ)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def of(node: RunningNode) -> tuple[str, ...]:
    return ("--socket", str(node.path), *PATIENT)


def test_a_node_is_ready_until_it_ends(node: RunningNode) -> None:
    assert probe(*of(node)) == (0, f"the node on {node.path} is ready\n")
    assert probe("--ready", *of(node)) == (0, f"the node on {node.path} is ready\n")
    assert probe("--live", *of(node)) == (0, f"the node on {node.path} is live\n")
    node.close()
    for question in ("--live", "--ready"):
        code, says = probe(question, *of(node))
        assert code == 1
        assert f"no node runs on {node.path}" in says


def test_a_node_that_hangs_is_neither_live_nor_ready(node: RunningNode) -> None:
    with node.stopped():
        for question in ("--live", "--ready"):
            code, says = probe(question, "--socket", str(node.path), "--timeout-s", "0.2")
            assert code == 1
            assert "timed out" in says


def test_a_node_that_refuses_more_clients_is_live_but_not_ready(tmp_path: Path) -> None:
    node = RunningNode(tmp_path / "node.sock", under=("prlimit", "--nofile=72:72"))
    try:
        for _ in range(8):
            node.client().ping()
        code, says = probe("--live", *of(node))
        assert (code, "is live, but refuses clients" in says) == (0, True)
        code, says = probe("--ready", *of(node))
        assert (code, "the node has 8 clients" in says) == (1, True)
    finally:
        node.close()


def test_a_node_is_ready_without_its_tiers_and_names_them(tmp_path: Path) -> None:
    tier = f"kvhold://127.0.0.1:{free_port()}"
    node = RunningNode(tmp_path / "node.sock", "--tier", tier)
    try:
        told: list[str] = []
        client = node.client()
        client.register(SPACE)

        def is_told() -> bool:
            store(client, a_prompt(SPACE, 64 + len(told)))
            code, says = probe(*of(node))
            assert code == 0, says
            told.append(says)
            return "is not used" in says

        eventually(is_told)
        first, second = told[-1].splitlines()
        assert first == f"the node on {node.path} is ready"
        assert second.startswith("its tier kvhold is not used: ")
    finally:
        node.close()


@contextmanager
def api(node: RunningNode) -> Iterator[subprocess.Popen[str]]:
    command = ["control", "--listen", "127.0.0.1:0", "--socket", str(node.path)]
    history = str(node.path.with_name("history"))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvhold", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environ(KVHOLD_CONTROL_HISTORY_FILE=history),
    )
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait() == 0
        assert process.stdout is not None
        process.stdout.close()


def test_the_api_is_live_without_its_node_but_not_ready(node: RunningNode) -> None:
    where = node.path.with_name("control.sock")
    with api(node) as process:
        assert probe("--control", *of(node)) == (0, f"the API on {where} is ready\n")
        node.close()
        assert probe("--control", "--live", *of(node)) == (0, f"the API on {where} is live\n")
        code, says = probe("--control", "--ready", *of(node))
        assert (code, f"the API on {where} is not ready: " in says) == (1, True)
        process.send_signal(signal.SIGSTOP)
        code, says = probe(
            *("--control", "--live", "--socket", str(node.path), "--timeout-s", "0.2")
        )
        assert (code, "within 0.2 s: timed out" in says) == (1, True)
    code, says = probe("--control", "--live", *of(node))
    assert (code, f"no API answers on {where}" in says) == (1, True)


def test_a_central_cache_is_probed_by_its_own_settings(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("right\n")
    other.write_text("wrong\n")
    for file in (token, other):
        file.chmod(0o600)
    with CentralServer("--token-file", str(token)) as server:
        where = f"127.0.0.1:{server.port}"
        settings = {"KVHOLD_LISTEN_ADDRESS": where, "KVHOLD_LISTEN_TOKEN_FILE": str(token)}
        for question in ("live", "ready"):
            code, says = probe(f"--{question}", *PATIENT, **settings)
            assert (code, says) == (0, f"the central cache on {where} is {question}\n")
        settings["KVHOLD_LISTEN_TOKEN_FILE"] = str(other)
        code, says = probe("--live", *PATIENT, **settings)
        assert (code, "is live, but refuses clients" in says) == (0, True)
        code, says = probe("--ready", *PATIENT, **settings)
        assert (code, "the token is wrong" in says) == (1, True)
        server.pause()
        code, says = probe("--live", "--timeout-s", "0.2", **settings)
        server.resume()
        assert (code, "did not answer within 0.2 s" in says) == (1, True)
    code, says = probe("--live", *PATIENT, **settings)
    assert (code, "does not answer" in says) == (1, True)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    try:
        return make_certificates(tmp_path)
    except NotInstalled as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("with_client_ca", [False, True])
def test_a_central_cache_with_tls_is_probed_by_a_handshake(
    certificates: Certificates, tmp_path: Path, with_client_ca: bool
) -> None:
    settings = {
        "KVHOLD_LISTEN_TLS_CERT": str(certificates.server),
        "KVHOLD_LISTEN_TLS_KEY": str(certificates.server_key),
    }
    if with_client_ca:
        settings["KVHOLD_LISTEN_TLS_CLIENT_CA"] = str(certificates.ca)
    with CentralServer(environ=settings) as server:
        settings["KVHOLD_LISTEN_ADDRESS"] = f"127.0.0.1:{server.port}"
        assert probe("--ready", *PATIENT, **settings)[0] == 0
        log = server.log.read_text()
        assert "refused" not in log
        server.pause()
        code, says = probe("--live", "--timeout-s", "0.2", **settings)
        server.resume()
        assert (code, "did not answer within 0.2 s" in says) == (1, True)


def test_wrong_arguments_and_settings_are_told() -> None:
    code, says = probe("--live", "--ready")
    assert (code, "either --live or --ready" in says) == (2, True)
    code, says = probe(KVHOLD_NODE_SOKET="/tmp/x")
    assert (code, "KVHOLD_NODE_SOCKET" in says) == (1, True)
