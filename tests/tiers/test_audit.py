"""The audit wrapper: the contract over a real tier, what it notices, what it must not claim, and
what it logs.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import pytest

from kvhold.core.errors import ConfigError, TierError, TierUnavailable
from kvhold.core.metrics import Metrics
from kvhold.memory.arena import Arena
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, overwrite, scanned, store
from kvhold.tiers.audit import AuditConfig, AuditTier
from kvhold.tiers.base import TierTraits
from kvhold.tiers.faults import FaultTier, parse_rules
from kvhold.tiers.null import NullTier
from kvhold.tiers.policies import make_policy
from kvhold.tiers.ram import RamTier
from kvhold.tiers.registry import make_tier

MIB = 1 << 20
KEY, VALUE = make_key(1), make_value(1, 5_000)
LARGE = make_value(2, 1_000_000)  # hashed in a thread


@pytest.fixture
def ram() -> Iterator[RamTier]:
    with Arena.create(32 * MIB, huge_pages="never") as arena:
        yield RamTier(arena, make_policy("lru"), Metrics())


@pytest.fixture
def faulty(ram: RamTier) -> FaultTier:
    return FaultTier(ram)


@pytest.fixture
async def tier(faulty: FaultTier) -> AsyncIterator[AuditTier]:
    tier = AuditTier(faulty)
    yield tier
    await tier.close()


async def begun(faulty: FaultTier, fault: str) -> None:
    """Return when the fault is being done."""
    while not faulty.injected[fault]:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0)


class TestAuditTierOverRam(TierContract):
    too_large_bytes = 32 * MIB + 1

    @pytest.fixture
    async def tier(self, ram: RamTier) -> AsyncIterator[AuditTier]:
        tier = AuditTier(ram)
        yield tier
        await tier.close()
        assert tier.mismatches == 0


class TestChecks:
    @pytest.mark.parametrize("value", [VALUE, LARGE])
    async def test_a_value_that_is_what_was_put_is_a_hit(
        self, tier: AuditTier, value: bytes
    ) -> None:
        await store(tier, {KEY: value})
        assert await fetch(tier, [KEY], [len(value) + 10]) == [value]
        assert (tier.checked, tier.mismatches) == (1, 0)

    @pytest.mark.parametrize("value", [VALUE, LARGE])
    @pytest.mark.parametrize("fault", ["corrupt", "truncate", "swap"])
    async def test_a_value_that_is_not_what_was_put_is_no_hit(
        self,
        tier: AuditTier,
        faulty: FaultTier,
        fault: str,
        value: bytes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        await store(tier, {KEY: value, make_key(2): make_value(9, len(value))})
        faulty.rules = parse_rules(f"get:{fault}")
        [got] = await tier.get([KEY], [[memoryview(bytearray(len(value)))]])
        assert isinstance(got, TierError)
        assert KEY.hex() in str(got)
        assert (tier.checked, tier.mismatches) == (1, 1)
        assert [
            KEY.hex() in record.getMessage()
            for record in caplog.records
            if record.levelno == logging.ERROR
        ] == [True]

    async def test_a_bad_item_loses_no_other(self, tier: AuditTier, faulty: FaultTier) -> None:
        values = {make_key(i): make_value(i, 100) for i in range(3)}
        await store(tier, values)
        faulty.rules = parse_rules("get:corrupt:@2")
        buffers = [bytearray(100) for _ in range(4)]
        got = await tier.get([*values, make_key(9)], [[memoryview(b)] for b in buffers])
        assert [got[0], got[2], got[3]] == [100, 100, None]
        assert isinstance(got[1], TierError)
        assert [buffers[0], buffers[2]] == [values[make_key(0)], values[make_key(2)]]

    async def test_a_value_in_parts_is_the_same_value(self, tier: AuditTier) -> None:
        await tier.put(
            [(KEY, [memoryview(VALUE[:8]).cast("Q"), memoryview(b""), memoryview(VALUE[8:])])]
        )
        buffers = [bytearray(1), bytearray(0), bytearray(4_000), bytearray(4_000)]
        assert await tier.get([KEY], [[memoryview(b) for b in buffers]]) == [5_000]
        assert (tier.checked, tier.mismatches) == (1, 0)

    async def test_a_replaced_value_is_checked_against_the_one_that_took_its_place(
        self, tier: AuditTier, faulty: FaultTier
    ) -> None:
        await store(tier, {KEY: VALUE})
        assert await overwrite(tier, {KEY: LARGE, make_key(2): VALUE}) == [True, False]
        assert await fetch(tier, [KEY], [len(LARGE)]) == [LARGE]
        assert (tier.checked, tier.mismatches) == (1, 0)
        faulty.rules = parse_rules("get:corrupt")
        assert await fetch(tier, [KEY], [len(LARGE)]) == [None]
        assert (tier.checked, tier.mismatches) == (2, 1)

    async def test_ranges_are_passed_on_unchecked(self, tier: AuditTier, faulty: FaultTier) -> None:
        await store(tier, {KEY: VALUE})
        faulty.rules = parse_rules("get:corrupt")
        assert await tier.get([KEY], [[memoryview(bytearray(10))]], starts=[5]) == [10]
        assert tier.checked == 0


class TestClaimsNothingItDoesNotKnow:
    async def test_what_was_there_before_it_is_not_checked(
        self, tier: AuditTier, ram: RamTier
    ) -> None:
        await store(ram, {KEY: VALUE})
        assert await store(tier, {KEY: make_value(2, 5_000)}) == [True]
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert (tier.checked, tier.mismatches) == (0, 0)

    async def test_a_key_put_again_with_the_same_bytes_stays_checked(self, tier: AuditTier) -> None:
        await store(tier, {KEY: VALUE})
        await store(tier, {KEY: VALUE})
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert tier.checked == 1

    async def test_a_key_put_again_with_other_bytes_is_not_called_corrupt(
        self, tier: AuditTier
    ) -> None:
        await store(tier, {KEY: VALUE})
        await store(tier, {KEY: make_value(2, 5_000)})
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert tier.mismatches == 0

    async def test_a_key_evicted_below_and_put_with_other_bytes_is_checked_against_those(
        self, tier: AuditTier, ram: RamTier, faulty: FaultTier
    ) -> None:
        await store(tier, {KEY: VALUE})
        await ram.delete([KEY])
        other = make_value(2, 4_000)
        await store(tier, {KEY: other})
        assert await fetch(tier, [KEY], [5_000]) == [other]
        assert (tier.checked, tier.mismatches) == (1, 0)
        faulty.rules = parse_rules("get:corrupt")
        assert await fetch(tier, [KEY], [5_000]) == [None]
        assert tier.mismatches == 1

    async def test_a_deleted_key_is_forgotten(self, tier: AuditTier, ram: RamTier) -> None:
        await store(tier, {KEY: VALUE})
        assert await tier.delete([KEY]) == [True]
        await store(ram, {KEY: make_value(2, 100)})  # by somebody else
        assert await fetch(tier, [KEY], [5_000]) == [make_value(2, 100)]
        assert (tier.checked, tier.mismatches) == (0, 0)

    @pytest.mark.parametrize("first", ["probe", "put"])
    async def test_of_overlapping_puts_of_one_key_none_is_taken_for_the_one_kept(
        self, tier: AuditTier, faulty: FaultTier, first: str
    ) -> None:
        faulty.rules = parse_rules(f"{first}:hang:@1")
        slow = asyncio.ensure_future(store(tier, {KEY: make_value(2, 100)}))
        await begun(faulty, f"{first}:hang")
        await store(tier, {KEY: VALUE})
        faulty.release()
        assert await slow == [True]
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert (tier.checked, tier.mismatches) == (0, 0)
        await tier.delete([KEY])
        await store(tier, {KEY: VALUE})
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert tier.checked == 1  # the dispute is over

    async def test_a_key_removed_between_probe_and_put_is_not_called_corrupt(
        self, tier: AuditTier, ram: RamTier, faulty: FaultTier
    ) -> None:
        await store(tier, {KEY: VALUE})
        faulty.rules = parse_rules("put:hang")
        other = make_value(2, 100)
        put = asyncio.ensure_future(store(tier, {KEY: other}))
        await begun(faulty, "put:hang")
        await ram.delete([KEY])  # evicted
        faulty.release()
        assert await put == [True]
        assert await fetch(tier, [KEY], [5_000]) == [other]
        assert tier.mismatches == 0

    async def test_a_value_that_was_refused_is_not_known(
        self, tier: AuditTier, ram: RamTier
    ) -> None:
        assert await store(tier, {KEY: bytes(32 * MIB + 1)}) == [False]
        await store(ram, {KEY: VALUE})
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert (tier.checked, tier.mismatches) == (0, 0)

    async def test_a_get_beside_a_put_of_other_bytes_is_not_called_corrupt(
        self, tier: AuditTier, ram: RamTier, faulty: FaultTier
    ) -> None:
        """The tier has stored the new value, and the put that did so has not answered yet."""
        await store(tier, {KEY: VALUE})
        await ram.delete([KEY])  # evicted
        other = make_value(2, 100)
        faulty.rules = parse_rules("put:hang")
        put = asyncio.ensure_future(store(tier, {KEY: other}))
        await begun(faulty, "put:hang")
        await store(ram, {KEY: other})
        assert await fetch(tier, [KEY], [5_000]) == [other]
        faulty.release()
        assert await put == [True]
        assert tier.mismatches == 0

    async def test_a_get_that_began_before_a_delete_and_another_put_is_not_called_corrupt(
        self, tier: AuditTier, faulty: FaultTier
    ) -> None:
        await store(tier, {KEY: VALUE})
        faulty.rules = parse_rules("get:hang")
        get = asyncio.ensure_future(fetch(tier, [KEY], [5_000]))
        await begun(faulty, "get:hang")
        other = make_value(2, 100)
        await tier.delete([KEY])
        await store(tier, {KEY: other})
        faulty.release()
        assert await get == [other]
        assert tier.mismatches == 0

    @pytest.mark.parametrize("operation", ["put", "delete"])
    async def test_a_call_that_failed_leaves_its_keys_unknown(
        self, tier: AuditTier, ram: RamTier, faulty: FaultTier, operation: str
    ) -> None:
        await store(tier, {KEY: VALUE})
        faulty.rules = parse_rules(f"{operation}:error")
        with pytest.raises(TierError):
            await (
                tier.put([(KEY, [memoryview(b"x")])]) if operation == "put" else tier.delete([KEY])
            )
        await ram.delete([KEY])
        await store(ram, {KEY: b"other"})
        assert await fetch(tier, [KEY], [5_000]) == [b"other"]
        assert tier.mismatches == 0

    async def test_a_key_twice_in_one_put_is_not_known(self, tier: AuditTier) -> None:
        await tier.put([(KEY, [memoryview(VALUE)]), (KEY, [memoryview(b"other")])])
        assert await fetch(tier, [KEY], [5_000]) == [VALUE]
        assert (tier.checked, tier.mismatches) == (0, 0)

    async def test_the_registry_is_bounded_and_keeps_what_was_used_last(self, ram: RamTier) -> None:
        """D36: digests of all that was ever put would fill the memory."""
        tier = AuditTier(ram, AuditConfig(max_keys=3))
        for i in range(3):
            await store(tier, {make_key(i): make_value(i, 10)})
        await fetch(tier, [make_key(0)], [10])
        await store(tier, {make_key(i): make_value(i, 10) for i in range(3, 5)})
        assert set(tier._digests._kept) == {make_key(0), make_key(3), make_key(4)}
        assert await fetch(tier, [make_key(i) for i in range(5)], [10] * 5) == [
            make_value(i, 10) for i in range(5)
        ]
        assert (tier.checked, tier.mismatches) == (4, 0)
        assert not tier._digests._changing
        assert not tier._digests._disputed
        await tier.close()

    async def test_a_miss_and_an_unknown_key_are_not_compared_with_anything(
        self, tier: AuditTier, ram: RamTier
    ) -> None:
        """D36: a digest that is not there is no digest."""
        await store(ram, {make_key(2): b"unknown"})
        await store(tier, {KEY: VALUE})
        await ram.delete([KEY])
        assert await fetch(tier, [KEY, make_key(2), make_key(3)], [5_000] * 3) == [
            None,
            b"unknown",
            None,
        ]
        assert (tier.checked, tier.mismatches) == (0, 0)


class TestLog:
    @pytest.fixture(autouse=True)
    def listen(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, logger="kvhold.audit")

    async def run_all(self, tier: AuditTier) -> None:
        await tier.check()
        await store(tier, {KEY: VALUE, make_key(2): b"abc"})
        await tier.probe([KEY, make_key(3)])
        await fetch(tier, [KEY, make_key(3)], [5_000, 1])
        await scanned(tier)
        await tier.delete([KEY])

    async def test_every_operation_is_one_line_with_keys_and_bytes(
        self, tier: AuditTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        await self.run_all(tier)
        lines = [record.getMessage().split(", ") for record in caplog.records]
        assert [line[0] for line in lines] == [f"ram: {what}" for what in self.OPERATIONS]
        assert [line[1] for line in lines] == [
            "0 bytes",
            "5003 bytes",
            "0 bytes",
            "5000 bytes",
            "0 bytes",
            "0 bytes",
        ]
        assert all(line[2].endswith(" s") and float(line[2][:-2]) >= 0 for line in lines)
        assert [line[3:] for line in lines] == [
            [],
            ["0 failed"],
            ["1 found"],
            ["1 found", "0 failed"],
            [],
            ["1 removed"],
        ]

    OPERATIONS = (
        "check: 0 keys",
        "put: 2 keys",
        "probe: 2 keys",
        "get: 2 keys",
        "scan: 2 keys",
        "delete: 1 keys",
    )

    async def test_operations_can_be_left_out(
        self, ram: RamTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = AuditTier(ram, AuditConfig(exclude="probe, scan,check"))
        await self.run_all(tier)
        assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
            "put",
            "get",
            "delete",
        ]
        await tier.close()

    async def test_a_fault_is_logged_and_passed_on(
        self, tier: AuditTier, faulty: FaultTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        faulty.rules = parse_rules("get:error:1:unavailable")
        with pytest.raises(TierUnavailable):
            await fetch(tier, [KEY], [1])
        assert caplog.records[-1].getMessage().endswith(" s, TierUnavailable")

    async def test_a_scan_left_early_is_logged_as_far_as_it_went(
        self, tier: AuditTier, caplog: pytest.LogCaptureFixture
    ) -> None:
        await store(tier, {make_key(i): b"x" for i in range(10)})
        scan = tier.scan(b"")
        await anext(scan)
        assert isinstance(scan, AsyncGenerator)
        await scan.aclose()
        assert "scan: 1 keys" in caplog.records[-1].getMessage()

    async def test_no_secret_of_the_url_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        tier, _ = make_tier("audit+null://")
        assert isinstance(tier, AuditTier)
        named = AuditTier.from_url(tier, {}, "audit+redis://user:***@host")
        await named.check()
        assert caplog.records[-1].getMessage().startswith("audit+redis://user:***@host: check")
        await named.close()


class TestSettings:
    async def test_a_url_names_what_it_wraps_and_its_options(self) -> None:
        tier, _ = make_tier("audit+null://?audit_max_keys=7&audit_exclude=probe")
        assert isinstance(tier, AuditTier)
        assert (tier._digests._max_keys, tier._excluded) == (7, frozenset({"probe"}))
        await tier.close()

    async def test_it_has_the_traits_of_what_it_wraps(self) -> None:
        class Durable(FaultTier):
            pass

        inner = Durable(make_tier("null://")[0])
        inner.traits = TierTraits(name="x", durable=True, shared=True, expires=True)
        assert AuditTier(inner).traits == inner.traits

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (
                "audit+null://?audit_exclude=probe,gte",
                (
                    "audit_exclude: there is no operation 'gte'; known are check, probe, get, "
                    "put, replace, delete, scan"
                ),
            ),
            ("audit+null://?audit_max_keys=0", "audit_max_keys = '0': must be at least 1"),
            (
                "audit+null://?audit_max_keys=many",
                "audit_max_keys = 'many': must be a whole number",
            ),
        ],
    )
    def test_a_bad_option_is_named(self, line: str, said: str) -> None:
        with pytest.raises(ConfigError) as error:
            make_tier(line)
        assert str(error.value) == f"{line}: {said}"

    def test_every_option_has_a_setting(self) -> None:
        for name in AuditTier.option_names:
            with pytest.raises(ConfigError, match=name):
                AuditTier.from_url(make_tier("null://")[0], {name: "?"}, "here")


async def test_a_scan_that_is_left_early_ends_at_once_below() -> None:
    inner = Scanned()
    scan = AuditTier(inner).scan(b"")
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
