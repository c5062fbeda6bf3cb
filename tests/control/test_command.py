"""`kvhold control` and `kvhold clear`, as a user calls them; and the OpenAPI document."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from kvhold.control.openapi import document
from kvhold.control.routes import ROUTES
from kvhold.testing.cache import a_prompt, store
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, clean_environ, run_kvhold


async def test_it_says_where_it_is_and_ends_with_sigterm(node: RunningNode) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvhold", "control", "--listen", "127.0.0.1:0"),
        *("--socket", str(node.path)),
        stdout=asyncio.subprocess.PIPE,
        env=clean_environ(),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENT_S), aiohttp.ClientSession() as client:
            ready = (await process.stdout.readline()).decode()
            url = ready.split()[-1]
            async with client.get(f"{url}/health/ready") as response:
                assert await response.json() == {"status": "ready"}
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not node.path.with_name("control.sock").exists()


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError(name='aiohttp')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_kvhold("control", PYTHONPATH=path)
    assert done.returncode == 1
    assert "pip install 'kvhold[control]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give a NAMESPACE, or --all"),
        (("00", "--all"), "give a NAMESPACE, or --all"),
        (("xyz",), "is no namespace"),
        (("00ff00",), "no namespace that begins with"),
    ],
)
def test_clear_needs_to_know_what(node: RunningNode, arguments: tuple[str, ...], told: str) -> None:
    done = run_kvhold("clear", *arguments, "--socket", str(node.path))
    assert done.returncode != 0 and told in done.stderr


def test_clear_forgets_a_namespace_or_all(node: RunningNode) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    for argument in (SPACE.digest.hex(), "--all"):
        store(client, prompt)
        done = run_kvhold("clear", argument, "--json", "--socket", str(node.path))
        assert json.loads(done.stdout)["chunks"] == 4, done.stderr
        with client.lookup(prompt.query()) as hit:
            assert hit.num_tokens == 0


def test_lookup_tells_where_a_prompt_is(node: RunningNode, tmp_path: Path) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 70)
    client.register(SPACE)
    store(client, a_prompt(SPACE, 64))
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([int(token) for token in prompt.tokens]))
    digits = SPACE.digest.hex()[:9]
    arguments = ("lookup", digits, "--tokens", str(file), "--socket", str(node.path))
    done = run_kvhold(*arguments, "--json")
    assert json.loads(done.stdout) == {
        "tokens": 70,
        "num_tokens": 64,
        "sources": {"ram": 64},
        "reason": "never_stored",
    }
    shown = run_kvhold(*arguments, "--prefetch").stdout
    assert "64 of 70 tokens are cached" in shown and "never_stored" in shown


@pytest.mark.parametrize("content", ["{}", "[1.5]", "[true]", "[", '["a"]', "[4294967296]"])
def test_what_is_no_list_of_tokens_is_refused(
    node: RunningNode, tmp_path: Path, content: str
) -> None:
    client = node.client()
    client.register(SPACE)
    file = tmp_path / "tokens.json"
    file.write_text(content)
    done = run_kvhold(
        "lookup", SPACE.digest.hex(), "--tokens", str(file), "--socket", str(node.path)
    )
    assert done.returncode == 1 and "tokens" in done.stderr and "Traceback" not in done.stderr
    done = run_kvhold("lookup", SPACE.digest.hex(), "--socket", str(node.path))
    assert done.returncode == 2 and "give --tokens FILE" in done.stderr


def test_the_document_has_every_route_and_no_loose_reference() -> None:
    made = document()
    operations = {
        (method.upper(), path) for path, of_path in made["paths"].items() for method in of_path
    }
    assert operations == {(route.method, route.path) for route in ROUTES} | {("GET", "/metrics")}
    text = json.dumps(made)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in made["components"]["schemas"]
