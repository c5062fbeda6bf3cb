"""Prompts that go from one node to another because somebody said so."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.errors import NodeError
from kvhold.core.keys import Namespace
from kvhold.testing.cache import HYBRID, a_prompt, read, store
from tests.node.fleets import Fleet, fleet, free_port, joined, peer_of, peers, port_of
from tests.node.nodes import PATIENT_S, SPACE, RunningNode, eventually

__all__ = ["fleet"]


def pair_of(fleet: Fleet, **of_second: Any) -> tuple[RunningNode, RunningNode, str]:
    """Two nodes that follow each other, and the second one's address."""
    ports = free_port(), free_port()
    first = fleet.start("a", peers(*ports), port=ports[0])
    second = fleet.start("b", peers(*ports), port=ports[1], **of_second)
    return first, second, f"127.0.0.1:{ports[1]}"


def followed(client: Any) -> bool:
    peers_ = client.status()["tiers"][-1]["followed_peers"]["peers"]
    return any(peer["state"] == "following" for peer in peers_)


def both_joined(first: RunningNode, second: RunningNode, space: Namespace = SPACE) -> Any:
    here, there = joined(first, space), joined(second, space)
    eventually(lambda: followed(here) and followed(there))
    return here, there


@pytest.mark.parametrize("drop", [False, True])
def test_a_prompt_goes_to_the_named_peer(fleet: Fleet, drop: bool) -> None:
    first, second, address = pair_of(fleet)
    here, there = both_joined(first, second)
    prompt, other = a_prompt(SPACE, 70), a_prompt(SPACE, 64, seed=7)
    store(here, prompt)
    store(here, other)
    with here.copy(f"host:{address}", prompt.query(), drop=drop) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert (progress.stopped, progress.failed) == ("", 0)
    assert progress.copied == 5 and progress.dropped == (5 if drop else 0)
    assert there.status()["chunks"] == 5
    assert here.status()["chunks"] == (4 if drop else 9)
    with there.lookup(prompt.query()) as hit:
        assert hit.sources == {"ram": 70}
    assert read(there, prompt) == 70, "every byte is compared"
    assert there.status()["pinned_chunks"] == here.status()["pinned_chunks"] == 0


def test_a_prompt_with_a_window_goes_as_far_as_a_hit_needs_it(fleet: Fleet) -> None:
    space = Namespace("content:2", HYBRID)
    first, second, address = pair_of(fleet)
    here, there = both_joined(first, second, space)
    prompt = a_prompt(space, 96)
    store(here, prompt)
    with here.lookup(prompt.query()) as hit:
        expected = hit.num_tokens
    with here.copy(f"host:{address}", prompt.query(), drop=True) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert (progress.stopped, progress.failed) == ("", 0)
    assert progress.copied == progress.dropped == there.status()["chunks"]
    with there.lookup(prompt.query()) as hit:
        assert hit.sources == {"ram": expected}


def test_what_is_only_on_the_disk_is_loaded_too(fleet: Fleet, tmp_path: Path) -> None:
    ports = free_port(), free_port()
    disk = f"disk://{tmp_path}/disk?max_bytes=64MiB"
    first = fleet.start("a", disk, peers(*ports), port=ports[0])
    second = fleet.start("b", peers(*ports), port=ports[1])
    here, there = both_joined(first, second)
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    assert here.flush(deadline_s=PATIENT_S)
    with here.copy("disk", prompt.query(), drop=True) as copying:
        copying.wait(time.monotonic() + PATIENT_S)
    assert here.status()["chunks"] == 0
    with here.copy(f"host:127.0.0.1:{ports[1]}", prompt.query()) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert (progress.stopped, progress.copied, progress.failed) == ("", 0, 0)
    with there.lookup(prompt.query()) as hit:
        assert hit.sources == {"ram": 64}


def test_only_peers_of_the_settings_are_asked(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, _ = both_joined(first, second)
    query, own = a_prompt(SPACE, 64).query(), f"127.0.0.1:{port_of(first)}"
    for name in ("10.0.0.9:7711", "", address + "1", own):
        told = re.escape(f"host:{name}: no peers have this name; peers: {address}")
        with pytest.raises(NodeError, match=told):
            here.copy(f"host:{name}", query)


def test_a_node_without_peers_names_what_is_missing(fleet: Fleet) -> None:
    port = free_port()
    alone = joined(fleet.start("a"))
    with pytest.raises(NodeError, match="host:b: this node follows no peers"):
        alone.copy("host:b", a_prompt(SPACE, 64).query())
    fleet.start("b", port=port)
    silent = joined(fleet.start("c", peers(port)))
    eventually(lambda: peer_of(silent)["state"] == "following")
    with pytest.raises(NodeError, match=r"peers cannot load from here: set peers\.listen"):
        silent.copy(f"host:127.0.0.1:{port}", a_prompt(SPACE, 64).query())


def test_a_peer_that_is_gone_is_refused_and_nothing_is_dropped(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, _ = both_joined(first, second)
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    second.kill()
    eventually(lambda: not followed(here))
    with pytest.raises(NodeError, match=f"host:{address}: .*peers"):
        here.copy(f"host:{address}", prompt.query(), drop=True)
    assert here.status()["chunks"] == 4


def test_a_peer_that_is_lost_meanwhile_ends_the_copy(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, _ = both_joined(first, second)
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    with second.stopped():
        copying = here.copy(f"host:{address}", prompt.query(), drop=True)
        assert not copying.refresh().done
        second.kill()
        progress = copying.wait(time.monotonic() + PATIENT_S)
        copying.close()
    assert progress.stopped and progress.copied == progress.dropped == 0
    assert progress.failed == 4 and here.status()["chunks"] == 4
    eventually(lambda: here.status()["pinned_chunks"] == 0)


def test_a_cancelled_copy_holds_nothing(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here, there = both_joined(first, second)
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    with second.stopped(), here.copy(f"host:{address}", prompt.query(), drop=True) as copying:
        assert not copying.refresh().done
    eventually(lambda: here.status()["pinned_chunks"] == 0)
    assert here.status()["chunks"] == 4
    eventually(lambda: there.status()["pinned_chunks"] == there.status()["arriving_chunks"] == 0)


def test_a_prompt_above_the_peers_quota_is_refused(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet, namespace_quota_bytes="8KiB")
    here, there = both_joined(first, second)
    prompt = a_prompt(SPACE, 640)
    store(here, prompt)
    with here.copy(f"host:{address}", prompt.query(), drop=True) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert "over quota" in progress.stopped and "namespace_quota_bytes" in progress.stopped
    assert progress.copied == 0 and here.status()["chunks"] == 40
    assert there.status()["chunks"] == 0


def test_a_peer_without_the_namespace_says_so(fleet: Fleet) -> None:
    first, second, address = pair_of(fleet)
    here = joined(first)
    eventually(lambda: followed(here))
    eventually(lambda: followed(second.client()))
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    with here.copy(f"host:{address}", prompt.query()) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert "no engine of this namespace has joined its node" in progress.stopped


def test_a_peer_that_does_not_follow_this_node_says_so(fleet: Fleet) -> None:
    ports = free_port(), free_port()
    second = fleet.start("b", port=ports[1])
    first = fleet.start("a", peers(*ports), port=ports[0])
    here, _ = joined(first), joined(second)
    eventually(lambda: followed(here))
    prompt = a_prompt(SPACE, 64)
    store(here, prompt)
    with here.copy(f"host:127.0.0.1:{ports[1]}", prompt.query()) as copying:
        progress = copying.wait(time.monotonic() + PATIENT_S)
    assert "it does not follow this node" in progress.stopped
