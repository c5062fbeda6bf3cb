"""Chunks that come from a peer's memory by an agent: a fake of NIXL's, in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import Config, ServePeersConfig, load_config
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.net import login
from kvhold.net import peers as p
from kvhold.net.remote_memory import (
    MOST_METADATA_BYTES,
    SAMPLE_BYTES,
    ChannelFault,
    RemoteMemory,
)
from kvhold.net.stream import Address, Stream, open_stream
from kvhold.net.wire import Decoder, encode
from kvhold.node import channel as node_channel
from kvhold.node.peer_server import PeerServer
from kvhold.testing.tier import make_key, make_value
from kvhold.tiers.base import Parts, WatchedParts
from kvhold.tiers.exchanges import Getting, read_body
from kvhold.tiers.guard import Guard
from kvhold.tiers.guard_config import GuardConfig
from kvhold.tiers.peers import PeersTier
from kvhold.tiers.peers import channel as tier_channel
from kvhold.tiers.peers.channel import NOT_OFFERED, NOT_WITH_TLS, OFF, ChannelPlan
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.certificates import make_certificates
from tests.tiers.agents import Agents
from tests.tiers.peer_places import PATIENT_S, Place, a_tier, eventually, eventually_found

pytestmark = pytest.mark.asyncio

HEADER_BYTES, CHUNK_BYTES = 4096, 100_000
FRAME_BYTES = HEADER_BYTES + CHUNK_BYTES
SLOT_BYTES = 128 << 10
NUM_SLOTS = 16
_lent: Decoder[p.Lent] = Decoder(p.Lent)
_offer: Decoder[p.ChannelOffer] = Decoder(p.ChannelOffer)
_greeting: Decoder[p.Greeting] = Decoder(p.Greeting)


class LendingPlace(Place):
    """A place whose values are headers, and chunks in an arena."""

    def __init__(self, arena: bytearray, plan: ChannelPlan | None, **settings: Any) -> None:
        super().__init__(plan=plan, **settings)
        self.arena = memoryview(arena)
        self.slots: dict[bytes, memoryview] = {}

    def put_chunk(self, key: bytes, value: bytes) -> None:
        at = len(self.slots) * SLOT_BYTES
        self.slots[key] = slot = self.arena[at : at + len(value) - HEADER_BYTES]
        slot[:] = value[HEADER_BYTES:]
        self.put(key, value)

    @asynccontextmanager
    async def lent(
        self, keys: Sequence[bytes], room: Sequence[int]
    ) -> AsyncIterator[list[Parts | None]]:
        async with super().lent(keys, room) as found:
            yield [
                (parts[0][:HEADER_BYTES], self.slots[key]) if parts and key in self.slots else parts
                for key, parts in zip(keys, found, strict=True)
            ]


@dataclass
class Pair:
    """A place, a tier that follows it, and the arena into which that reads."""

    agents: Agents
    place: LendingPlace
    tier: PeersTier
    arena: memoryview
    theirs: RemoteMemory

    @property
    def status(self) -> dict[str, Any]:
        [peer] = self.tier.peers_status()["peers"]
        return dict(peer)

    async def opened(self, *, channel: str = "nixl") -> None:
        await self.tier.check()
        await eventually(lambda: self.status["channel"] == channel)

    async def store(self, *numbers: int) -> dict[bytes, bytes]:
        values = {make_key(number): make_value(number, FRAME_BYTES) for number in numbers}
        for key, value in values.items():
            self.place.put_chunk(key, value)
        for key in values:
            await eventually_found(self.tier, key, FRAME_BYTES)
        return values

    def parts(self, num: int) -> list[Parts]:
        chunks = [self.arena[at * SLOT_BYTES :][:CHUNK_BYTES] for at in range(num)]
        for chunk in chunks:
            chunk[:] = bytes(CHUNK_BYTES)
        return [(memoryview(bytearray(HEADER_BYTES)), chunk) for chunk in chunks]

    async def load(self, keys: Sequence[bytes]) -> list[bytes | None]:
        into = self.parts(len(keys))
        sizes = await self.tier.get(list(keys), into)
        return [
            b"".join(bytes(part) for part in parts)[:size] if isinstance(size, int) else None
            for parts, size in zip(into, sizes, strict=True)
        ]


@asynccontextmanager
async def pair(
    *,
    offers: bool = True,
    follows: bool = True,
    is_measured: bool = False,
    options: dict[str, object] | None = None,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """offers, follows: whether the place's node, and the tier's, allow NIXL"""
    agents = Agents()
    arenas = [bytearray(NUM_SLOTS * SLOT_BYTES) for _ in range(2)]
    theirs, ours = (RemoteMemory(agents.make, memoryview(one), linger_s=0.01) for one in arenas)
    plans = [
        ChannelPlan(memory, "", is_measured) if allows else None
        for memory, allows in ((theirs, offers), (ours, follows))
    ]
    theirs.start()
    ours.start()
    place = LendingPlace(arenas[0], plans[0], **settings)
    place.start()
    tier = a_tier(place.port, **{"answer_timeout_s": PATIENT_S} | (options or {}))
    if plans[1] is not None:
        tier.use_channel(plans[1])
    try:
        yield Pair(agents, place, tier, memoryview(arenas[1]), theirs)
    finally:
        agents.may_end.set()
        await tier.close()
        await place.server.stop()
        loop = asyncio.get_running_loop()
        for memory in (ours, theirs):
            assert await loop.run_in_executor(None, memory.close)


async def test_chunks_come_from_arena_to_arena_and_are_returned() -> None:
    async with pair() as two:
        await two.opened()
        begun = two.agents.num_begun
        values = await two.store(*range(5))
        assert await two.load(list(values)) == list(values.values())
        assert two.agents.num_begun == begun + 1, "one read for all"
        assert two.status["nixl_bytes"] == 5 * CHUNK_BYTES
        assert (two.status["channel"], two.status["channel_reason"]) == ("nixl", "")
        assert two.status["loaded_bytes"] == 5 * FRAME_BYTES
        await eventually(lambda: not two.place.lent_now and not two.place.server.budget.used)
        assert two.place.server.channel == ("nixl", "")


async def test_chunks_outside_the_arena_follow_over_the_connection() -> None:
    async with pair() as two:
        await two.opened()
        values = await two.store(1)
        values[make_key(2)] = make_value(2, FRAME_BYTES)
        two.place.put(make_key(2), values[make_key(2)])
        await eventually_found(two.tier, make_key(2), FRAME_BYTES)
        two.place.remove(make_key(1))
        values |= await two.store(3)
        keys = [make_key(number) for number in (1, 2, 3)]
        assert await two.load(keys) == [None, *(values[key] for key in keys[1:])]
        assert two.status["nixl_bytes"] == CHUNK_BYTES
        assert two.status["absent_chunks"] == 0, "its removal was told"


async def test_an_evicted_chunk_is_a_miss_and_leaves_the_index() -> None:
    async with pair() as two:
        await two.opened()
        values = await two.store(1, 2)
        del two.place.values[make_key(1)]  # and no event says so
        assert await two.load(list(values)) == [None, values[make_key(2)]]
        assert await two.tier.probe([make_key(1)]) == [None]


async def test_ranges_and_other_buffers_come_over_tcp() -> None:
    async with pair() as two:
        await two.opened()
        values = await two.store(1)
        begun = two.agents.num_begun
        [key] = values
        into = memoryview(bytearray(FRAME_BYTES))
        assert await two.tier.get([key], [[into]]) == [FRAME_BYTES]
        assert await two.tier.get([key], [[into[:80_000]]], starts=[10]) == [80_000]
        assert into[:80_000] == values[key][10:80_010]
        assert two.agents.num_begun == begun


@pytest.mark.parametrize(
    ("offers", "follows", "reason"), [(False, True, NOT_OFFERED), (True, False, OFF)]
)
async def test_both_nodes_must_allow_it(offers: bool, follows: bool, reason: str) -> None:
    async with pair(offers=offers, follows=follows) as two:
        values = await two.store(1)
        assert await two.load(list(values)) == list(values.values())
        assert (two.status["channel"], two.status["channel_reason"]) == ("tcp", reason)
        assert two.place.server.channel == (("nixl", "") if offers else ("tcp", OFF))
        assert not two.agents.num_begun


async def test_a_failed_read_goes_on_over_tcp_and_the_channel_is_tried_again() -> None:
    async with pair() as two:
        await two.opened()
        values = await two.store(1, 2)
        two.agents.fault = "link down"
        assert await two.load(list(values)) == list(values.values())
        assert two.status["channel"] == "tcp"
        assert two.status["channel_reason"] == "RuntimeError: link down"
        assert two.status["last_fault"] == "", "the peer itself is well"
        await eventually(lambda: not two.place.lent_now)
        two.agents.fault = ""
        channel = two.tier.peers[0].channel
        assert channel._breaker.next_try_s is not None and channel._opening is not None


async def test_a_channel_that_failed_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_channel, "_FIRST_PAUSE_S", 0.05)
    async with pair() as two:
        await two.opened()
        values = await two.store(1)
        two.agents.fault = "link down"
        await two.load(list(values))
        two.agents.fault = ""
        await two.opened()
        assert await two.load(list(values)) == list(values.values())
        assert two.status["nixl_bytes"] == CHUNK_BYTES


@pytest.mark.parametrize(("seconds", "channel"), [((2.0, 1.0), "nixl"), ((1.0, 1.0), "tcp")])
async def test_the_faster_way_is_used(seconds: tuple[float, float], channel: str) -> None:
    """seconds: of a sample over TCP, and by NIXL"""
    async with pair(is_measured=True) as two:
        steps = [step for one in seconds for step in (0.0, one)]
        now_s, turns = 0.0, count()

        def clock() -> float:
            nonlocal now_s
            now_s += steps[next(turns) % 4]
            return now_s

        followed = two.tier.peers[0].channel
        followed._clock = clock
        await two.tier.check()
        await eventually(lambda: followed._reason != tier_channel._NOT_YET)
        assert two.status["channel"] == channel
        if channel == "tcp":
            assert two.status["channel_reason"].startswith("TCP is not slower: NIXL 0.00 GB/s")
            await eventually(lambda: followed._opening is not None and followed._opening.done())


async def test_a_channel_that_brings_other_bytes_is_never_used() -> None:
    async with pair() as two:
        two.agents.damage = True
        await two.tier.check()
        await eventually(lambda: "are not those" in two.status["channel_reason"])
        values = await two.store(1)
        assert await two.load(list(values)) == list(values.values())
        assert two.status["nixl_bytes"] == 0


async def test_a_damaged_chunk_ends_the_use_of_the_channel() -> None:
    async with pair() as two:
        await two.opened()
        values = await two.store(1, 2)
        await two.load([make_key(1)])
        await two.tier.delete([make_key(2)])
        assert two.status["channel"] == "nixl", "that chunk did not come by it"
        await two.tier.delete([make_key(1)])
        assert two.status["channel_reason"] == "a chunk that came by NIXL was damaged"
        assert values


async def test_what_a_watch_saw_over_tcp_does_not_count_for_bytes_by_nixl() -> None:
    async with pair() as two:
        await two.opened()
        await two.store(1)
        seen: list[bytearray] = []

        def begin() -> Callable[[memoryview], None]:
            seen.append(bytearray())
            return seen[-1].extend

        parts = WatchedParts(two.parts(1)[0])
        parts.begin = begin
        assert await two.tier.get([make_key(1)], [parts]) == [FRAME_BYTES]
        assert two.status["nixl_bytes"] == CHUNK_BYTES
        assert seen == [b""]


async def test_memory_that_may_still_be_written_is_not_let_go() -> None:
    async with pair() as two:
        await two.opened()
        guard = Guard(two.tier, GuardConfig(get_timeout_s=0.2), name="peers", metrics=Metrics())
        values = await two.store(1)
        begun = two.agents.num_begun
        two.agents.may_end.clear()
        outcome = await guard.get(list(values), two.parts(1))
        assert two.agents.num_begun == begun + 1
        assert outcome.items == [None] and outcome.pending is not None
        await asyncio.wait((outcome.pending,), timeout=0.05)
        assert not outcome.pending.done()
        two.agents.may_end.set()
        await asyncio.wait((outcome.pending,))
        assert two.status["channel_reason"] == "a read was given up"
        await eventually(lambda: not two.place.lent_now)


async def test_a_late_read_costs_one_deadline_and_ends_before_its_memory_is_used() -> None:
    async with pair(options={"answer_timeout_s": 0.2}) as two:
        await two.opened()
        values = await two.store(1)
        two.agents.may_end.clear()
        loading = asyncio.ensure_future(two.load(list(values)))
        await asyncio.wait((loading,), timeout=0.5)
        assert not loading.done()
        two.agents.may_end.set()
        assert await loading == [None]
        assert two.status["channel_reason"] == "no answer within 0.2 s"


async def test_an_agent_that_is_missing_is_a_reason() -> None:
    async with pair() as two:
        two.theirs.fault = "RuntimeError: no device"
        await two.tier.check()
        await eventually(lambda: "at the peer" in two.status["channel_reason"])
        assert two.status["channel_reason"] == "at the peer: RuntimeError: no device"
        assert two.place.server.channel == ("tcp", "RuntimeError: no device")
        two.theirs.fault = ""


async def test_with_tls_it_is_used_only_if_asked_for(tmp_path: Path) -> None:
    try:
        made = make_certificates(tmp_path)
    except NotInstalled as error:
        pytest.skip(str(error))
    for is_measured, reason in ((True, NOT_WITH_TLS), (False, "")):
        async with pair(
            is_measured=is_measured,
            options={"tls": "true", "ca_file": made.ca},
            tls_cert=str(made.server),
            tls_key=str(made.server_key),
        ) as two:
            await two.opened(channel="tcp" if reason else "nixl")
            assert two.status["channel_reason"] == reason
            assert two.place.server.channel == (("tcp", reason) if reason else ("nixl", ""))
            values = await two.store(1)
            assert await two.load(list(values)) == list(values.values())


class TestLeases:
    """A follower that lends and does not return."""

    @pytest.fixture
    async def two(self) -> AsyncIterator[Pair]:
        async with pair(request_timeout_s=0.3) as two:
            await two.tier.check()
            await two.store(*range(4))
            yield two

    async def test_a_lease_ends_after_the_request_timeout(self, two: Pair) -> None:
        stream = await logged_in(two.place)
        lent = await borrow(stream, range(4))
        assert lent.lent == [CHUNK_BYTES] * 4 and lent.sizes == [FRAME_BYTES] * 4
        await eventually(lambda: not two.place.lent_now)
        await stream.send([encode(p.Returned(lent.lease)), encode(p.Returned(77))])
        assert (await borrow(stream, range(1))).lease == lent.lease + 1, "it still serves"
        stream.close()

    async def test_a_lease_ends_with_its_connection(self) -> None:
        async with pair(request_timeout_s=PATIENT_S) as two:
            await two.tier.check()
            await two.store(1)
            stream = await logged_in(two.place)
            await borrow(stream, [1])
            assert two.place.lent_now and two.place.server.budget.used
            stream.close()
            await eventually(lambda: not two.place.lent_now and not two.place.server.budget.used)

    async def test_a_follower_that_returns_nothing_takes_its_part_at_most(self) -> None:
        async with pair(request_timeout_s=0.3, in_flight_bytes=250_000) as two:
            await two.tier.check()
            await two.store(*range(4))
            stream = await logged_in(two.place)
            lent = await borrow(stream, range(4))
            assert len(lent.sizes) == 2, "the first ones, up to the budget"
            second = asyncio.ensure_future(borrow(stream, range(2, 4)))
            await asyncio.wait((second,), timeout=0.05)
            assert two.place.most_lent == 2 * FRAME_BYTES
            assert (await second).sizes == [FRAME_BYTES] * 2, "the first lease has ended"
            stream.close()

    async def test_lent_bytes_count_for_the_limit_of_bytes_a_second(self) -> None:
        limit = 1 << 20
        async with pair(bytes_per_s=limit) as two:
            await two.tier.check()
            await two.store(*range(4))
            stream = await logged_in(two.place)
            began_s = asyncio.get_running_loop().time()
            left = list(range(4))
            while left:
                lent = await borrow(stream, left)
                assert lent.sizes == [FRAME_BYTES]
                left = left[1:]
            took_s = asyncio.get_running_loop().time() - began_s
            assert took_s >= 3 * FRAME_BYTES / limit
            stream.close()

    async def test_leases_of_a_connection_have_a_limit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.node.lending._MOST_LEASES", 2)
        async with pair() as two:
            await two.tier.check()
            await two.store(1)
            stream = await logged_in(two.place)
            for _ in range(2):
                await borrow(stream, [1])
            with pytest.raises((EOFError, OSError, ProtocolError)):
                await borrow(stream, [1])
            stream.close()
            await eventually(lambda: not two.place.lent_now)

    @pytest.mark.parametrize(
        "request_",
        [
            p.PeerRead(b"", []),
            p.PeerRead(make_key(1), [1, 2]),
            p.PeerRead(make_key(1) * 4097, [1] * 4097),
        ],
    )
    async def test_a_read_that_cannot_be_is_refused(self, two: Pair, request_: p.PeerRead) -> None:
        await is_refused(two.place, request_)

    @pytest.mark.parametrize("request_", [p.PeerRead(make_key(1), [100]), p.GetSample()])
    async def test_a_node_that_lends_nothing_refuses_to(self, request_: Any) -> None:
        async with pair(offers=False) as two:
            await is_refused(two.place, request_)
            stream = await logged_in(two.place)
            await stream.send([encode(p.OpenChannel())])
            assert _offer.decode(await read_body(stream)).fault == OFF
            stream.close()


async def is_refused(place: Place, request_: Any) -> None:
    stream = await logged_in(place)
    await stream.send([encode(request_)])
    with pytest.raises((EOFError, OSError, ProtocolError)):
        _lent.decode(await read_body(stream))
    stream.close()


async def logged_in(place: Place) -> Stream:
    stream = await open_stream(Address("127.0.0.1", place.port), None)
    await stream.send([encode(login.LoginHello(p.PEERS_MAGIC, p.PEERS_VERSION, ""))])
    assert isinstance(_greeting.decode(await read_body(stream)), p.PeerWelcome)
    return stream


async def borrow(stream: Stream, numbers: Sequence[int]) -> p.Lent:
    keys = b"".join(make_key(number) for number in numbers)
    await stream.send([encode(p.PeerRead(keys, [FRAME_BYTES] * len(numbers)))])
    lent = _lent.decode(await read_body(stream))
    sizes = zip(lent.sizes, lent.lent, strict=True)
    await stream.skip(sum((size or 0) - nbytes for size, nbytes in sizes))
    return lent


OFFER = p.ChannelOffer("", 7, b"agent", 1 << 20, 1 << 20, 1 << 30, SAMPLE_BYTES)
GOOD = {"channel": 7, "lease": 1, "sizes": [FRAME_BYTES], "lent": [CHUNK_BYTES]}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"channel": 8}, ChannelFault),
        ({"sizes": []}, ProtocolError),
        ({"sizes": [FRAME_BYTES] * 2}, ProtocolError),
        ({"lent": []}, ProtocolError),
        ({"addresses": []}, ProtocolError),
        ({"sizes": [FRAME_BYTES - 1]}, ProtocolError),
        ({"lent": [CHUNK_BYTES + 1]}, ProtocolError),
        ({"lent": [-1]}, ProtocolError),
        ({"addresses": [(1 << 20) - 1]}, ProtocolError),
        ({"addresses": [(2 << 20) - CHUNK_BYTES + 1]}, ProtocolError),
        ({"addresses": [-5]}, ProtocolError),
    ],
)
async def test_an_answer_that_cannot_be_reads_nothing(
    changes: dict[str, Any], fault: type[Exception]
) -> None:
    parts = [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(CHUNK_BYTES))]
    item = Getting(make_key(1), parts, None)
    good = p.Lent(**GOOD, addresses=[1 << 20])  # type: ignore[arg-type]
    assert len(tier_channel._pieces(good, OFFER, [item])) == 1
    lent = p.Lent(**GOOD | {"addresses": [1 << 20]} | changes)  # type: ignore[arg-type]
    with pytest.raises(fault):
        tier_channel._pieces(lent, OFFER, [item])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", b""),
        ("metadata", bytes(MOST_METADATA_BYTES + 1)),
        ("sample_bytes", SAMPLE_BYTES - 1),
        ("address", 0),
        ("nbytes", 0),
        ("nbytes", 1 << 63),
        ("sample_address", -1),
    ],
)
async def test_an_offer_that_cannot_be_is_refused(field: str, value: Any) -> None:
    fields = {name: getattr(OFFER, name) for name in OFFER.__struct_fields__}
    tier_channel._check(p.ChannelOffer(**fields))
    with pytest.raises(ProtocolError):
        tier_channel._check(p.ChannelOffer(**fields | {field: value}))


class TestSetting:
    async def test_it_is_off_by_default(self) -> None:
        assert ServePeersConfig().channel == "tcp"
        with Arena.create(1 << 21) as arena:
            assert node_channel.plan_channel(Config(), arena) == ChannelPlan()

    async def test_a_node_without_peers_starts_no_agent(self) -> None:
        config = load_config({"peers": {"channel": "auto"}, "tiers": "memory://"}, environ={})
        with Arena.create(1 << 21) as arena:
            assert node_channel.plan_channel(config, arena).reason == "this node has no peers"

    @pytest.mark.parametrize(("listen", "tiers"), [("127.0.0.1:0", ""), ("", "peers://a")])
    async def test_a_missing_package_is_an_error_only_if_it_is_asked_for(
        self, listen: str, tiers: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node_channel, "is_installed", lambda: False)
        with Arena.create(1 << 21) as arena:
            for channel in ("auto", "nixl"):
                serving = {"channel": channel, "listen": listen}
                config = load_config({"peers": serving, "tiers": tiers}, environ={})
                if channel == "auto":
                    plan = node_channel.plan_channel(config, arena)
                    assert plan.memory is None and "pip install 'kvhold[nixl]'" in plan.reason
                    continue
                with pytest.raises(ConfigError, match=r"peers\.channel = 'nixl': .*kvhold\[nixl\]"):
                    node_channel.plan_channel(config, arena)

    async def test_other_values_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"peers\.channel = 'rdma': must be one of tcp, auto"):
            load_config({"peers": {"channel": "rdma"}}, environ={})

    async def test_a_server_with_tls_does_not_offer_it_by_itself(self, tmp_path: Path) -> None:
        try:
            made = make_certificates(tmp_path)
        except NotInstalled as error:
            pytest.skip(str(error))
        place = Place()
        memory = RemoteMemory(Agents().make, memoryview(bytearray(4096)))
        config = ServePeersConfig(
            listen="127.0.0.1:0", tls_cert=str(made.server), tls_key=str(made.server_key)
        )
        for is_measured, reason in ((True, NOT_WITH_TLS), (False, "it is starting")):
            plan = ChannelPlan(memory, "", is_measured)
            server = PeerServer(config, place, place.feed, Metrics(), plan)
            assert server.channel == ("tcp", reason)
