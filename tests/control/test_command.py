"""`kvhold control`, `clear`, `lookup`, `prefetch`, `pin` and `unpin`, as a user calls them; and
the OpenAPI document.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from kvhold.cli.clear import command as clear
from kvhold.control.openapi import document
from kvhold.control.routes import ROUTES
from kvhold.testing.cache import a_prompt, store
from tests.control.running import flood, running_control, tokens_of
from tests.node.nodes import (
    PATIENT_S,
    SPACE,
    RunningNode,
    clean_environ,
    eventually,
    run_kvhold,
)


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
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(10, own)
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
        ((), "give a NAMESPACE, --tag or --all"),
        (("00", "--all"), "give a NAMESPACE, --tag or --all"),
        (("--tag", "a=b", "--all"), "give a NAMESPACE, --tag or --all"),
        (("--tag", "ab"), "write NAME=VALUE"),
        (("--tier", "dusk"), "tier 'dusk' is unknown"),
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
    client.register(SPACE.of_spans)
    span = a_prompt(SPACE.of_spans, 32)
    for argument in (SPACE.digest.hex(), "--all"):
        store(client, prompt)
        store(client, span)
        done = run_kvhold("clear", argument, "--json", "--socket", str(node.path))
        assert json.loads(done.stdout)["chunks"] == 6, done.stderr
        with client.lookup(prompt.query()) as hit, client.spans([span.query()]) as spans:
            assert (hit.num_tokens, len(spans)) == (0, 0)


def test_clear_forgets_one_prompt(node: RunningNode, tmp_path: Path) -> None:
    client, prompt, other = node.client(), a_prompt(SPACE, 64), a_prompt(SPACE, 64, seed=7)
    client.register(SPACE)
    for one in (prompt, other):
        store(client, one)
    file = write_tokens(tmp_path, tokens_of(prompt))
    order = ("clear", SPACE.digest.hex()[:9], "--tokens", file, "--socket", str(node.path))
    done = run_kvhold(*order, "--only-end", "--json")
    assert json.loads(done.stdout) == {"namespace": SPACE.digest.hex(), "chunks": 4}, done.stderr
    with client.lookup(prompt.query()) as hit, client.lookup(other.query()) as of_other:
        assert (hit.num_tokens, of_other.num_tokens) == (0, 64)
    for wrong in (("--all", "--tokens", file), (SPACE.digest.hex(), "--only-end")):
        told = CliRunner().invoke(clear, [*wrong, "--socket", str(node.path)])
        assert told.exit_code == 2 and "prompt" in told.output


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


def write_tokens(folder: Path, tokens: list[int]) -> str:
    file = folder / "tokens.json"
    file.write_text(json.dumps(tokens))
    return str(file)


async def test_a_prompt_is_pinned_listed_and_unpinned(node: RunningNode, tmp_path: Path) -> None:
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    file = write_tokens(tmp_path, tokens_of(prompt))

    async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(run_kvhold, *arguments, "--socket", str(node.path))

    async with running_control(node.path):
        order = (SPACE.digest.hex()[:9], "--tokens", file, "--ttl-s", "90", "--owner", "me")
        done = await run("pin", *order)
        assert "pin 1 keeps 64 tokens in memory" in done.stdout, done.stderr
        assert client.status()["pinned_chunks"] == 4
        [pin] = json.loads((await run("pin", "--json")).stdout)
        assert (pin["number"], pin["owner"], pin["num_tokens"]) == (1, "me", 64)
        assert 0 < pin["left_s"] <= 90
        assert " me" in (await run("pin")).stdout
        refused = await run("pin", *order[:4], "0")
        assert refused.returncode == 1 and "ttl_s = 0" in refused.stderr
        assert json.loads((await run("unpin", "1", "--json")).stdout)["num_tokens"] == 64
        assert client.status()["pinned_chunks"] == 0
        refused = await run("unpin", "1")
        assert refused.returncode == 1 and "there is no pin 1" in refused.stderr
        assert "there are no pins" in (await run("pin")).stdout
    for arguments in (("pin",), ("unpin", "1")):
        refused = await run(*arguments)
        assert refused.returncode == 1 and "start it with `kvhold control`" in refused.stderr
        assert "Traceback" not in refused.stderr
    wrong = await run("pin", "--tokens", file)
    assert wrong.returncode == 2 and "give a NAMESPACE" in wrong.stderr


def test_a_prompt_is_prefetched(tmp_path: Path, start_node: Callable[..., RunningNode]) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=256MiB"]\n')
    node = start_node("--config", str(settings))
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    assert client.flush(deadline_s=PATIENT_S)
    flood(client, SPACE)
    assert client.flush(deadline_s=PATIENT_S)
    before = client.status()["counters"].get("kvhold_promoted_chunks", 0)
    file = write_tokens(tmp_path, tokens_of(prompt))
    done = run_kvhold(
        "prefetch", SPACE.digest.hex(), "--tokens", file, "--json", "--socket", str(node.path)
    )
    assert json.loads(done.stdout) == {"tokens": 64, "begun": True}, done.stderr
    eventually(lambda: client.status()["counters"].get("kvhold_promoted_chunks", 0) >= before + 4)


def test_a_prompt_is_moved_to_a_tier(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=256MiB"]\n')
    node = start_node("--config", str(settings))
    client, prompt = node.client(), a_prompt(SPACE, 64)
    client.register(SPACE)
    store(client, prompt)
    order = ("move", SPACE.digest.hex()[:9], "--tokens", write_tokens(tmp_path, tokens_of(prompt)))
    done = run_kvhold(*order, "--tier", "disk", "--socket", str(node.path))
    assert "disk has 4 chunks" in done.stdout and "4 left memory" in done.stdout, done.stderr
    assert client.status()["chunks"] == 0


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
