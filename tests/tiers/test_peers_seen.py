"""What status, metrics and doctor say of peers, and why their chunks are missed."""

import asyncio
import socket
from pathlib import Path

import pytest

from kvhold import __version__
from kvhold.cache import open_cache
from kvhold.cli.doctor import _look_at_tiers
from kvhold.core.config import load_config
from kvhold.core.errors import TierDenied, TierUnavailable
from kvhold.core.keys import HASH_BYTES, Namespace, place_suffix
from kvhold.core.layout import Group, Layout
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import NEVER_STORED, PEER_DENIED, PEER_EVICTED, PEER_GONE, Reason
from kvhold.core.status import FollowedPeerStatus
from kvhold.net import peers as p
from kvhold.testing.tier import fetch, make_key
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.outcomes import Unknown
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers.directory import Own
from kvhold.tiers.peers.faults import PeerGone
from kvhold_lab.servers.base import NotInstalled, free_port
from kvhold_lab.servers.certificates import make_certificates
from tests.tiers.peer_places import (
    PATIENT_S,
    SPACE,
    eventually,
    eventually_found,
    following,
    served,
)

pytestmark = pytest.mark.asyncio
LAYOUT = Layout(
    groups=(Group(layers=2, planes=2, heads=1, head_dim=64, dtype="float16"),),
    tokens_per_chunk=16,
)


def rows(tier: PeersTier) -> list[FollowedPeerStatus]:
    return tier.peers_status()["peers"]


class TestSeen:
    """What is told of a peer, and why its chunks are missed."""

    async def test_loads_events_and_chunks_are_counted_by_peer(self) -> None:
        async with served() as place, following(place.port) as tier:
            await tier.check()
            for number in range(5):
                place.put(make_key(number), b"x" * 100)
            await eventually(lambda: tier.num_chunks == 5)
            del place.values[make_key(4)]
            keys = [make_key(number) for number in range(3, 5)]
            assert await fetch(tier, keys, [100, 100]) == [b"x" * 100, None]
            [peer] = rows(tier)
            name = f"127.0.0.1:{place.port}"
            assert (peer["address"], peer["name"]) == (name, socket.gethostname())
            assert (peer["state"], peer["cause"]) == ("following", "")
            assert (peer["incarnation"], peer["version"]) == (place.feed.incarnation, __version__)
            assert (peer["chunks"], peer["events"], peer["absent_chunks"]) == (4, 5, 1)
            assert (peer["loads"], peer["loaded_chunks"], peer["loaded_bytes"]) == (1, 1, 100)
            assert peer["events_per_s"] > 0 < peer["loaded_bytes_per_s"]
            assert peer["last_load_s"] == peer["median_load_s"] is not None
            assert (peer["last_fault"], peer["last_fault_ago_s"]) == ("", None)
            counted = tier.metrics.as_dict()
            assert counted.pop(f"kvhold_peer_load_seconds_sum{{peer={name}}}") > 0
            assert counted == {
                f"kvhold_peer_{counter}": value
                for counter, value in {
                    f"loads{{peer={name},result=done}}": 1,
                    f"load_seconds_count{{peer={name}}}": 1,
                    f"loaded_chunks{{peer={name}}}": 1,
                    f"loaded_bytes{{peer={name}}}": 100,
                    f"missed_chunks{{peer={name},reason=peer_evicted}}": 1,
                    f"events{{peer={name}}}": 5,
                    f"index_chunks{{peer={name}}}": 4,
                }.items()
            }

    async def test_the_chunks_of_a_lost_peer_are_missed_because_it_is_gone(self) -> None:
        async with following(free_port()) as tier:
            async with served(port=tier.peers[0].address.port) as place:
                place.put(make_key(1), b"x")
                await eventually_found(tier, make_key(1), 1)
            await eventually(lambda: rows(tier)[0]["state"] == "away")
            gone, absent = await tier.probe([make_key(1), make_key(2)])
            assert isinstance(gone, PeerGone) and gone.miss == PEER_GONE
            assert absent is None
            [peer] = rows(tier)
            assert peer["cause"] in ("closed", "port")
            assert str(peer["address"]) in peer["last_fault"]
            tier.advance(SPACE)
            assert await tier.probe([make_key(1)]) == [None], "it is cleared"

    async def test_a_refusal_is_a_state_with_its_cause(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served(token="hush") as place, following(place.port) as tier:
            with pytest.raises(TierDenied) as caught:
                await tier.check()
            assert caught.value.miss == PEER_DENIED
            [peer] = rows(tier)
            assert (peer["state"], peer["cause"]) == ("refused", "token")
            [refused] = place.server.peers.status_of_refused()
            assert (refused["address"], refused["reason"]) == ("127.0.0.1", "a token is needed")
            monkeypatch.setattr(p, "PEERS_VERSION", 99)
            async with following(place.port, token="hush") as other:
                with pytest.raises(TierUnavailable):
                    await other.check()
                [peer] = rows(other)
                assert (peer["state"], peer["cause"]) == ("refused", "version")
        async with following(free_port()) as tier:
            assert rows(tier)[0]["state"] == "connecting"
            with pytest.raises(TierUnavailable) as unavailable:
                await tier.check()
            assert unavailable.value.miss == PEER_GONE
            assert (rows(tier)[0]["state"], rows(tier)[0]["cause"]) == ("away", "port")

    async def test_this_node_itself_is_neither_followed_nor_away(self) -> None:
        async with served() as place, following(place.port) as tier:
            tier.serve_as(Own(incarnation=place.feed.incarnation))
            await tier.check()
            assert rows(tier)[0]["state"] == "itself"

    async def test_a_hit_that_ends_at_an_evicted_chunk_of_a_peer_says_so(self) -> None:
        space = Namespace(model="m", layout=LAYOUT)
        prompt = space.prompt(list(range(16)))
        query = prompt.query()
        key = query.namespace + query.hashes[:HASH_BYTES] + place_suffix(0, 0)
        async with served() as place:
            place.feed.note_on_disk(key, 9_000)  # and it has no such chunk
            tiers = [f"peers://127.0.0.1:{place.port}?answer_timeout_s={PATIENT_S}"]

            def look_up() -> tuple[Reason | None, Reason | None]:
                with open_cache(ram_bytes="16MiB", huge_pages="never", tiers=tiers) as cache:
                    cache.register(space)
                    reasons: list[Reason | None] = [NEVER_STORED]
                    # while the snapshot is read, its chunks are known and not asked for
                    while reasons[-1] in (NEVER_STORED, PEER_GONE):
                        reasons.append(cache.lookup(query, wait_s=PATIENT_S).reason)
                    return reasons[-1], cache.lookup(query, wait_s=PATIENT_S).reason

            loop = asyncio.get_running_loop()
            async with asyncio.timeout(PATIENT_S):
                found = await loop.run_in_executor(None, look_up)
            assert found == (PEER_EVICTED, PEER_EVICTED), "the second time it is remembered"

    async def test_a_tier_that_is_left_alone_is_missed_for_the_peers_reason(self) -> None:
        async with served(token="hush") as place, following(place.port) as tier:
            guard = Guard(tier, GuardConfig(), name="peers", metrics=Metrics())
            await guard.check()
            assert not guard.available
            unknown = Unknown()
            assert await guard.probe([make_key(1)], unknown=unknown) == [None]
            assert unknown.why == PEER_DENIED
            await guard.close()


class TestDoctor:
    """`kvhold doctor` of a tier of peers: one finding for the tier, and one for each peer."""

    async def test_each_peer_is_tried_and_each_fault_has_its_advice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with served() as place, served(token="hush") as closed:
                ports = (place.port, closed.port, free_port(), silent.getsockname()[1])
                hosts = ",".join(f"127.0.0.1:{one}" for one in ports)
                url = f"peers://{hosts}?get_timeout_s=3"
                config = load_config({"tiers": [url]}, environ={})
                tier, good, *bad = await _look_at_tiers(config)
                assert (tier.ok, good.ok) == (True, True)
                assert good.name == f"peer 127.0.0.1:{place.port}"
                assert good.says == [f"{socket.gethostname()}, kvhold {__version__}"]
                assert [finding.ok for finding in bad] == [False] * 3
                causes = [finding.says[1].partition(":")[0] for finding in bad]
                assert causes == ["token", "port", "silent"]
                assert "peers.token_file at the peer" in bad[0].says[1]
                assert "no answer within 3 s" in bad[2].says[0]
                monkeypatch.setattr(p, "PEERS_VERSION", 99)
                tier, other = await _look_at_tiers(
                    load_config({"tiers": [f"peers://127.0.0.1:{place.port}"]}, environ={})
                )
                assert tier.says[-1] == "no peer can be followed"
                assert other.says[1].startswith("version: upgrade kvhold on the older host")

    async def test_a_certificate_of_another_authority_is_named(self, tmp_path: Path) -> None:
        try:
            made = make_certificates(tmp_path)
        except NotInstalled as error:
            pytest.skip(str(error))
        tls = {"tls_cert": str(made.server), "tls_key": str(made.server_key)}
        async with served(**tls) as place, served() as clear:
            url = f"peers://127.0.0.1:{place.port},127.0.0.1:{clear.port}?tls=true"
            _, own, plain = await _look_at_tiers(load_config({"tiers": [url]}, environ={}))
            assert "its certificate is not accepted" in own.says[0]
            assert own.says[1].startswith("certificate: compare ca_file here")
            assert plain.says[1].startswith(("tls: no TLS is spoken there", "closed"))
