"""The S3 tier against moto's server: the contract, what S3 adds to it, and its settings."""

import asyncio
from typing import Any

import pytest

from kvhold.core.errors import ConfigError, TierError
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.s3 import S3Config, S3Tier
from kvhold.tiers.s3_store import endpoint_url
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.s3 import MotoServer, boto_client
from tests.tiers.conftest import opened
from tests.tiers.s3_tiers import (
    BUCKET,
    MIB,
    OpenTier,
    assert_nobody_holds,
    name_of,
    open_own,
    open_tier,
    own_server,
    pending_uploads,
    prefix,
    server,
    write_object,
)

__all__ = ["open_own", "open_tier", "own_server", "prefix", "server"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


class TestS3Tier(TierContract):
    @pytest.fixture
    async def tier(self, open_tier: OpenTier, prefix: str) -> S3Tier:
        return await open_tier(prefix)


async def test_tiers_with_different_prefixes_do_not_see_each_other(
    open_tier: OpenTier, prefix: str
) -> None:
    tiers = [
        await open_tier(prefix + tail)
        for tail in ("", "/inner", "-2", "/inner/" + make_key(1)[:NAMESPACE_BYTES].hex())
    ]
    for i, tier in enumerate(tiers):
        assert await store(tier, {make_key(1): make_value(i, 100), make_key(10 + i): b"x"}) == [
            True,
            True,
        ]
    for i, tier in enumerate(tiers):
        assert await scanned(tier) == sorted([make_key(1), make_key(10 + i)])
        assert await scanned(tier, make_key(1)[:NAMESPACE_BYTES]) == sorted(
            [make_key(1), make_key(10 + i)]
        )
        assert await fetch(tier, [make_key(1), make_key(11 + i)], [100, 100]) == [
            make_value(i, 100),
            None,
        ]
    assert await tiers[0].delete([make_key(1)]) == [True]
    assert [await tier.probe([make_key(1)]) for tier in tiers] == [[None], [100], [100], [100]]


async def test_a_scan_passes_over_what_others_keep_there(
    server: MotoServer, open_tier: OpenTier, prefix: str
) -> None:
    tier = await open_tier(prefix)
    await store(tier, {make_key(1): b"x"})
    name = name_of(make_key(2), prefix)
    for other in (
        f"{prefix}/readme.txt",
        f"{name}00",
        name[:-1],
        name[:-2],
        name.upper(),
        f"{name[:-4]}/{name[-4:]}",
        f"{name}/x",
        f"{name[:-2]} 0",
    ):
        write_object(server, prefix + other[len(prefix) :], b"y")
    assert await scanned(tier) == [make_key(1)]
    write_object(server, f"{prefix}//x", b"y")
    with pytest.raises(TierError, match="use a separate prefix"):  # obstore cannot spell it
        await scanned(tier)
    assert await scanned(tier, make_key(1)[:NAMESPACE_BYTES]) == [make_key(1)]


async def test_a_scan_goes_on_beyond_the_first_thousand(open_tier: OpenTier, prefix: str) -> None:
    tier = await open_tier(prefix)
    keys = [make_key(i) for i in range(1_001)]
    assert await store(tier, dict.fromkeys(keys, b"x")) == [True] * len(keys)
    assert await scanned(tier) == sorted(keys)
    assert await scanned(tier, keys[0][:NAMESPACE_BYTES]) == sorted(keys)
    assert await tier.delete(keys) == [True] * len(keys)
    assert await scanned(tier) == []


async def test_an_object_replaced_by_another_client_after_the_probe_is_read_as_it_is_now(
    server: MotoServer, open_tier: OpenTier, prefix: str
) -> None:
    tier, key = await open_tier(prefix), make_key(1)
    await store(tier, {key: make_value(1, 10_000)})
    for nbytes, expected in ((4_000, 4_000), (20_000, None), (0, None)):
        assert await tier.probe([key]) != [None]
        write_object(server, name_of(key, prefix), make_value(2, nbytes))
        memory = bytearray(12_000)
        assert await tier.get([key], [[memoryview(memory)[:10_000]]]) == [expected]
        assert memory[10_000:] == bytes(2_000)
        assert memory[: expected or 0] == make_value(2, expected or 0)
        assert await tier.get([key], [[memoryview(bytearray(5_000))]], starts=[3_000]) == [
            5_000 if nbytes == 20_000 else None
        ]
        write_object(server, name_of(key, prefix), make_value(1, 10_000))


async def test_of_two_clients_that_put_one_key_the_first_one_stays(
    open_tier: OpenTier, prefix: str
) -> None:
    tiers = [await open_tier(prefix) for _ in range(4)]
    for turn in range(10):
        values = [make_value(100 * turn + i, 1_000 + i) for i in range(4)]
        racing = [
            store(tier, {make_key(turn): value}) for tier, value in zip(tiers, values, strict=True)
        ]
        assert await asyncio.gather(*racing) == [[True]] * 4
        [won] = await fetch(tiers[0], [make_key(turn)], [2_000])
        assert won in values
        assert (
            await asyncio.gather(*(fetch(tier, [make_key(turn)], [2_000]) for tier in tiers))
            == [[won]] * 4
        )


@pytest.mark.parametrize(
    "options",
    [
        {"put_if_absent": "false"},
        {"multipart_bytes": 1_000},
        {"bulk_delete": "false"},
        {"unsigned_payload": "false"},
    ],
)
async def test_stores_that_lack_something_do_too(
    open_tier: OpenTier, prefix: str, options: dict[str, Any]
) -> None:
    tier, key, first = await open_tier(prefix, **options), make_key(1), make_value(1, 5_000)
    assert await store(tier, {key: first, make_key(2): b"2"}) == [True, True]
    assert await store(tier, {key: make_value(2, 6_000)}) == [True]
    assert await fetch(tier, [key, make_key(2)], [6_000, 1]) == [first, b"2"]
    assert await tier.delete([key, make_key(2), make_key(3)]) == [True, True, False]
    assert await scanned(tier) == []


async def test_a_large_value_travels_in_parts(
    server: MotoServer, open_tier: OpenTier, prefix: str
) -> None:
    tier, value = (
        await open_tier(prefix, multipart_bytes="6MiB", part_bytes="5MiB"),
        make_value(1, 11 * MIB + 3),
    )
    parts = [memoryview(value)[:1], memoryview(value)[1 : 6 * MIB], memoryview(value)[6 * MIB :]]
    assert await tier.put([(make_key(1), parts)]) == [None]
    assert await fetch(tier, [make_key(1)], [len(value)]) == [value]
    etag = boto_client(server, "s3").head_object(Bucket=BUCKET, Key=name_of(make_key(1), prefix))[
        "ETag"
    ]
    assert "-" in etag, "S3 marks what was put in parts"
    assert pending_uploads(server) == []


async def test_a_cancelled_upload_in_parts_leaves_nothing(
    own_server: MotoServer, open_own: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhold.tiers.s3._ABORT_S", 60.0)  # a busy moto takes its time
    tier, value = await open_own(multipart_bytes="6MiB", part_bytes="5MiB"), make_value(1, 31 * MIB)
    cut = 0
    for turn in range(12):
        mine = bytearray(value)
        call = asyncio.ensure_future(tier.put([(make_key(turn), [memoryview(mine)])]))
        await asyncio.wait((call,), timeout=0.02 * turn)  # somewhere in the middle
        call.cancel()
        await asyncio.wait((call,))
        del call  # whose traceback has the caller's memory in its frames
        assert_nobody_holds(mine)
        cut += await tier.probe([make_key(turn)]) == [None]
        assert await tier.probe([make_key(turn)]) in ([None], [len(value)])
        assert pending_uploads(own_server) == []
    assert cut > 1, "the first is cancelled before it begins, the next ones in the middle"


async def test_credentials_come_from_the_environment(
    own_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.demand_credentials()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", own_server.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", own_server.secret_access_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")  # the option wins
    tier = opened(
        S3Tier.from_url(parse_url(f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{own_server.port}"))
    )
    await tier.check()
    assert await store(tier, {make_key(1): b"x"}) == [True]
    await tier.close()


def test_what_cannot_work_is_refused_when_it_is_made() -> None:
    for text, message in {
        "s3://": "bucket",
        "s3://a b/": "bucket",
        "s3://bucket/a%20b": "prefix",
        "s3://bucket/../x": "prefix",
        "s3://bucket/x?endpont=http://x": "endpoint",
        "s3://bucket/x?endpoint=127.0.0.1:9000": "endpoint",
        "s3://bucket/x?endpoint=http://me:hidden@host": "'@' is %40",
        "s3://bucket/x?endpoint=http://me:hidden%40host": "endpoint",
        "s3://bucket/x?endpoint=http://host:99999": "endpoint",
        "s3://me:hidden@bucket/x": "credentials",
        "s3://bucket/x?access_key_id=hidden": "secret_access_key",
        "s3://bucket/x?session_token=hidden": "session_token",
        "s3://bucket/x?anonymous=true&access_key_id=hidden&secret_access_key=hidden": "anonymous",
        "s3://bucket/x?part_bytes=1MiB": "5MiB",
        "s3://bucket/x?parallel=0": "parallel",
        "s3://bucket/x?unsigned_payload=maybe": "unsigned_payload",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            S3Tier.from_url(parse_url(text))
        assert "hidden" not in str(caught.value)


def test_secrets_are_in_no_repr() -> None:
    config = S3Config(
        bucket="bucket",
        access_key_id="hidden1",
        secret_access_key="hidden2",
        session_token="hidden3",
    )
    assert "hidden" not in repr(config)
    assert "hidden" not in repr(S3Tier(config))
    assert (
        "hidden"
        not in parse_url(
            "s3://bucket/p?access_key_id=hidden&secret_access_key=hidden&session_token=hidden"
        ).shown
    )


def test_a_virtual_host_has_the_bucket_in_its_name() -> None:
    assert (
        endpoint_url(S3Config(bucket="kv", endpoint="https://host:9000/", virtual_hosted=True))
        == "https://kv.host:9000"
    )
    assert endpoint_url(S3Config(bucket="kv", endpoint="https://host:9000")) == "https://host:9000"


async def test_a_certificate_file_that_cannot_be_read_is_named(open_tier: OpenTier) -> None:
    tier = await open_tier(ca_file="/no/such/file")
    with pytest.raises(ConfigError, match="/no/such/file"):
        await tier.check()
