"""Nodes whose chunks go from arena to arena by the real NIXL."""

import re

import pytest

from kvhold.net.nixl_agent import MISSING, is_installed
from kvhold.testing.cache import a_prompt, read, store
from tests.node.fleets import Fleet, fleet, joined, peer_of, peers, port_of, served
from tests.node.nodes import SPACE, eventually, run_kvhold

__all__ = ["fleet"]

needs_nixl = pytest.mark.skipif(not is_installed(), reason=MISSING)


@needs_nixl
def test_chunks_go_by_nixl_and_every_byte_is_right(fleet: Fleet) -> None:
    first = fleet.start("a", port=0, channel="nixl")
    second = fleet.start("b", peers(port_of(first)), channel="nixl")
    writer, reader = joined(first), joined(second)
    prompt = a_prompt(SPACE, 400)
    store(writer, prompt)
    eventually(lambda: peer_of(reader)["channel"] == "nixl")
    eventually(lambda: read(reader, prompt) == prompt.num_tokens)
    assert peer_of(reader)["nixl_bytes"] > 0
    eventually(lambda: writer.status()["pinned_chunks"] == 0)
    assert served(writer)["in_flight_bytes"] == 0
    told = run_kvhold("peers", "--socket", str(second.path)).stdout
    assert re.search(r"^channel   nixl for 1 peers, .* loaded by it$", told, re.MULTILINE), told
    told = run_kvhold("status", "--socket", str(first.path)).stdout
    assert "by TCP and NIXL" in told


@needs_nixl
def test_a_killed_peer_is_a_miss_and_the_node_goes_on(fleet: Fleet) -> None:
    first = fleet.start("a", port=0, channel="nixl")
    second = fleet.start("b", peers(port_of(first)), channel="nixl")
    writer, reader = joined(first), joined(second)
    prompts = [a_prompt(SPACE, 400, seed) for seed in (1, 2)]
    for prompt in prompts:
        store(writer, prompt)
    eventually(lambda: peer_of(reader)["channel"] == "nixl")
    eventually(lambda: read(reader, prompts[0]) == 400)
    first.kill()
    eventually(lambda: peer_of(reader)["state"] == "away")
    assert read(reader, prompts[1]) == 0
    assert read(reader, prompts[0]) == 400


def test_the_channel_and_its_reason_are_shown(fleet: Fleet) -> None:
    first = fleet.start("a", port=0)
    second = fleet.start("b", peers(port_of(first)))
    writer, reader = joined(first), joined(second)
    prompt = a_prompt(SPACE, 100)
    store(writer, prompt)
    eventually(lambda: read(reader, prompt) == 100)
    reason = "peers.channel is tcp"
    assert (peer_of(reader)["channel"], peer_of(reader)["channel_reason"]) == ("tcp", reason)
    for command in ("peers", "status"):
        told = run_kvhold(command, "--socket", str(second.path)).stdout
        assert f"channel   tcp for 127.0.0.1:{port_of(first)}: {reason}" in told
        assert f"by TCP ({reason})" in run_kvhold(command, "--socket", str(first.path)).stdout
