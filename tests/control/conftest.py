"""Nodes are real servers, in processes of their own."""

from pathlib import Path

import pytest

from tests.node.conftest import node as node
from tests.node.conftest import nothing_is_left as nothing_is_left
from tests.node.conftest import shared_node as shared_node
from tests.node.conftest import start_node as start_node

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)
