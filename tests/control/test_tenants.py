"""What a token of one tenant reads and operates, on each route; the rest stays as it is."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhold.control.access import Access, ControlRole, ForTenants
from kvhold.control.route import Route
from kvhold.control.routes import ROUTES
from kvhold.core.control_config import ControlConfig
from kvhold.core.errors import ConfigError
from kvhold.core.keys import Namespace
from kvhold.core.setting import apply
from kvhold.core.store_options import StoreOptions
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, fill
from tests.control.running import RunningControl, running_control, tokens_of
from tests.node.nodes import RunningNode, eventually

MINE = Namespace("content:1", PLAIN, tags=(("tenant", "acme"),), title="acme's")
THEIRS = Namespace("content:1", PLAIN, tags=(("tenant", "globex"),), title="globex's")
NOBODYS = Namespace("content:1", PLAIN, title="nobody's")
SPACES = (MINE, THEIRS, NOBODYS)
ACME = {"Authorization": "Bearer t-acme"}
READER = {"Authorization": "Bearer t-acme-reads"}


def own_body(route: Route, space: Namespace) -> Any:
    """A good order about a namespace, for each route that takes a body."""
    digits, tokens = space.digest.hex(), tokens_of(a_prompt(space, 64))
    prompt = {"namespace": digits, "tokens": tokens}
    location = {"instance_id": digits, "location": "LocalDiskBackend", "method": "raw"}
    return {
        "lookup": prompt,
        "prefetch": prompt,
        "checksums": prompt,
        "pin": prompt,
        "clear": {"namespace": digits},
        "move": prompt | {"tier": "disk"},
        "reencode": {"tier": "disk", "codec": "raw", "namespace": digits},
        "lmcache_query_instance": {"ip": "127.0.0.1"},
        "lmcache_lookup": {"tokens": tokens},
        "lmcache_clear": {"instance_id": digits, "location": "all"},
        "lmcache_pin": {"instance_id": digits, "location": "ram", "tokens": tokens},
        "lmcache_compress": location,
        "lmcache_decompress": location,
        "lmcache_move": {
            "old_position": [digits, "ram"],
            "new_position": [digits, "disk"],
            "tokens": tokens,
        },
        "lmcache_health": {"instance_id": digits},
        "lmcache_check_finish": {"event_id": "move-1"},
    }.get(route.name)


# what others have, is nowhere in these answers, so their status is 200
LISTS = {
    *("namespaces", "decisions", "held", "prompts", "shares", "pins", "jobs"),
    *("lmcache_query_instance", "lmcache_lookup"),
}
BY_NUMBER = {"unpin", "job", "cancel", "lmcache_check_finish"}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Any]:
    files = {}
    for name in ("acme", "acme-reads", "operate"):
        files[name] = tmp_path / name
        files[name].write_text(f"t-{name}")
        files[name].chmod(0o600)
    return {
        "tenant_operate_token_files": {"acme": str(files["acme"])},
        "tenant_read_token_files": {"acme": str(files["acme-reads"])},
        "operate_token_file": str(files["operate"]),
    }


@pytest.fixture
def client(tmp_path: Path, start_node: Callable[..., RunningNode]) -> NodeClient:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{tmp_path}/disk?max_bytes=64MiB"]\n')
    client = start_node("--config", str(settings)).client()
    for space in SPACES:
        client.register(space)
        store_for(client, space, space.tenant)
    assert client.flush(deadline_s=60)
    return client


def store_for(client: NodeClient, space: Namespace, tenant: str, seed: int = 0) -> None:
    names = a_prompt(space, 64, seed).chunks()
    with client.reserve(PLAIN, names, store_options=StoreOptions(tenant=tenant)) as reservation:
        fill(reservation, PLAIN, names)
        reservation.commit()


def url_of(route: Route, space: Namespace) -> str:
    return route.path.replace("{digest}", space.digest.hex()).replace("{number}", "1")


async def state_of(client: NodeClient, control: RunningControl) -> Any:
    """What an operation of the API might have changed."""
    pins = [pin | {"left_s": 0} for pin in (await control.own("GET", "/v1/pins"))[1]["pins"]]
    status = client.status()
    return (
        status["namespaces"],
        status["chunks"],
        pins,
        (await control.own("GET", "/v1/jobs"))[1],
        client.settings(),
    )


def test_each_route_has_a_rule() -> None:
    without = set(Route.__dataclass_fields__) - {"tenants"}
    with pytest.raises(TypeError, match="tenants"):
        Route(**{name: getattr(ROUTES[0], name) for name in without})
    for route in ROUTES:
        if route.tenants is ForTenants.OWN and route.name not in LISTS | BY_NUMBER:
            assert own_body(route, MINE) or "{digest}" in route.path, f"test {route.name} below"


async def test_others_namespaces_cannot_be_read_or_changed_by_any_route(
    client: NodeClient, tokens: dict[str, Any]
) -> None:
    async with running_control(client.path, **tokens) as control:
        others = {"namespace": THEIRS.digest.hex(), "tokens": tokens_of(a_prompt(THEIRS, 64))}
        assert (await control.own("POST", "/v1/pins", others))[0] == 201
        assert (await control.own("POST", "/v1/move", others | {"tier": "disk", "copy": True}))[0]
        await control.own("POST", "/v1/flush", {"timeout_s": 60})
        for _ in range(2000):
            if (await control.own("GET", "/v1/jobs/1"))[1]["progress"]["done"]:
                break
            await asyncio.sleep(0.01)
        before = await state_of(client, control)
        for route in ROUTES:
            for space in (THEIRS, NOBODYS):
                body = own_body(route, space)
                status, answer = await control.ask(route.method, url_of(route, space), body, ACME)
                if route.tenants is ForTenants.SHARED or route.name in LISTS:
                    assert status == 200, (route.path, answer)
                elif route.name in BY_NUMBER:
                    assert status == 404, (route.path, answer)
                else:
                    assert status == 403, (route.path, answer)
                for foreign in (THEIRS, NOBODYS):
                    assert foreign.digest.hex() not in str(answer) or status == 403, route.path
        for path in ("/metrics", "/v1/history", "/v1/status"):
            status, problem = await control.ask("GET", path, headers=ACME)
            assert (status, problem["reason"]) == (403, "tenant"), path
        assert await state_of(client, control) == before


async def test_a_tenant_operates_its_own_by_each_route(
    client: NodeClient, tokens: dict[str, Any]
) -> None:
    store_for(client, MINE.of_spans, "acme")
    async with running_control(client.path, **tokens) as control:
        last = [route for route in ROUTES if route.name in ("clear", "lmcache_clear")]
        others = [route for route in ROUTES if route not in last and route.name not in BY_NUMBER]
        for route in others + last:
            if route.tenants is not ForTenants.OWN:
                continue
            url, body = url_of(route, MINE), own_body(route, MINE)
            status, answer = await control.ask(route.method, url, body, ACME)
            assert status == route.status, (route.path, answer)
            status, answer = await control.ask(route.method, url, body, READER)
            reads = route.role is ControlRole.READ
            assert status == (route.status if reads else 403), (route.path, answer)
        for method, path in (
            ("GET", "/v1/jobs/1"),
            ("DELETE", "/v1/jobs/1"),
            ("DELETE", "/v1/pins/1"),
        ):
            assert (await control.ask(method, path, headers=ACME))[0] == 200, path
        _, found = await control.ask("GET", "/v1/namespaces", headers=ACME)
        assert [row["title"] for row in found["namespaces"]] == ["acme's"]
        assert (found["others"], found["other_bytes"]) == (0, 0)
    left = {THEIRS.digest.hex(), NOBODYS.digest.hex()}
    assert eventually(lambda: client.status()["namespaces"].keys() == left), "pins end late"


async def test_digits_find_only_own_namespaces(client: NodeClient, tokens: dict[str, Any]) -> None:
    async with running_control(client.path, **tokens) as control:
        for digits in ("", "zz", "0" * 32, THEIRS.digest.hex()[:8], MINE.digest.hex() + "0"):
            order = {"namespace": digits, "tokens": [1]}
            status, problem = await control.ask("POST", "/v1/lookup", order, ACME)
            assert (status, problem["reason"]) == (403, "tenant"), digits
        order = {"namespace": MINE.digest.hex()[:8].upper(), "tokens": [1]}
        assert (await control.ask("POST", "/v1/lookup", order, ACME))[0] == 200
        assert (await control.ask("POST", "/v1/clear", {"all": True}, ACME))[0] == 403
        assert (await control.ask("POST", "/v1/jobs", {"tier": "disk", "codec": "raw"}, ACME))[
            0
        ] == 403


async def test_a_namespace_of_two_tenants_is_nobodys(
    client: NodeClient, tokens: dict[str, Any]
) -> None:
    store_for(client, MINE, "globex", seed=9)
    async with running_control(client.path, **tokens) as control:
        found = (await control.ask("GET", "/v1/namespaces", headers=ACME))[1]
        assert found["namespaces"] == []


async def test_with_a_tenants_token_loopback_needs_a_token(
    node: RunningNode, tokens: dict[str, Any]
) -> None:
    async with running_control(node.path, **tokens) as control:
        assert (await control.ask("GET", "/v1/status"))[0] == 401
        assert (await control.own("GET", "/v1/status"))[0] == 200


@pytest.mark.parametrize("pair", ["acme", "=x", "acme=", "a\nb=x", f"{'a' * 65}=x"])
def test_a_bad_pair_is_named(pair: str) -> None:
    config = ControlConfig(tenant_read_token_files=(pair,))
    with pytest.raises(ConfigError, match=r"tenant_read_token_files: .* is not TENANT=PATH"):
        Access(config, "127.0.0.1")


def test_two_tenants_have_two_tokens(tokens: dict[str, Any]) -> None:
    same = tokens["tenant_operate_token_files"]["acme"]
    config = apply(
        ControlConfig(), {"tenant_operate_token_files": {"a": same, "b": same}}, source="test"
    )
    with pytest.raises(ConfigError, match=r"tenant_operate_token_files\.b: another role or tenant"):
        Access(config, "127.0.0.1")
