"""One engine on two hosts: a node for each, a relay on the second, and a lookup that asks both.

Each host has its own shards. The relay is in this process, and its connection is a real one.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvhold.core.config import SpanConfig
from kvhold.core.errors import ConfigError, NodeError
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Layout
from kvhold.net import login
from kvhold.net import span as s
from kvhold.net.wire import LENGTH_BYTES, Decoder, body_length, encode
from kvhold.node import NodeClient
from kvhold.node.span import HostSpan, OtherHosts, OwnHost, Relay, RelayPlace, SpanHit
from kvhold.testing.cache import HYBRID, LAYOUTS, a_prompt, check, registered, store
from tests.node.nodes import NOTHING, PATIENT, PATIENT_S, RunningNode, eventually

NODE_ARGUMENTS = ("--ram-bytes", "16MiB")


class Host:
    """A node, a client of a worker and, if it is not the scheduler's host, a relay."""

    def __init__(self, path: Path, shards: tuple[int, ...]) -> None:
        self.path, self.shards = path, shards
        self.node = RunningNode(path, *NODE_ARGUMENTS)
        self.client = NodeClient(path, PATIENT, name="worker")

    def restart(self) -> None:
        self.node.kill()
        self.node = RunningNode(self.path, *NODE_ARGUMENTS)
        eventually(lambda: self.client.connected)

    def held(self) -> dict[str, int]:
        return {name: cast(int, number) for name, number in self.client.status()["held"].items()}

    def close(self) -> None:
        self.client.close()
        self.node.close()


class TwoHosts:
    """Shard 0 is on the scheduler's host, shards 1 and 2 on the other."""

    def __init__(self, folder: Path, made: ExitStack, layout: Layout) -> None:
        self.here = Host(folder / "a.sock", (0,))
        made.callback(self.here.close)
        self.there = Host(folder / "b.sock", (1, 2))
        made.callback(self.there.close)
        self.space = Namespace(model="model", layout=layout, shards=3)
        for host in (self.here, self.there):
            registered(host.client, self.space)
        self.relay = Relay(SpanConfig(), "127.0.0.1:0", self.there.client)
        made.callback(self.relay.close)
        self.others = self.connect()
        made.callback(lambda: self.others.close())
        self.span = HostSpan([OwnHost(self.here.client, (0,)), *self.others.hosts])

    def connect(self, **changes: Any) -> OtherHosts:
        place: dict[str, Any] = {
            "name": "the other host",
            "address": f"127.0.0.1:{self.relay.port}",
            "token": self.relay.token,
            "uses_tls": False,
            "shards": (1, 2),
        }
        others = OtherHosts([RelayPlace(**(place | changes))], SpanConfig())
        others.wait_until_tried(PATIENT_S)
        return others

    def lookup(self, prompt: Prompt, **options: Any) -> SpanHit:
        return self.span.lookup(prompt, **({"deadline_s": PATIENT_S} | options))

    def found(self, prompt: Prompt) -> tuple[int, str | None]:
        with self.lookup(prompt) as hit:
            return hit.num_tokens, hit.reason

    def store(self, num_tokens: int, *shards: int, **options: Any) -> Prompt:
        prompt = a_prompt(self.space, num_tokens)
        for shard in shards:
            host = self.here if shard in self.here.shards else self.there
            store(host.client, prompt, shard, **options)
        return prompt

    def check(self, prompt: Prompt, hit: SpanHit) -> None:
        """Every shard of the hit, claimed on its host, has every byte."""
        for host, ticket in zip((self.here, self.there), hit.tickets, strict=True):
            for shard in host.shards:
                lease = host.client.claim(ticket, shard)
                assert lease is not None
                with lease:
                    check(lease, prompt, hit.num_tokens, shard)


@pytest.fixture
def make_hosts(nothing_is_left: None, tmp_path: Path) -> Iterator[Callable[..., TwoHosts]]:
    with ExitStack() as made:
        yield lambda layout=HYBRID: TwoHosts(tmp_path, made, layout)


@pytest.fixture
def hosts(make_hosts: Callable[..., TwoHosts]) -> TwoHosts:
    return make_hosts()


def test_a_prompt_is_a_hit_when_every_host_has_stored_its_shards(hosts: TwoHosts) -> None:
    prompt = hosts.store(90, 0)
    assert hosts.found(prompt) == (0, "never_stored")
    hosts.store(90, 1)
    assert hosts.found(prompt) == (0, "incomplete")
    hosts.store(90, 2)
    with hosts.lookup(prompt) as hit:
        assert (hit.num_tokens, hit.reason, hit.sources) == (90, "whole", {"ram": 90})
        hosts.check(prompt, hit)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_hit_is_as_long_as_the_shortest_of_all_hosts_and_whole_on_each(
    make_hosts: Callable[..., TwoHosts], name: str
) -> None:
    hosts = make_hosts(LAYOUTS[name])
    prompt = hosts.store(92, 0, 1, 2)
    longer = hosts.store(300, 0)
    hosts.store(200, 1, 2)
    for host in (hosts.here, hosts.there):
        assert host.held() == NOTHING
    with hosts.lookup(longer) as hit:
        size = LAYOUTS[name].tail_tokens or 16
        assert 64 <= hit.num_tokens <= 200 // size * size
        hosts.check(longer, hit)
        assert hosts.here.held()["tickets"] == hosts.there.held()["tickets"] == 1
    with hosts.lookup(prompt) as hit:
        hosts.check(prompt, hit)
    eventually(lambda: hosts.here.held() == hosts.there.held() == NOTHING)


def test_a_host_whose_node_is_lost_is_a_miss_until_it_is_back_and_has_stored_again(
    hosts: TwoHosts,
) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    hosts.there.node.kill()
    eventually(lambda: not hosts.there.client.connected)
    assert hosts.found(prompt) == (0, "host_away")
    assert hosts.here.held() == NOTHING
    hosts.there.restart()
    assert hosts.found(prompt)[0] == 0
    hosts.store(64, 1, 2)
    with hosts.lookup(prompt) as hit:
        assert hit.num_tokens == 64
        hosts.check(prompt, hit)


def test_a_ticket_of_a_node_that_was_restarted_is_not_valid(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    with hosts.lookup(prompt) as hit:
        hosts.there.restart()
        hosts.store(64, 1, 2)
        assert hosts.there.client.claim(hit.tickets[1], 1) is None


def test_a_loss_of_the_own_node_is_an_error_and_leaves_nothing_pinned(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    hosts.here.node.kill()
    with pytest.raises(NodeError):
        hosts.lookup(prompt)
    eventually(lambda: hosts.there.held() == NOTHING)


def test_a_node_that_hangs_is_a_miss_and_its_late_answer_holds_nothing(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    with hosts.there.node.stopped():
        with hosts.lookup(prompt, deadline_s=0.2) as hit:
            assert (hit.num_tokens, hit.reason) == (0, "host_away")
        assert hosts.here.held() == NOTHING
    eventually(lambda: hosts.found(prompt)[0] == 64)
    eventually(lambda: hosts.there.held() == NOTHING)


def test_a_relay_that_does_not_answer_costs_one_deadline_and_then_nothing(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = RelayPlace("b", f"127.0.0.1:{listener.getsockname()[1]}", "t", False, (1, 2))
        others = OtherHosts([place], SpanConfig())
        try:
            connection, _ = listener.accept()
            with connection:
                _read(connection)
                connection.sendall(encode(s.RelayWelcome(s.SPAN_VERSION, "0")))
                assert others.wait_until_tried(PATIENT_S) == []
                span = HostSpan([OwnHost(hosts.here.client, (0,)), *others.hosts])
                for deadline_s in (0.2, PATIENT_S):
                    began_s = time.monotonic()
                    assert span.lookup(prompt, deadline_s=deadline_s).reason == "host_away"
                    eventually(lambda: time.monotonic() > began_s + 0.5)  # noqa: B023
                assert hosts.here.held() == NOTHING
        finally:
            others.close()
    assert time.monotonic() < began_s + PATIENT_S


def test_a_lost_relay_is_a_miss_and_releases_what_it_held(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    with hosts.lookup(prompt) as hit:
        assert hosts.there.held()["tickets"] == 1
        hosts.relay.close()
        eventually(lambda: hosts.there.held() == NOTHING)
        eventually(lambda: hosts.found(prompt) == (0, "host_away"))
        assert hosts.there.client.claim(hit.tickets[1], 1) is None
    hosts.relay = Relay(
        SpanConfig(token=hosts.relay.token), f"127.0.0.1:{hosts.relay.port}", hosts.there.client
    )
    try:
        eventually(lambda: hosts.found(prompt)[0] == 64)
    finally:
        hosts.relay.close()


def test_a_scheduler_that_leaves_holds_nothing(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    hit = hosts.lookup(prompt)
    assert hosts.there.held()["tickets"] == 1
    hosts.others.close()
    eventually(lambda: hosts.there.held() == NOTHING)
    hit.close()
    assert hosts.here.held() == NOTHING


def test_a_scheduler_that_falls_silent_holds_nothing(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    with socket.create_connection(("127.0.0.1", hosts.relay.port), PATIENT_S) as connection:
        hello = login.LoginHello(s.SPAN_MAGIC, s.SPAN_VERSION, hosts.relay.token)
        connection.sendall(encode(hello))
        _read(connection)
        query = replace(prompt.query(), only=(1, 2))
        connection.sendall(encode(s.LookUp(query, 0, "all", 10.0)))
        answer: s.LookedUp = Decoder(s.Answer).decode(_read(connection))
        assert answer.num_tokens == 64 and hosts.there.held()["tickets"] == 1
        eventually(lambda: hosts.there.held() == NOTHING, within_s=PATIENT_S)
        assert connection.recv(1) == b""


def test_a_clear_on_one_host_holds_for_all(hosts: TwoHosts) -> None:
    prompt = hosts.store(64, 0, 1, 2)
    for host in (hosts.there, hosts.here):
        host.client.clear(hosts.space.digest if host is hosts.there else None)
        # stored again here; the other host still has the chunks from before the clear
        hosts.store(64, *host.shards)
        assert hosts.found(prompt) == (0, "cleared")
        other = hosts.here if host is hosts.there else hosts.there
        assert other.client.status()["chunks"] == 0
        assert hosts.found(prompt)[0] == 0
        hosts.store(64, *other.shards)
        assert hosts.found(prompt) == (64, "whole")


def test_a_repeated_clear_leaves_what_was_stored_since(hosts: TwoHosts) -> None:
    client, digest = hosts.here.client, hosts.space.digest
    assert client.cleared_ns(digest) == 0
    client.clear(digest)
    at_ns = client.cleared_ns(digest)
    assert at_ns > 0
    hosts.store(64, 0)
    client.repeat_clear(digest, at_ns)
    client.repeat_clear(digest, at_ns - 1)
    assert client.status()["chunks"] > 0
    client.repeat_clear(digest, at_ns + 1)
    assert client.status()["chunks"] == 0
    assert client.cleared_ns(digest) == at_ns + 1
    client.clear()
    assert client.cleared_ns(digest) > at_ns + 1


def test_only_the_engine_of_the_worker_is_served(hosts: TwoHosts) -> None:
    others = hosts.connect(token="another")
    try:
        (why,) = others.wait_until_tried(PATIENT_S)
        assert "the token is wrong" in why
    finally:
        others.close()
    assert hosts.relay.token not in repr(RelayPlace("b", "b:1", hosts.relay.token, False, (1,)))


def test_an_exposed_relay_needs_tls_or_consent(hosts: TwoHosts) -> None:
    with pytest.raises(ConfigError, match=r"span\.listen.*span\.insecure"):
        Relay(SpanConfig(), "10.0.0.5:0", hosts.there.client)
    with pytest.raises(ConfigError, match=r"span\.insecure"):
        hosts.connect(address="10.0.0.5:7713")
    with pytest.raises(ConfigError, match=r"span\.ca_file"):
        OtherHosts(
            [RelayPlace("b", "127.0.0.1:1", "t", True, (1,))], SpanConfig(ca_file="/no/such/file")
        )
    with pytest.raises(NodeError, match=r"span\.listen"):
        Relay(SpanConfig(), f"127.0.0.1:{hosts.relay.port}", hosts.there.client)


def test_a_lookup_of_an_unknown_layout_is_a_miss_not_an_end(hosts: TwoHosts) -> None:
    space = Namespace(model="other", layout=LAYOUTS["full"], shards=3)
    hosts.here.client.register(space)
    with hosts.lookup(a_prompt(space, 64)) as hit:
        assert (hit.num_tokens, hit.reason) == (0, "host_away")
    assert hosts.found(hosts.store(64, 0, 1, 2))[0] == 64


def _read(connection: socket.socket) -> bytes:
    def read(nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += connection.recv(nbytes - len(data)) or pytest.fail("closed")
        return data

    return read(body_length(read(LENGTH_BYTES)))
