"""A node writes what its tiers hold anew: told by a program or by `kvhold compress`, while its
clients go on, and killed in the middle.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

pytest.importorskip("kvhold.kernels.numba_rans", reason="no numba in this environment")

from click.testing import CliRunner

from kvhold.cli.compress import command as compress
from kvhold.cli.decompress import command as decompress
from kvhold.core.errors import ConfigError, NodeError
from kvhold.core.keys import Namespace, Prompt
from kvhold.net import messages as m
from kvhold.node import NodeClient
from kvhold.testing.cache import PLAIN, a_prompt, read, store
from tests.node.nodes import PATIENT_S, SPACE, RawClient, RunningNode, eventually
from tests.node.test_tiers import a_client, is_at_baseline, on_disk, tiers_file

MakeNode = Callable[..., RunningNode]


@pytest.fixture
def over(start_node: MakeNode, tmp_path: Path) -> MakeNode:
    """A function that starts a node over tiers."""
    return lambda *lines, **settings: start_node(
        "--config", tiers_file(tmp_path, *lines, **settings)
    )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands, too, wait for a busy machine."""
    for name in [name for name in os.environ if name.startswith("KVHOLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVHOLD_CLIENT_CALL_TIMEOUT_S", str(PATIENT_S))
    monkeypatch.setenv("KVHOLD_CLIENT_CONNECT_TIMEOUT_S", str(PATIENT_S))


def filled(client: NodeClient, prompts: int = 3) -> NodeClient:
    for seed in range(prompts):
        store(client, a_prompt(SPACE, 160, seed))
        assert client.flush(deadline_s=PATIENT_S)  # or too much would wait, and be dropped
    return client


def run(command: click.Command, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_client_has_a_tier_reencoded_and_the_next_node_reads_every_byte(
    over: MakeNode, tmp_path: Path
) -> None:
    node = over(on_disk(tmp_path))
    client = filled(a_client(node))
    with client.reencode("disk", "lossless") as reencoding:
        counts = reencoding.wait(time.monotonic() + PATIENT_S)
        assert (counts.done, counts.seen, counts.replaced) == (True, 30, 30)
        with client.reencode("disk", "lossless", query=a_prompt(SPACE, 96).query()) as again:
            assert again.wait().same == 6
    assert client.status()["reencodings"] == 0
    node.close()
    client = a_client(over(on_disk(tmp_path)))
    assert [read(client, a_prompt(SPACE, 160, seed)) for seed in range(3)] == [160] * 3
    is_at_baseline(client)


def test_engines_with_and_without_a_loss_share_a_node_and_its_disk_but_no_chunk(
    over: MakeNode, tmp_path: Path
) -> None:
    disk = on_disk(tmp_path, codec="int8")
    node = over(disk)
    exact, lossy = a_client(node), node.client()
    space = SPACE.allowing_loss(max_error=1)
    lossy.register(space)
    store(exact, a_prompt(SPACE, 160))
    assert found_tokens(lossy, a_prompt(space, 160)) == 0
    store(lossy, a_prompt(space, 160))
    assert exact.flush(deadline_s=PATIENT_S)
    encoded = {
        codec: exact.status()["tier_counters"][f"kvhold_encoded_chunks{{tier=disk,codec={codec}}}"]
        for codec in ("lossless", "int8")
    }
    assert encoded == {"lossless": 10, "int8": 10}
    node.close()
    node = over(disk)
    exact, lossy = a_client(node), node.client()
    lossy.register(space)
    assert found_tokens(lossy, a_prompt(space, 160)) == 160
    assert read(exact, a_prompt(SPACE, 160)) == 160, "every byte"


def found_tokens(client: NodeClient, prompt: Prompt) -> int:
    with client.lookup(prompt.query(), wait_s=PATIENT_S) as hit:
        return hit.num_tokens


def test_the_command_says_that_chunks_without_a_budget_stay_exact(
    over: MakeNode, tmp_path: Path, patient: None
) -> None:
    node = over(on_disk(tmp_path))
    client = filled(a_client(node), 1)
    said = run(compress, "--tier", "disk", "--codec", "int8", "--socket", str(node.path))
    assert "10 of 10 chunks were re-encoded" in said
    assert "10 of all use lossless or a more exact codec, because their namespace" in said
    assert read(client, a_prompt(SPACE, 160)) == 160


def test_a_client_that_leaves_stops_its_reencoding(over: MakeNode, tmp_path: Path) -> None:
    node = over("faults+" + on_disk(tmp_path, faults="replace:hang"))
    client, leaving = filled(a_client(node)), node.client()
    leaving.reencode("disk", "lossless")
    eventually(lambda: client.status()["reencodings"] == 1)
    leaving.close()
    eventually(lambda: client.status()["reencodings"] == 0)
    is_at_baseline(client)


def test_the_node_answers_while_a_reencoding_hangs(over: MakeNode, tmp_path: Path) -> None:
    client = filled(a_client(over("faults+" + on_disk(tmp_path, faults="replace:hang:@1"))))
    with client.reencode("disk", "lossless") as reencoding:
        assert [read(client, a_prompt(SPACE, 160, seed)) for seed in range(3)] == [160] * 3
        assert not reencoding.wait(time.monotonic()).done
    is_at_baseline(client)


def test_after_kill_9_in_the_middle_every_frame_is_the_old_one_or_the_new_one(
    over: MakeNode, tmp_path: Path
) -> None:
    node = over(on_disk(tmp_path, batch_bytes="64KiB"))
    client = filled(a_client(node), 30)
    reencoding = client.reencode("disk", "lossless")
    eventually(lambda: reencoding.refresh().replaced)
    node.kill()
    client = a_client(over(on_disk(tmp_path)))
    assert [read(client, a_prompt(SPACE, 160, seed)) for seed in range(30)] == [160] * 30
    assert not [
        name
        for name in client.status()["tier_counters"]
        if name.startswith("kvhold_tier_bad_frames")
    ]
    with client.reencode("disk", "lossless") as rest:
        counts = rest.wait(time.monotonic() + PATIENT_S)
    assert (counts.seen, counts.replaced + counts.same, counts.failed) == (300, 300, 0)
    assert counts.same > 0, "it was killed in the middle"
    is_at_baseline(client)


def test_a_namespace_is_known_again_when_its_engine_has_found_the_next_node(
    over: MakeNode, tmp_path: Path
) -> None:
    node = over(on_disk(tmp_path))
    engine = filled(a_client(node))
    node.kill()
    with pytest.raises(NodeError):
        eventually(lambda: engine.ping())
    again = over(on_disk(tmp_path))
    eventually(lambda: engine.connected)
    with again.client().reencode("disk", "int8") as reencoding:
        assert reencoding.wait(time.monotonic() + PATIENT_S).seen == 30


def test_what_cannot_be_reencoded_is_refused_and_the_connection_goes_on(
    over: MakeNode, tmp_path: Path
) -> None:
    client = filled(a_client(over(on_disk(tmp_path))))
    unknown = Namespace("unknown", PLAIN).digest
    for tier, codec, namespace, told in (
        ("dsik", "lossless", None, "did you mean 'disk'"),
        ("disk", "losless", None, "did you mean 'lossless'"),
        ("disk", "int8", unknown, "is not known here"),
    ):
        with pytest.raises(NodeError, match=told):
            client.reencode(tier, codec, namespace=namespace)
    assert client.connected
    is_at_baseline(client)


def test_a_stranger_learns_nothing_of_a_reencoding_and_cannot_stop_it(
    over: MakeNode, tmp_path: Path
) -> None:
    node = over("faults+" + on_disk(tmp_path, faults="replace:hang"))
    client = filled(a_client(node))
    with client.reencode("disk", "lossless"), RawClient(node.path, greet=True) as raw:
        mine = raw.ask(m.Reencode("disk", "lossless"))
        assert isinstance(mine, m.ReencodeStatus)
        for number in range(mine.number - 3, mine.number):
            assert raw.ask(m.Progress(number)) == m.NotFound()
            raw.ask(m.Release(number))
        assert client.status()["reencodings"] == 2


class TestCommands:
    def test_there_and_back_for_people(self, over: MakeNode, tmp_path: Path, patient: None) -> None:
        node = over(on_disk(tmp_path))
        client = filled(a_client(node))
        there = run(compress, "--tier", "disk", "--codec", "lossless", "--socket", str(node.path))
        assert there.startswith("30 of 30 chunks were re-encoded with lossless: ")
        back = run(
            decompress,
            "--tier",
            "disk",
            "--namespace",
            SPACE.digest.hex(),
            "--socket",
            str(node.path),
        )
        assert back.startswith("30 of 30 chunks were re-encoded with raw: ")
        again = run(decompress, "--tier", "disk", "--socket", str(node.path))
        assert "0 of 30 chunks" in again
        assert "30 have this codec already" in again
        is_at_baseline(client)

    def test_as_json_for_scripts(self, over: MakeNode, tmp_path: Path, patient: None) -> None:
        node = over(on_disk(tmp_path))
        filled(a_client(node))
        shown = json.loads(
            run(
                compress,
                "--tier",
                "disk",
                "--codec",
                "lossless",
                "--json",
                "--socket",
                str(node.path),
            )
        )
        assert (shown["done"], shown["stopped"], shown["seen"], shown["replaced"]) == (
            True,
            "",
            30,
            30,
        )
        assert shown["bytes_before"] > 0

    def test_a_node_that_knows_no_namespace_says_so(
        self, over: MakeNode, tmp_path: Path, patient: None
    ) -> None:
        node = over(on_disk(tmp_path))
        shown = run(compress, "--tier", "disk", "--codec", "raw", "--socket", str(node.path))
        assert "no chunk of a namespace that the node knows" in shown

    def test_one_that_ends_early_exits_with_1(
        self, over: MakeNode, tmp_path: Path, patient: None
    ) -> None:
        node = over("faults+" + on_disk(tmp_path, faults="scan:error:1:unavailable"))
        filled(a_client(node))
        result = CliRunner().invoke(
            compress, ["--tier", "disk", "--codec", "lossless", "--socket", str(node.path)]
        )
        assert result.exit_code == 1
        assert (
            "the re-encoding ended early: tier disk failed: disk: scan: a fault on purpose"
            in result.stderr
        )

    def test_a_namespace_that_is_no_digest_is_named(self, patient: None) -> None:
        result = CliRunner().invoke(
            compress, ["--tier", "disk", "--codec", "raw", "--namespace", "model"]
        )
        assert isinstance(result.exception, ConfigError)
        assert "--namespace 'model': write its digest, 32 hexadecimal digits" in str(
            result.exception
        )
