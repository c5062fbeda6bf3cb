"""The status has exactly the declared fields, and docs/api.md shows their meanings."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from kvhold.cache import open_cache
from kvhold.core import status as status_module
from kvhold.core.config import load_config
from kvhold.core.errors import ProtocolError
from kvhold.core.status import CacheStatus, CentralStatus, NodeStatus, TiersStatus, check_status
from kvhold.node.central_store import CentralStore
from kvhold.testing.cache import a_prompt, store
from kvhold.tiers.ram import Entry
from tests.node.nodes import SPACE, RunningNode

PAGE = Path(__file__).parents[2] / "docs/api.md"
CLASSES = {
    node.name: node
    for node in ast.parse(inspect.getsource(status_module)).body
    if isinstance(node, ast.ClassDef)
}
WITHOUT_TIERS = CacheStatus.__annotations__.keys() - TiersStatus.__annotations__.keys()


def differences(value: Any, kind: Any, at: str = "status") -> Iterator[str]:
    """Yield each part of a value that is missing, undeclared, or of another type."""
    if is_typeddict(kind):
        fields = get_type_hints(kind)
        yield from (f"{at} lacks {name}" for name in sorted(kind.__required_keys__ - value.keys()))
        yield from (f"{at} also has {name}" for name in sorted(value.keys() - fields))
        for name in value.keys() & fields:
            yield from differences(value[name], fields[name], f"{at}.{name}")
    elif get_origin(kind) is list:
        for number, item in enumerate(value):
            yield from differences(item, get_args(kind)[0], f"{at}[{number}]")
    elif get_origin(kind) is dict:
        for key, item in value.items():
            yield from differences(key, get_args(kind)[0], f"{at}, a key")
            yield from differences(item, get_args(kind)[1], f"{at}.{key}")
    else:
        kinds = {*(get_args(kind) or [kind])}
        if type(value) not in (kinds | {int} if float in kinds else kinds):
            yield f"{at} is {value!r}, not {kind}"


def fields_of(name: str) -> dict[str, tuple[str, str]]:
    """Return the type and the meaning of each field of a class, the inherited ones first."""
    of = CLASSES[name]
    fields: dict[str, tuple[str, str]] = {}
    for base in of.bases:
        if isinstance(base, ast.Name) and base.id in CLASSES:
            fields |= fields_of(base.id)
    meanings = dict(re.findall(r"^(\w+): +(.+)$", ast.get_docstring(of) or "", re.MULTILINE))
    own = {
        part.target.id: ast.unparse(part.annotation)
        for part in of.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    assert meanings.keys() == own.keys(), name
    return fields | {field: (kind, meanings[field]) for field, kind in own.items()}


@pytest.mark.parametrize("name", CLASSES)
def test_the_docstring_of_each_class_has_the_meaning_of_each_field(name: str) -> None:
    assert all(meaning for _, meaning in fields_of(name).values())


def test_the_api_page_renders_these_docstrings() -> None:
    assert "\n::: kvhold.core.status\n" in PAGE.read_text()


def test_a_cache_without_tiers_has_the_declared_fields() -> None:
    with open_cache(ram_bytes="16MiB", huge_pages="never") as cache:
        cache.register(SPACE)
        store(cache, a_prompt(SPACE, 64))
        status = cache.status()
        assert status["chunks"]
        assert list(differences(status, CacheStatus)) == []
        assert status.keys() == WITHOUT_TIERS


def test_a_cache_with_tiers_has_the_declared_fields(tmp_path: Path) -> None:
    tiers = [f"disk://{tmp_path}/disk?max_bytes=16MiB", "memory://?max_bytes=16MiB"]
    with open_cache(ram_bytes="16MiB", huge_pages="never", tiers=tiers) as cache:
        cache.register(SPACE)
        store(cache, a_prompt(SPACE, 64))
        assert cache.flush(deadline_s=60)
        status = cache.status()
        assert list(differences(status, CacheStatus)) == []
        assert status.keys() == CacheStatus.__annotations__.keys()
        assert [type(tier["index_bytes"]) for tier in status["tiers"]] == [int, type(None)]


def test_a_tier_of_peers_has_the_declared_fields() -> None:
    tiers = ["peers-dns://localhost:1", "memory://?max_bytes=16MiB"]
    with open_cache(ram_bytes="16MiB", huge_pages="never", tiers=tiers) as cache:
        status = cache.status()
        assert list(differences(status, CacheStatus)) == []
        assert ["followed_peers" in tier for tier in status["tiers"]] == [True, False]


@pytest.mark.server
def test_a_node_has_the_declared_fields(tmp_path: Path) -> None:
    settings = tmp_path / "kvhold.toml"
    settings.write_text(
        f'[peers]\nlisten = "127.0.0.1:0"\n[events]\npublish = "ipc://{tmp_path}/events"\n'
        '[control]\nin_node = true\nlisten = ""\n'
    )
    tiers = ("--tier", "memory://?max_bytes=16MiB", "--tier", "peers://127.0.0.1:1")
    more = (*tiers, "--config", str(settings))
    node = RunningNode(tmp_path / "s", *more)
    try:
        client = node.client()
        client.register(SPACE)
        store(client, a_prompt(SPACE, 64))
        status = client.status()
        assert list(differences(status, NodeStatus)) == []
        assert status.keys() == NodeStatus.__annotations__.keys()
        assert "test" in [c["name"] for c in status["clients"]]
        assert dict(check_status(json.loads(json.dumps(status)))) == dict(status)
    finally:
        node.close()


async def test_a_central_store_has_the_declared_fields() -> None:
    settings = {"ram_bytes": "4MiB", "tiers": ["memory://?max_bytes=4MiB"]}
    central_store = CentralStore(load_config(settings, environ={}))
    await central_store.start()
    try:
        entry = central_store.reserve(bytes(48), 100, None)
        assert isinstance(entry, Entry)
        central_store.commit(entry)
        status = central_store.status()
        assert list(differences(status, CentralStatus)) == []
        assert status.keys() == CentralStatus.__annotations__.keys()
        assert status["values"] == len(status["tiers"]) == 1
    finally:
        await central_store.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pid": "1"}, r"Expected `int`, got `str` - at `\$\.pid`"),
        ({"scrub": {"passes": 0, "pass_bytes": 0}}, "missing required field `interval_s`"),
        ({"tiers": [{"name": "disk"}]}, "missing required field"),
        ({"later": 1}, ""),
    ],
)
def test_the_client_side_check_names_what_it_cannot_read(
    change: dict[str, object], says: str
) -> None:
    with open_cache(ram_bytes="16MiB", huge_pages="never") as cache:
        sent = dict(cache.status()) | {
            "version": "1",
            "protocol": 1,
            "pid": 1,
            "socket": "/s",
            "uptime_s": 1,
            "resident_bytes": 0,
            "huge_pages": False,
            "loop": {
                "longest_turn_s": 0,
                "recent_longest_turn_s": 0.0,
                "recent_longest_turn_cpu_s": 0.0,
            },
            "clients": [],
        }
    if says:
        with pytest.raises(ProtocolError, match=f"the node's status cannot be read: .*{says}"):
            check_status(sent | change)
    else:
        assert dict(check_status(sent | change)) == sent
