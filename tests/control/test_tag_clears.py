"""Clears by tag and of one tier, through the API and in a shell, on real nodes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import RulesConfig
from kvhold.core.keys import Namespace
from kvhold.core.rules import request_rules
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill, read
from tests.control.running import running_control
from tests.node.nodes import PATIENT_S, RunningNode, run_kvhold

BASE = Namespace("content:1", PLAIN, title="/models/one")
ACME = {"customer": "acme", "tenant": "t"}
KINDS: dict[str, dict[str, str]] = {
    "acme's": ACME,
    "acme's in the EU": ACME | {"region": "eu"},
    "globex's": {"customer": "globex", "tenant": "u"},
    "nobody's": {},
}


def store_as_engine(client: NodeClient, tags: dict[str, str]) -> Namespace:
    """As an engine stores a request with tags: only the base namespace is registered."""
    rules = request_rules({"tags": tags}, RulesConfig())
    space = BASE.narrowed(tags=rules.tags)
    names = a_prompt(space, 64).chunks()
    with client.reserve(PLAIN, names, store_options=rules.store_options) as reservation:
        fill(reservation, PLAIN, names)
        reservation.commit()
    return space


def found(client: NodeClient, spaces: dict[str, Namespace]) -> dict[str, int]:
    return {name: read(client, a_prompt(space, 64)) for name, space in spaces.items()}


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "kvhold.toml"
    file.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=256MiB"]\n')
    return file


async def test_the_namespaces_with_a_tag_are_cleared_also_below_and_after_a_kill(
    settings: Path, start_node: Callable[..., RunningNode]
) -> None:
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(BASE)
    spaces = {name: store_as_engine(client, tags) for name, tags in KINDS.items()}
    assert client.flush(deadline_s=PATIENT_S)
    client.close()
    node.kill()
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(BASE)
    async with running_control(node.path) as control:
        status, cleared = await control.own("POST", "/v1/clear", {"tag": "customer=acme"})
        assert (status, cleared.pop("since_s") > 0) == (200, True)
        assert cleared == {
            "chunks": 0,
            "namespaces": 2,
            "unknown": 0,
            "forgotten": 0,
            "unlisted_tiers": [],
        }
        whole = {"acme's": 0, "acme's in the EU": 0, "globex's": 64, "nobody's": 64}
        assert found(client, spaces) == whole
        for tag in ("customer=nobody", "customer=", "customer=acme=x"):
            _, cleared = await control.own("POST", "/v1/clear", {"tag": tag})
            assert (cleared["namespaces"], cleared["chunks"]) == (0, 0)
        for wrong in (
            {"tag": "acme"},
            {"tag": "=acme"},
            {"tag": "x=" + "y" * 200},
            {"tag": "a=b", "all": True},
            {"tag": "a=b", "tokens": [1]},
            {"tier": "disk"},
            {"namespace": "ab", "tokens": [1], "tier": "disk"},
        ):
            status, problem = await control.own("POST", "/v1/clear", wrong)
            assert (status, problem["reason"]) == (400, "bad_request"), wrong
        _, cleared = await control.own("POST", "/v1/clear", {"tag": "customer=globex"})
        assert (cleared["namespaces"], cleared["chunks"]) == (1, 4)
    assert found(client, spaces) == whole | {"globex's": 0}


async def test_one_tier_is_cleared_of_all_of_a_namespace_or_of_a_tag(
    settings: Path, start_node: Callable[..., RunningNode]
) -> None:
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(BASE)
    spaces = {name: store_as_engine(client, tags) for name, tags in KINDS.items()}
    assert client.flush(deadline_s=PATIENT_S)

    def run(*arguments: str) -> Any:
        return run_kvhold("clear", *arguments, "--socket", str(node.path))

    told = await asyncio.to_thread(run, "--tag", "customer=acme", "--tier", "disk")
    assert "2 namespaces with customer=acme: tier disk forgets" in told.stdout, told.stderr
    assert client.status()["chunks"] == 16
    told = await asyncio.to_thread(run, "--tier", "ram", "--json")
    assert json.loads(told.stdout)["chunks"] == 16, told.stderr
    whole = {"acme's": 0, "acme's in the EU": 0, "globex's": 64, "nobody's": 64}
    assert found(client, spaces) == whole
    async with running_control(node.path) as control:
        order = {"namespace": spaces["globex's"].digest.hex(), "tier": "disk"}
        assert await control.own("POST", "/v1/clear", order) == (200, {"chunks": 0})
        assert await control.own("POST", "/v1/clear", {"all": True, "tier": "ram"}) == (
            200,
            {"chunks": 8},
        )
        assert found(client, spaces) == whole | {"globex's": 0}
        assert await control.own("POST", "/v1/clear", {"all": True, "tier": "disk"}) == (
            200,
            {"chunks": 0},
        )
        assert client.status()["chunks"] == 4, "memory keeps them"
        status, problem = await control.own("POST", "/v1/clear", {"all": True, "tier": "dusk"})
        assert (status, problem["reason"]) == (409, "refused")
        assert "did you mean 'disk'" in problem["detail"]


async def test_a_tenant_clears_only_its_own_by_tag_and_in_a_tier(
    settings: Path, tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    token = tmp_path / "token"
    token.write_text("t-u")
    token.chmod(0o600)
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(BASE)
    kinds = {
        "its own": {"tenant": "u", "batch": "7"},
        "another's": {"tenant": "t", "batch": "7"},
    }
    spaces = {name: store_as_engine(client, tags) for name, tags in kinds.items()}
    caller = {"Authorization": "Bearer t-u"}
    async with running_control(node.path, tenant_operate_token_files={"u": str(token)}) as control:
        for order in ({"tier": "disk", "all": True}, {"tier": "ram"}, {"tag": "", "tier": "ram"}):
            assert (await control.ask("POST", "/v1/clear", order, caller))[0] == 403
        other = {"namespace": spaces["another's"].digest.hex(), "tier": "ram"}
        assert (await control.ask("POST", "/v1/clear", other, caller))[0] == 403
        _, cleared = await control.ask("POST", "/v1/clear", {"tag": "tenant=t"}, caller)
        assert (cleared["namespaces"], cleared["chunks"]) == (0, 0)
        _, cleared = await control.ask("POST", "/v1/clear", {"tag": "batch=7"}, caller)
        assert (cleared["namespaces"], cleared["chunks"]) == (1, 4)
        assert found(client, spaces) == {"its own": 0, "another's": 64}
        store_as_engine(client, kinds["its own"])
        mine = {"namespace": spaces["its own"].digest.hex(), "tier": "ram"}
        assert await control.ask("POST", "/v1/clear", mine, caller) == (200, {"chunks": 4})


async def test_it_tells_what_it_does_not_know(
    tmp_path: Path, start_node: Callable[..., RunningNode]
) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["fs://{tmp_path}/shared"]\n')
    node = start_node("--config", str(settings))
    client = node.client()
    client.register(BASE)
    space = store_as_engine(client, ACME)
    told = await asyncio.to_thread(
        run_kvhold, "clear", "--tag", "customer=acme", "--socket", str(node.path)
    )
    assert "1 namespaces with customer=acme: forgot 4 chunks" in told.stdout
    assert "tier fs may have namespaces that only other hosts have met" in told.stderr
    assert read(client, a_prompt(space, 64)) == 0
