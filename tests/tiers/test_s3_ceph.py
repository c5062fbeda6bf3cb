"""The S3 tier against a real Ceph gateway: the contract, and what moto could be wrong about.

pytest tests/tiers/test_s3_ceph.py  # needs Ceph's programs: the skip says how to install them
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from kvhold.core.errors import TierDenied, TierUnavailable
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.s3 import S3Tier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.s3 import CephGateway, boto_client
from tests.tiers.conftest import opened, start_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_open")]

BUCKET = "kvhold"
MIB = 1 << 20
_numbers = count()


@pytest.fixture(scope="module")
def server() -> Iterator[CephGateway]:
    for server in start_or_skip(CephGateway):
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
async def tier(server: CephGateway) -> AsyncIterator[S3Tier]:
    tier = S3Tier.from_url(
        parse_url(
            server.url(f"{BUCKET}/test-{next(_numbers)}", multipart_bytes="6MiB", part_bytes="5MiB")
        )
    )
    yield tier
    await tier.close()


class TestS3TierOnCeph(TierContract):
    @pytest.fixture
    async def tier(self, tier: S3Tier) -> S3Tier:
        return tier


async def test_of_two_clients_that_put_one_key_the_first_one_stays(
    server: CephGateway, tier: S3Tier
) -> None:
    for turn in range(10):
        values = [make_value(100 * turn + i, 1_000 + i) for i in range(4)]
        assert (
            await asyncio.gather(*(store(tier, {make_key(turn): value}) for value in values))
            == [[True]] * 4
        )
        [won] = await fetch(tier, [make_key(turn)], [2_000])
        assert won in values
        assert await store(tier, {make_key(turn): b"late"}) == [True]
        assert await fetch(tier, [make_key(turn)], [2_000]) == [won]


async def test_a_large_value_travels_in_parts_and_leaves_none(
    server: CephGateway, tier: S3Tier
) -> None:
    value = make_value(1, 11 * MIB + 3)
    assert await store(tier, {make_key(1): value}) == [True]
    assert await fetch(tier, [make_key(1)], [len(value)]) == [value]
    mine = bytearray(value)
    call = asyncio.ensure_future(tier.put([(make_key(2), [memoryview(mine)])]))
    await asyncio.wait((call,), timeout=0.02)
    call.cancel()
    await asyncio.wait((call,))
    assert await tier.probe([make_key(2)]) in ([None], [len(value)])
    assert not boto_client(server, "s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads")


async def test_what_is_wrong_is_named(server: CephGateway) -> None:
    for place, options, kind, message in (
        (BUCKET, {"secret_access_key": "hidden"}, TierDenied, "credentials"),
        (BUCKET, {"access_key_id": "hidden"}, TierDenied, "credentials"),
        ("no-such-bucket", {}, TierUnavailable, "no-such-bucket"),
    ):
        tier = opened(S3Tier.from_url(parse_url(server.url(place, **options))))
        for call in (
            tier.check,
            lambda tier=tier: store(tier, {make_key(1): b"x"}),
            lambda tier=tier: scanned(tier),
        ):
            with pytest.raises(kind, match=message) as caught:
                await call()
            assert "hidden" not in str(caught.value)
        await tier.close()
