"""The tier of the example keeps the contract of tiers, and a cache uses it."""

import ast
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.plugin_tier import SQLiteTier
from kvhold.testing import TierContract
from tests.examples.running import EXAMPLES, run_example


class TestSQLiteTier(TierContract):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[SQLiteTier]:
        tier = SQLiteTier(str(tmp_path / "chunks.db"))
        yield tier
        await tier.close()


def test_the_second_cache_finds_what_the_first_one_stored() -> None:
    assert run_example("plugin_tier.py").splitlines() == [
        "first cache: 0 tokens, from {}",
        "second cache: 256 tokens, from {'sqlite': 256}",
    ]


def test_the_tier_has_at_most_80_lines() -> None:
    classes = [
        node
        for node in ast.parse((EXAMPLES / "plugin_tier.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert [node.name for node in classes] == ["SQLiteTier"]
    assert (classes[0].end_lineno or 0) - classes[0].lineno < 80
