"""Nodes for tests, and the check that no test leaves a descriptor, a thread or a process behind."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.forks import the_forks
from tests.node.nodes import RunningNode, eventually, open_descriptors

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nodes are real servers, in processes of their own."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvhold")}


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No descriptor, thread or child process that was not there before."""
    the_forks()  # lives longer than the test
    if "shared_node" in request.fixturenames:
        request.getfixturevalue("shared_node")  # so does this
    before, threads, children = open_descriptors(), _threads(), set(psutil.Process().children())
    yield
    eventually(lambda: _threads() <= threads)
    assert open_descriptors().items() <= before.items()
    assert set(psutil.Process().children()) <= children


@pytest.fixture
def start_node(nothing_is_left: None, tmp_path: Path) -> Iterator[Callable[..., RunningNode]]:
    """A function that starts a node on a socket in `tmp_path`, with more arguments for `kvhold
    serve` if given.
    """
    with ExitStack() as started:

        def start(*arguments: str) -> RunningNode:
            node = RunningNode(tmp_path / "node.sock", *arguments)
            started.callback(node.close)
            return node

        yield start


@pytest.fixture
def node(start_node: Callable[..., RunningNode]) -> RunningNode:
    """A node of 16 MiB."""
    return start_node()


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node of 16 MiB for all tests of a module that leave it as they found it."""
    node = RunningNode(tmp_path_factory.mktemp("node") / "node.sock")
    yield node
    node.close()
