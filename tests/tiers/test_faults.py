"""The fault wrapper: without rules it is the tier that it wraps; with them, each kind does what it
says, and no more.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

import pytest

from kvhold.core.errors import ConfigError, TierDenied, TierError, TierFull, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, overwrite, scanned, store
from kvhold.tiers.faults import KINDS, OPERATIONS, FaultConfig, FaultTier, Rule, parse_rules
from kvhold.tiers.null import NullTier
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.registry import make_tier

MIB = 1 << 20
KEYS = [make_key(i) for i in range(100)]
VALUES = {key: make_value(i, 1_000) for i, key in enumerate(KEYS)}
KEY, VALUE = KEYS[1], VALUES[KEYS[1]]


@pytest.fixture
def ram() -> Iterator[RamTier]:
    with Arena.create(32 * MIB, huge_pages="never") as arena:
        yield RamTier(arena, make_policy("lru"), Metrics())


@pytest.fixture
async def tier(ram: RamTier) -> AsyncIterator[FaultTier]:
    tier = FaultTier(ram)
    await store(tier, VALUES)
    yield tier
    await tier.close()


class TestFaultTierWithoutRules(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self, ram: RamTier) -> AsyncIterator[FaultTier]:
        tier = FaultTier(ram)
        yield tier
        await tier.close()
        assert not tier.injected


async def call(tier: FaultTier, operation: str) -> object:
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "probe": lambda: tier.probe([KEY]),
        "get": lambda: fetch(tier, [KEY], [1_000]),
        "put": lambda: store(tier, {make_key(1_000): b"new"}),
        "replace": lambda: overwrite(tier, {KEY: VALUE}),
        "delete": lambda: tier.delete([KEY]),
        "scan": lambda: scanned(tier, KEY),
        "check": lambda: tier.check(),
    }
    return await calls[operation]()


ANSWERS = {
    "probe": [1_000],
    "get": [VALUE],
    "put": [True],
    "replace": [True],
    "delete": [True],
    "scan": [KEY],
    "check": None,
}


async def unchanged(tier: FaultTier) -> bool:
    tier.rules = []
    return await tier.probe([KEY, make_key(1_000)]) == [1_000, None]


def bits_that_differ(one: bytes, other: bytes) -> int:
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


class TestCalls:
    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize(
        ("word", "kind"),
        [
            ("error", TierError),
            ("unavailable", TierUnavailable),
            ("full", TierFull),
            ("denied", TierDenied),
        ],
    )
    async def test_an_error_is_of_its_class_and_the_tier_is_not_called(
        self, tier: FaultTier, operation: str, word: str, kind: type[TierError]
    ) -> None:
        tier.rules = parse_rules(f"{operation}:error:1:{word}")
        with pytest.raises(TierError) as error:
            await call(tier, operation)
        assert type(error.value) is kind
        assert (error.value.tier, error.value.operation) == ("ram", operation)
        assert await unchanged(tier)

    @pytest.mark.parametrize("operation", OPERATIONS)
    async def test_a_fault_of_one_operation_is_none_of_another(
        self, tier: FaultTier, operation: str
    ) -> None:
        tier.rules = [Rule(other, "error") for other in OPERATIONS if other != operation]
        assert await call(tier, operation) == ANSWERS[operation]

    @pytest.mark.parametrize("operation", OPERATIONS)
    async def test_what_hangs_goes_on_when_it_is_released(
        self, tier: FaultTier, operation: str
    ) -> None:
        tier.rules = [Rule(operation, "hang")]
        hanging = asyncio.ensure_future(call(tier, operation))
        await begun(tier, f"{operation}:hang")
        assert not hanging.done()
        tier.release()
        assert await hanging == ANSWERS[operation]
        # a release is for those that hang then
        again = asyncio.ensure_future(call(tier, operation))
        while tier.injected[f"{operation}:hang"] < 2:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not again.done()
        tier.release()
        await again

    @pytest.mark.parametrize("operation", OPERATIONS)
    async def test_what_hangs_can_be_cancelled_and_has_done_nothing(
        self, tier: FaultTier, operation: str
    ) -> None:
        tier.rules = [Rule(operation, "hang")]
        hanging = asyncio.ensure_future(call(tier, operation))
        await begun(tier, f"{operation}:hang")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await unchanged(tier)

    async def test_closing_releases_what_hangs(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:hang")
        hanging = asyncio.ensure_future(call(tier, "get"))
        await begun(tier, "get:hang")
        await tier.close()
        assert await hanging == [VALUE]

    @pytest.mark.parametrize("operation", OPERATIONS)
    async def test_a_delay_comes_before_the_operation(
        self, tier: FaultTier, operation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        tier.rules = parse_rules(f"{operation}:delay:1:20ms {operation}:delay:1:0.5s")
        monkeypatch.setattr("kvhold.tiers.faults.asyncio.sleep", sleep)
        assert await call(tier, operation) == ANSWERS[operation]
        assert [seconds for seconds in slept if seconds] == [0.02, 0.5]  # 0: a turn for other tasks


class TestValues:
    @pytest.mark.parametrize("bits", [1, 3])
    async def test_corruption_flips_so_many_bits_and_no_more(
        self, tier: FaultTier, bits: int
    ) -> None:
        tier.rules = parse_rules(f"get:corrupt:1:{bits}")
        got = await fetch(tier, KEYS, [1_000] * 100)
        assert [
            bits_that_differ(value or b"", VALUES[key])
            for key, value in zip(KEYS, got, strict=True)
        ] == [bits] * 100
        assert len({bytes(value or b"") for value in got}) == 100

    async def test_corruption_reaches_every_part_and_nothing_beyond_the_value(
        self, tier: FaultTier
    ) -> None:
        tier.rules = parse_rules("get:corrupt:1:8000")
        buffers = [bytearray(3), bytearray(0), bytearray(500), bytearray(700)]
        assert await tier.get([KEY], [[memoryview(b) for b in buffers]]) == [1_000]
        assert b"".join(buffers) == bytes(byte ^ 0xFF for byte in VALUE) + bytes(203)

    async def test_what_is_kept_below_stays_whole(self, tier: FaultTier, ram: RamTier) -> None:
        tier.rules = parse_rules("get:corrupt get:truncate get:swap")
        await fetch(tier, KEYS, [1_000] * 100)
        assert await fetch(ram, KEYS, [1_000] * 100) == list(VALUES.values())

    async def test_truncation_delivers_less_and_says_so(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:truncate")
        buffers = [[bytearray(100), bytearray(1_000)] for _ in KEYS]
        got = await tier.get(KEYS, [[memoryview(part) for part in parts] for parts in buffers])
        for key, parts, size in zip(KEYS, buffers, got, strict=True):
            assert isinstance(size, int)
            assert 0 <= size < 1_000
            whole = b"".join(parts)
            assert whole == VALUES[key][:size] + b"\xa5" * (1_000 - size) + bytes(100)
        assert len(set(got)) > 50

    async def test_a_probe_may_promise_too_little(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("probe:truncate")
        assert all(isinstance(size, int) and size < 1_000 for size in await tier.probe(KEYS))
        assert await tier.probe([make_key(1_000)]) == [None]

    async def test_a_swapped_value_is_another_keys_and_whole(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:swap")
        got = await fetch(tier, KEYS, [1_000] * 100)
        assert all(
            value in VALUES.values() and value != VALUES[key]
            for key, value in zip(KEYS, got, strict=True)
        )
        [alone] = await fetch(tier, [KEY], [1_000])
        assert alone in VALUES.values()
        assert alone != VALUE

    async def test_with_no_other_key_there_is_nothing_to_swap(self, ram: RamTier) -> None:
        tier = FaultTier(ram, FaultConfig("get:swap"))
        await store(tier, {KEY: VALUE})
        assert await fetch(tier, [KEY, KEY], [1_000] * 2) == [VALUE, VALUE]
        assert not tier.injected

    async def test_a_range_may_be_of_another_key(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:swap")
        buffer = bytearray(10)
        assert await tier.get([KEY], [[memoryview(buffer)]], starts=[5]) == [10]
        assert bytes(buffer) in {value[5:15] for key, value in VALUES.items() if key != KEY}

    @pytest.mark.parametrize("operation", ["probe", "get"])
    async def test_what_is_there_may_seem_not_to_be_yet(
        self, tier: FaultTier, operation: str
    ) -> None:
        tier.rules = [Rule(operation, "stale")]
        assert await call(tier, operation) == [None]
        tier.rules = []
        assert await call(tier, operation) == ANSWERS[operation]

    async def test_what_has_gone_may_seem_to_be_there_still(self, tier: FaultTier) -> None:
        await tier.delete([KEY])
        tier.rules = parse_rules("probe:stale get:stale")
        assert await tier.probe([KEY, make_key(1_000)]) == [1_000, None]
        assert await fetch(tier, [KEY], [1_000]) == [None]

    async def test_a_range_tells_no_size_to_remember(self, tier: FaultTier) -> None:
        await tier.get([KEY], [[memoryview(bytearray(10))]], starts=[5])
        await tier.delete([KEY])
        tier.rules = parse_rules("probe:stale")
        assert await tier.probe([KEY]) == [1_000]

    async def test_a_miss_is_never_made_a_value(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:corrupt get:truncate get:stale")
        buffer = bytearray(10)
        assert await tier.get([make_key(1_000)], [[memoryview(buffer)]]) == [None]
        assert buffer == bytes(10)
        assert not tier.injected

    async def test_what_has_been_seen_is_remembered_only_so_far(
        self, ram: RamTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhold.tiers.faults._SEEN_KEYS", 10)
        tier = FaultTier(ram)
        await store(tier, VALUES)
        await tier.delete(KEYS)
        tier.rules = parse_rules("probe:stale")
        assert await tier.probe(KEYS) == [None] * 90 + [1_000] * 10


class TestWhen:
    async def test_the_nth_alone(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("check:error:@3")
        assert [await failed(tier) for _ in range(6)] == [False, False, True, False, False, False]

    async def test_the_nth_value_is_counted_over_calls(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:corrupt:@5")
        for expected in ([True, True, True], [True, False, True], [True, True, True]):
            got = await fetch(tier, KEYS[:3], [1_000] * 3)
            assert [value == VALUES[key] for key, value in zip(KEYS, got, strict=False)] == expected

    async def test_each_rule_counts_for_itself(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("probe:stale:@2 check:error:@3 check:error:@5")
        assert await tier.probe(KEYS[:3]) == [1_000, None, 1_000]
        assert [await failed(tier) for _ in range(6)] == [False, False, True, False, True, False]

    async def test_a_share_of_all(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:corrupt:0.2")
        for _ in range(10):
            await fetch(tier, KEYS, [1_000] * 100)
        assert 120 < tier.injected["get:corrupt"] < 280

    async def test_never_and_always(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("get:corrupt:0 probe:stale:1.0")
        assert await fetch(tier, KEYS, [1_000] * 100) == list(VALUES.values())
        assert await tier.probe(KEYS) == [None] * 100

    async def test_the_same_seed_does_the_same(self, ram: RamTier) -> None:
        await store(ram, VALUES)

        async def run(seed: int) -> list[bytes | None]:
            return await fetch(
                FaultTier(ram, FaultConfig("get:corrupt:0.3", seed)), KEYS, [1_000] * 100
            )

        assert await run(7) == await run(7)
        assert await run(7) != await run(8)

    async def test_rules_change_while_it_runs_and_counts_begin_anew(self, tier: FaultTier) -> None:
        tier.rules = parse_rules("check:error:@2")
        assert [await failed(tier) for _ in range(3)] == [False, True, False]
        tier.rules = tier.rules
        assert [await failed(tier) for _ in range(3)] == [False, True, False]
        tier.rules = []
        assert [await failed(tier) for _ in range(3)] == [False] * 3
        assert tier.injected == {"check:error": 2}


class TestText:
    @pytest.mark.parametrize(
        ("text", "rule"),
        [
            ("get:corrupt:0.01", Rule("get", "corrupt", 0.01)),
            ("get:corrupt:.5@7:12", Rule("get", "corrupt", 0.5, 7, bits=12)),
            ("put:delay:0.1:0.5s", Rule("put", "delay", 0.1, delay_s=0.5)),
            ("put:delay::20ms", Rule("put", "delay", delay_s=0.02)),
            ("check:hang:@3", Rule("check", "hang", nth=3)),
            ("scan:error", Rule("scan", "error")),
            ("delete:error:1:full", Rule("delete", "error", error="full")),
        ],
    )
    def test_a_rule_is_read(self, text: str, rule: Rule) -> None:
        assert parse_rules(text) == [rule]
        assert parse_rules(f"  {text},probe:stale {text}\n") == [rule, Rule("probe", "stale"), rule]

    def test_no_text_is_no_rule(self) -> None:
        assert parse_rules("") == parse_rules("  ") == []

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                "get",
                "write operation:kind[:when[:with]], such as get:corrupt:0.01 or put:delay:@3:0.5s",
            ),
            (
                "get:corrupt:1:2:3",
                "write operation:kind[:when[:with]], such as get:corrupt:0.01 or put:delay:@3:0.5s",
            ),
            (
                "get:corupt",
                (
                    "there is no kind of fault 'corupt'; known are error, delay, hang, "
                    "corrupt, truncate, swap, stale"
                ),
            ),
            ("gte:corrupt", "corrupt is a fault of get, not of 'gte'"),
            ("put:corrupt", "corrupt is a fault of get, not of 'put'"),
            ("put:stale", "stale is a fault of get or probe, not of 'put'"),
            (
                "close:hang",
                (
                    "hang is a fault of probe or get or put or replace or delete or scan or "
                    "check, not of 'close'"
                ),
            ),
            ("get:corrupt:1.5", "1.5 is not a probability; it goes from 0 to 1"),
            (
                "get:corrupt:-1",
                (
                    "'-1' does not say when; write a probability such as 0.01, a number such "
                    "as @3, or 0.5@3"
                ),
            ),
            (
                "get:corrupt:often",
                (
                    "'often' does not say when; write a probability such as 0.01, a number "
                    "such as @3, or 0.5@3"
                ),
            ),
            (
                "get:corrupt:nan",
                (
                    "'nan' does not say when; write a probability such as 0.01, a number such "
                    "as @3, or 0.5@3"
                ),
            ),
            ("get:corrupt:@0", "@0: the first is @1"),
            ("get:corrupt:1:0", "a delay must be at least 0 s, and a corruption at least 1 bit"),
            ("get:corrupt:1:all", "'all' is not a number of bits"),
            (
                "get:delay:0.5s",
                (
                    "'0.5s' does not say when; write a probability such as 0.01, a number such "
                    "as @3, or 0.5@3"
                ),
            ),
            ("get:delay:1", "'' is not a time; write 0.5s or 20ms, after `when`: delay:1:0.5s"),
            ("get:delay:1:5", "'5' is not a time; write 0.5s or 20ms, after `when`: delay:1:0.5s"),
            (
                "get:error:1:dead",
                "there is no error 'dead'; known are error, unavailable, full, denied",
            ),
            ("get:hang:1:1s", "hang takes nothing after `when`, not '1s'"),
        ],
    )
    def test_a_bad_rule_is_named_with_what_is_allowed(self, text: str, said: str) -> None:
        with pytest.raises(ConfigError) as error:
            parse_rules(f"probe:stale {text} get:hang")
        assert str(error.value) == f"the fault {text!r}: {said}"

    def test_every_kind_can_be_written_for_each_of_its_operations(self) -> None:
        last = {"delay": ":1:1s"}
        for kind, operations in KINDS.items():
            for operation in operations:
                [rule] = parse_rules(f"{operation}:{kind}{last.get(kind, '')}")
                assert rule.name == f"{operation}:{kind}"

    async def test_a_url_names_what_it_wraps_and_its_rules(self) -> None:
        tier, _ = make_tier(
            "faults+null://?faults=get:corrupt:0.01+put:delay:@2:0.5s&faults_seed=7"
        )
        assert isinstance(tier, FaultTier)
        assert list(tier.rules) == [
            Rule("get", "corrupt", 0.01),
            Rule("put", "delay", nth=2, delay_s=0.5),
        ]
        assert tier.traits.name == "null"
        await tier.close()

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (
                "faults+null://?faults=get:corupt",
                "the fault 'get:corupt': there is no kind of fault 'corupt'; known are "
                + ", ".join(KINDS),
            ),
            ("faults+null://?faults_seed=x", "faults_seed = 'x': must be a whole number"),
            ("faults+null://?faults_seed=-1", "faults_seed = '-1': must be at least 0"),
        ],
    )
    def test_a_bad_option_is_named(self, line: str, said: str) -> None:
        with pytest.raises(ConfigError) as error:
            make_tier(line)
        assert str(error.value) == f"{line}: {said}"


async def begun(tier: FaultTier, fault: str) -> None:
    """Return when the fault is being done."""
    while not tier.injected[fault]:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


async def failed(tier: FaultTier) -> bool:
    try:
        await tier.check()
    except TierError:
        return True
    return False


async def test_a_scan_that_is_left_early_ends_at_once_below() -> None:
    inner = Scanned()
    scan = FaultTier(inner).scan(b"")
    assert await anext(scan) == b"key"
    assert isinstance(scan, AsyncGenerator)
    await scan.aclose()
    assert inner.ended


class Scanned(NullTier):
    """Knows whether its scan has ended."""

    ended = False

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"key"
        finally:
            self.ended = True
