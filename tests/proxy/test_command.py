"""`kvhold proxy` as a process of its own."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.node.nodes import PATIENT_S, clean_environ, run_kvhold
from tests.proxy.scripted import ScriptedEngine, eventually

pytestmark = pytest.mark.server


def test_its_settings_come_from_a_file_the_environment_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text('[proxy]\ndecode = ["http://127.0.0.1:1"]\nprotocol = "p2q"\n')
    done = run_kvhold("proxy", "--config", str(file))
    assert (done.returncode, "did you mean 'p2p'?" in done.stderr) == (1, True)
    done = run_kvhold("proxy", "--config", str(file), KVHOLD_PROXY_LISTEN="nowhere")
    assert "proxy.protocol" in done.stderr
    done = run_kvhold("proxy", "--decode", "http://127.0.0.1:1", KVHOLD_PROXY_LISTEN="nowhere")
    assert "proxy.listen: 'nowhere' is not HOST:PORT" in done.stderr


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(name='aiohttp')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_kvhold("proxy", "--decode", "http://127.0.0.1:1", PYTHONPATH=path)
    assert done.returncode == 1
    assert "pip install 'kvhold[proxy]'" in done.stderr


def test_a_node_takes_no_offence_at_settings_of_the_proxy() -> None:
    assert run_kvhold("tiers", KVHOLD_PROXY_DECODE="http://127.0.0.1:1").returncode == 0


async def test_it_says_where_it_is_and_ends_with_sigterm() -> None:
    async with ScriptedEngine() as engine, aiohttp.ClientSession() as client:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvhold", "proxy", "--decode", engine.url),
            *("--listen", "127.0.0.1:0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environ(),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            ready = (await process.stdout.readline()).decode()
            assert "1 decode engines, protocol shared" in ready
            await eventually(lambda: engine.probes)
            url = ready.split()[4].rstrip(":")
            async with client.get(f"{url}/health/live") as response:
                assert await response.json() == {"status": "live"}
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENT_S):
                assert await process.wait() == 0
            assert b"Traceback" not in await process.stderr.read()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
