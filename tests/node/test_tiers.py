"""A node with a tier below: what its clients get from there, and what becomes of it when they, or
the node, come to a sudden end.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvhold.core import api
from kvhold.core.api import Cache
from kvhold.core.errors import NodeError
from kvhold.core.keys import Namespace
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.node import client as client_module
from kvhold.node.paths import clears_path
from kvhold.testing import CacheContract
from kvhold.testing.cache import HYBRID, MakeCache, a_prompt, check, read, store
from tests.node.nodes import (
    NOTHING,
    PATIENT_S,
    SPACE,
    RawClient,
    RunningNode,
    clean_environ,
    eventually,
    held_by,
    run_kvhold,
)

MakeNode = Callable[..., RunningNode]

_A_DAY_S = 86400.0

_A_CLIENT_THAT_WAITS = """
import sys
from pathlib import Path
from kvhold.node import NodeClient
from kvhold.testing.cache import a_prompt
from tests.node.nodes import PATIENT, SPACE
client = NodeClient(Path(sys.argv[1]), PATIENT, name="waiting")
client.register(SPACE)
client.lookup(a_prompt(SPACE, 160).query(), wait_s=600)
"""


def tiers_file(folder: Path, *lines: str, **settings: object) -> str:
    """A settings file with these tiers."""
    path = folder / f"{len(list(folder.iterdir()))}.toml"
    rest = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    path.write_text(f"tiers = {list(lines)!r}\n{rest}")
    return str(path)


def on_disk(folder: Path, **options: object) -> str:
    """A disk that nobody gives up because the machine is busy."""
    patient = dict.fromkeys(("probe_timeout_s", "get_timeout_s", "put_timeout_s"), PATIENT_S)
    return f"disk://{folder}/kv?max_bytes=1GiB" + "".join(
        f"&{name}={value}" for name, value in (patient | options).items()
    )


@pytest.fixture
def node_over(start_node: MakeNode, tmp_path: Path) -> Callable[..., RunningNode]:
    """A function that starts a node over tiers."""

    def start(*lines: str, **settings: object) -> RunningNode:
        return start_node("--config", tiers_file(tmp_path, *lines, **settings))

    return start


def a_client(node: RunningNode) -> NodeClient:
    client = node.client()
    client.register(SPACE)
    client.register(Namespace("model", HYBRID))
    return client


def at_rest(client: Cache) -> bool:
    status = client.status()
    return status["arriving_chunks"] == 0 and status["write_behind"]["chunks"] == 0


def is_at_baseline(client: NodeClient) -> None:
    eventually(lambda: at_rest(client))
    assert held_by(client) == NOTHING
    assert client.status()["pinned_chunks"] == 0
    client.clear()
    assert client.status()["used_bytes"] == 0


def restarted(node: RunningNode, node_over: Callable[..., RunningNode], *lines: str) -> RunningNode:
    """A node in its place, with the same tiers and an empty memory."""
    node.close()
    return node_over(*lines)


@pytest.fixture(scope="module")
def shared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node over a disk for all tests of the contract."""
    folder = tmp_path_factory.mktemp("node")
    node = RunningNode(folder / "node.sock", "--config", tiers_file(folder, on_disk(folder)))
    yield node
    node.close()


class TestNodeOverADisk(CacheContract):
    """The whole contract over a node with a disk."""

    lower_tiers = True

    @pytest.fixture
    def make_cache(self, shared_node: RunningNode) -> Iterator[MakeCache]:
        made: list[NodeClient] = []

        def make() -> NodeClient:
            made.append(shared_node.client())
            return made[-1]

        yield make
        for client in made:
            client.close()


def test_what_one_node_stored_the_next_one_has_byte_for_byte(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    node = node_over(on_disk(tmp_path))
    client = a_client(node)
    prompts = [
        a_prompt(space, 90, seed)
        for seed in range(5)
        for space in (SPACE, Namespace("model", HYBRID))
    ]
    for prompt in prompts:
        store(client, prompt)
    client = a_client(restarted(node, node_over, on_disk(tmp_path)))
    assert [read(client, prompt) for prompt in prompts] == [90] * 10
    assert client.status()["tiers"][0]["name"] == "disk"
    is_at_baseline(client)


def test_a_node_that_is_told_to_stop_writes_what_waits_first(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    slow = "faults+" + on_disk(
        tmp_path, faults="put:delay:@1:2s", batch_bytes="64KiB", concurrent_calls=1
    )
    node = node_over(slow, drain_timeout_s=PATIENT_S)
    client = a_client(node)
    prompts = [a_prompt(SPACE, 160, seed) for seed in range(3)]
    for prompt in prompts:
        store(client, prompt)
    assert not at_rest(client)
    client = a_client(restarted(node, node_over, on_disk(tmp_path)))
    assert [read(client, prompt) for prompt in prompts] == [160] * 3
    is_at_baseline(client)


def test_one_that_hangs_while_writing_keeps_no_node_from_ending(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    node = node_over(
        "faults+" + on_disk(tmp_path, faults="put:hang", put_timeout_s=1000), drain_timeout_s=0.1
    )
    store(a_client(node), a_prompt(SPACE, 160))
    node.close()  # asserts that it ends well


def test_what_a_killed_node_was_writing_is_whole_or_not_there(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    node = node_over(on_disk(tmp_path, batch_bytes="64KiB"))
    client = a_client(node)
    prompts = [a_prompt(SPACE, 160, seed) for seed in range(30)]
    for prompt in prompts:
        store(client, prompt)
    node.kill()
    client = a_client(node_over(on_disk(tmp_path)))
    for prompt in prompts:
        read(client, prompt)  # asserts that every byte is right
    assert not [
        name
        for name in client.status()["tier_counters"]
        if name.startswith("kvhold_tier_bad_frames")
    ]
    is_at_baseline(client)


def test_a_client_that_is_killed_while_its_lookup_arrives_leaves_nothing(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    filled = node_over(on_disk(tmp_path))
    store(a_client(filled), a_prompt(SPACE, 160))
    slow = "faults+" + on_disk(tmp_path, faults="get:hang:@1", get_timeout_s=3)
    node = restarted(filled, node_over, slow)
    client = a_client(node)
    environ = clean_environ(PYTHONPATH=os.pathsep.join(sys.path))
    waiting = subprocess.Popen(
        [sys.executable, "-c", _A_CLIENT_THAT_WAITS, str(node.path)], env=environ
    )
    try:
        eventually(
            lambda: (
                (now := client.status())["arriving_chunks"] == 10 and now["held"]["tickets"] == 1
            )
        )
    finally:
        waiting.send_signal(signal.SIGKILL)
        waiting.wait()
    eventually(lambda: held_by(client) == NOTHING)
    eventually(lambda: at_rest(client))
    assert read(client, a_prompt(SPACE, 160)) == 160
    is_at_baseline(client)


def test_a_lookup_under_way_when_the_node_is_killed_fails_in_time(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    filled = node_over(on_disk(tmp_path))
    store(a_client(filled), a_prompt(SPACE, 160))
    node = restarted(
        filled, node_over, "faults+" + on_disk(tmp_path, faults="get:hang", get_timeout_s=1000)
    )
    client = a_client(node)
    hit = client.lookup(a_prompt(SPACE, 160).query(), wait_s=0)
    assert hit.arriving
    node.kill()
    with pytest.raises(Exception, match="node"):
        hit.wait(time.monotonic() + PATIENT_S)
    hit.close()


def test_who_waits_for_what_arrives_or_is_written_is_told_when_it_has(
    node_over: Callable[..., RunningNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is not told would ask again in a day."""
    monkeypatch.setattr(api, "_FIRST_PAUSE_S", _A_DAY_S)
    monkeypatch.setattr(api, "_LONGEST_PAUSE_S", _A_DAY_S)
    monkeypatch.setattr(client_module, "_FLUSH_PAUSE_S", _A_DAY_S)
    late = {"faults": "put:delay:@1:100ms,get:delay:@1:100ms"}
    filled = node_over("faults+" + on_disk(tmp_path, **late))
    client, other = a_client(filled), a_client(filled)
    store(client, a_prompt(SPACE, 160))
    assert client.flush(deadline_s=_A_DAY_S)
    store(other, a_prompt(SPACE, 160, seed=1))
    assert other.flush(deadline_s=_A_DAY_S)
    assert client.clear(Namespace("model", HYBRID).digest) == 0
    client = a_client(restarted(filled, node_over, "faults+" + on_disk(tmp_path, **late)))
    for seed in range(2):
        with client.lookup(a_prompt(SPACE, 160, seed).query(), wait_s=_A_DAY_S) as hit:
            assert (hit.num_tokens, hit.sources) == (160, {"disk": 160})
    is_at_baseline(client)


@pytest.mark.parametrize(
    ("space", "num_tokens"), [(SPACE, 160), (SPACE, 165), (Namespace("model", HYBRID), 90)]
)
def test_what_arrives_is_lent_as_it_comes(
    node_over: Callable[..., RunningNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    space: Namespace,
    num_tokens: int,
) -> None:
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(api, pause, _A_DAY_S)  # it is told of each piece
    filled = node_over(on_disk(tmp_path))
    prompt = a_prompt(space, num_tokens)
    store(a_client(filled), prompt)
    one_by_one = {"faults": "get:delay:1:30ms", "batch_bytes": 1, "concurrent_calls": 1}
    client = a_client(restarted(filled, node_over, "faults+" + on_disk(tmp_path, **one_by_one)))
    ends = []
    size = space.layout.tokens_per_chunk
    with client.lookup(prompt.query(), wait_s=0) as hit:
        for lease in api.leases_as_they_arrive(
            client, hit, size, until_s=time.monotonic() + _A_DAY_S
        ):
            end = lease.first_chunk * size + int(lease.num_tokens.sum())
            check(lease, prompt, end)
            ends.append(end)
        assert (hit.num_tokens, hit.sources) == (num_tokens, {"disk": num_tokens})
    assert ends[-1] == num_tokens
    assert len(ends) > 3 or space is not SPACE, (
        "of a window only what the whole hit needs is read, so that it is no shorter hit before"
    )
    is_at_baseline(client)


def test_who_waits_when_the_node_is_killed_waits_no_longer(
    node_over: Callable[..., RunningNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_FIRST_PAUSE_S", _A_DAY_S)
    monkeypatch.setattr(api, "_LONGEST_PAUSE_S", _A_DAY_S)
    filled = node_over(on_disk(tmp_path))
    store(a_client(filled), a_prompt(SPACE, 160))
    node = restarted(
        filled, node_over, "faults+" + on_disk(tmp_path, faults="get:hang", get_timeout_s=1000)
    )
    hit = a_client(node).lookup(a_prompt(SPACE, 160).query(), wait_s=0)
    killing = threading.Timer(0.2, node.kill)
    killing.start()
    with pytest.raises(NodeError):
        hit.wait(time.monotonic() + _A_DAY_S)
    killing.join()
    hit.close()


def test_a_ticket_that_arrives_is_claimed_by_another_process_as_far_as_it_has_come(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    filled = node_over(on_disk(tmp_path))
    store(a_client(filled), a_prompt(SPACE, 160))
    node = restarted(
        filled, node_over, "faults+" + on_disk(tmp_path, faults="get:hang:@1", get_timeout_s=2)
    )
    scheduler, worker = a_client(node), a_client(node)
    store(scheduler, a_prompt(SPACE, 32))
    with scheduler.lookup(a_prompt(SPACE, 160).query(), wait_s=0) as hit:
        assert (hit.arriving, hit.num_tokens) == (True, 32)
        lease = worker.claim(hit.ticket)
        assert lease is not None
        with lease:
            check(lease, a_prompt(SPACE, 160), 32)
        hit.refresh()
        assert (hit.arriving, hit.num_tokens) == (False, 32), "a claim settles it"
    is_at_baseline(worker)


def test_a_stranger_cannot_take_what_was_prefetched_into_a_ticket(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    filled = node_over(on_disk(tmp_path))
    store(a_client(filled), a_prompt(SPACE, 160))
    node = restarted(
        filled, node_over, "faults+" + on_disk(tmp_path, faults="get:hang:@1", get_timeout_s=1)
    )
    client = a_client(node)
    store(client, a_prompt(SPACE, 32))
    with client.lookup(a_prompt(SPACE, 32).query()) as hit:
        client.prefetch(a_prompt(SPACE, 160).query())
        with RawClient(node.path, greet=True) as raw:
            for number in range(hit.ticket, hit.ticket + 5):
                raw.ask(m.Refresh(number, settle=True))
    eventually(lambda: at_rest(client))
    is_at_baseline(client)


def test_a_write_through_store_knows_when_it_is_below(
    node_over: Callable[..., RunningNode], tmp_path: Path
) -> None:
    client = a_client(
        node_over(
            "faults+" + on_disk(tmp_path, faults="put:hang:@2", put_timeout_s=1000),
            drain_timeout_s=0.1,
        )
    )
    one = SPACE.layout.tokens_per_chunk  # more could be written by several puts
    names = a_prompt(SPACE, one).chunks()
    with client.reserve(SPACE.layout, names) as reservation:
        mark = reservation.commit()
    assert client.flush(mark, deadline_s=PATIENT_S)
    with client.reserve(SPACE.layout, a_prompt(SPACE, one, seed=1).chunks()) as reservation:
        later = reservation.commit()
    assert not client.flush(later, deadline_s=0)
    assert client.flush(mark, deadline_s=0)


def test_a_node_whose_tiers_cannot_be_does_not_start_and_says_why(tmp_path: Path) -> None:
    ended = run_kvhold(
        "serve", "--socket", str(tmp_path / "s"), "--config", tiers_file(tmp_path, "dsik:///x")
    )
    assert ended.returncode != 0
    assert "did you mean 'disk'" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_node_remembers_in_the_users_state_folder_which_clears_a_tier_owes(
    start_node: Callable[..., RunningNode], tmp_path: Path
) -> None:
    blocked, settings = tmp_path / "kv", tmp_path / "kvhold.toml"
    settings.write_text(f'tiers = ["disk://{blocked}?max_bytes=64MiB&breaker_pause_s=0.01"]\n')
    blocked.write_text("a file where the folder is to be: the tier is down")
    node = start_node("--config", str(settings), "--ram-bytes", "16MiB")
    with node.client() as client:
        client.register(SPACE)
        client.clear(SPACE.digest)
        eventually(lambda: client.status()["tiers"][0]["pending_clears"] == 2)  # of its spans, too
    journal = clears_path(node.path)
    assert journal.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert journal.stat().st_mode & 0o777 == 0o600
    node.kill()
    with start_node("--config", str(settings), "--ram-bytes", "16MiB").client() as client:
        eventually(lambda: client.status()["tiers"][0]["pending_clears"] == 2)  # of its spans, too
        blocked.unlink()
        eventually(lambda: client.status()["tiers"][0]["pending_clears"] == 0)
        # places and their folders alone: no clear is pending or missed
        known = re.compile(r"^(=.*|@\w+\t[^\t\n]+)\n", flags=re.MULTILINE)
        eventually(lambda: not known.sub("", journal.read_text()))
