"""The S3 tier against moto's server: the contract, what S3 adds to it, and what goes wrong between
here and there.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from typing import Any, Protocol

import obstore
import pytest

from kvhold.core.errors import ConfigError, TierDenied, TierError, TierFull, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.testing import TierContract
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.s3 import S3Config, S3Tier
from kvhold.tiers.s3_store import endpoint_url
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.s3 import MotoServer, S3Server, boto_client
from tests.tiers.conftest import opened, start_or_skip

pytestmark = pytest.mark.usefixtures("nothing_stays_open")

BUCKET = "kvhold"
MIB = 1 << 20


class OpenTier(Protocol):
    """A tier on the server: `open_tier("prefix", option=value)`; it is closed after the test."""

    async def __call__(
        self, prefix: str = ..., *, bucket: str = ..., **options: object
    ) -> S3Tier: ...


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    for server in start_or_skip(MotoServer):
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture
def own_server() -> Iterator[MotoServer]:
    """One that a test may hurt."""
    for server in start_or_skip(MotoServer):
        server.create_bucket(BUCKET)
        yield server


@asynccontextmanager
async def opening(server: MotoServer) -> AsyncIterator[OpenTier]:
    async with AsyncExitStack() as stack:

        async def open_tier(
            prefix: str = "p", *, bucket: str = BUCKET, **options: object
        ) -> S3Tier:
            tier = S3Tier.from_url(parse_url(server.url(f"{bucket}/{prefix}", **options)))
            stack.push_async_callback(tier.close)
            return tier

        yield open_tier


@pytest.fixture
async def open_tier(server: MotoServer) -> AsyncIterator[OpenTier]:
    async with opening(server) as open_tier:
        yield open_tier


@pytest.fixture
async def open_own(own_server: MotoServer) -> AsyncIterator[OpenTier]:
    async with opening(own_server) as open_tier:
        yield open_tier


_numbers = count()


@pytest.fixture
def prefix() -> str:
    """A prefix of the test's own, on the server that it shares."""
    return f"test-{next(_numbers)}"


def name_of(key: bytes, prefix: str) -> str:
    return f"{prefix}/{key[:NAMESPACE_BYTES].hex()}/{key[NAMESPACE_BYTES:].hex()}"


def write_object(server: S3Server, name: str, value: bytes) -> None:
    """As another client would."""
    boto_client(server, "s3").put_object(Bucket=BUCKET, Key=name, Body=value)


def pending_uploads(server: S3Server) -> list[Any]:
    return list(boto_client(server, "s3").list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


async def given_up(call: "asyncio.Future[Any]") -> None:
    """Cancel a call that hangs."""
    done, _ = await asyncio.wait((call,), timeout=0.3)
    assert not done, "it should hang: its server is paused"
    call.cancel()
    await asyncio.wait((call,))
    assert call.cancelled()


def assert_nobody_holds(memory: bytearray) -> None:
    gc.collect()
    memory.append(0)  # a BufferError if anybody has a view of it


async def nobody_holds_soon(memory: bytearray) -> None:
    """What a failed call leaves of frames may end with the loop's next turns."""
    until = asyncio.get_running_loop().time() + 5
    while asyncio.get_running_loop().time() < until:
        with suppress(BufferError):
            assert_nobody_holds(memory)
            return
        await asyncio.sleep(0.02)
    assert_nobody_holds(memory)


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


async def test_a_dead_endpoint_is_unavailable(own_server: MotoServer, open_own: OpenTier) -> None:
    tier, key = await open_own(), make_key(1)
    await store(tier, {key: b"x"})
    own_server.kill()
    for call in every_call(tier, [make_key(1), make_key(2)]):
        with pytest.raises(
            TierUnavailable, match=rf"{BUCKET}.*127\.0\.0\.1:{own_server.port}.*Connection refused"
        ):
            await call()


async def test_a_server_that_comes_back_is_used_again(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    tier, key = await open_own(), make_key(1)
    await store(tier, {key: b"x"})
    own_server.kill()
    own_server.start()
    own_server.create_bucket(BUCKET)
    assert await tier.probe([key]) == [None]  # moto forgets
    assert await store(tier, {key: b"y"}) == [True]
    assert await fetch(tier, [key], [1]) == [b"y"]


async def test_wrong_credentials_are_denied_and_never_shown(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    own_server.demand_credentials()
    good = await open_own()
    await good.check()
    assert await store(good, {make_key(1): b"x"}) == [True]
    key_id, secret = "AKIAWRONGWRONGWRONG1", "veryverysecretkey"
    for options in (
        {"access_key_id": key_id, "secret_access_key": secret},
        {"secret_access_key": secret},
    ):
        tier = await open_own(**options)
        for call in every_call(tier, [make_key(1)]):
            with pytest.raises(TierDenied, match="credentials") as caught:
                await call()
            assert secret not in str(caught.value)
            assert key_id not in str(caught.value)
            assert own_server.access_key_id not in str(caught.value)


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


async def test_a_bucket_that_is_not_there_is_named(open_tier: OpenTier) -> None:
    tier = await open_tier(bucket="no-such-bucket")
    with pytest.raises(TierUnavailable, match=r"no-such-bucket.*create it"):
        await tier.check()
    with pytest.raises(TierUnavailable, match="no-such-bucket"):
        await store(tier, {make_key(1): b"x"})
    with pytest.raises(TierUnavailable, match="no-such-bucket"):
        await fetch(tier, [make_key(1)], [1])
    with pytest.raises(TierUnavailable, match="no-such-bucket"):
        await scanned(tier)


@pytest.fixture
def no_time_for_others() -> Iterator[None]:
    """Other threads get the GIL where this one waits, and nowhere else; what is old is not searched
    for garbage.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_time_for_others")
async def test_a_put_to_a_silent_server_can_be_cancelled_and_lets_go_of_memory(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    tier = await open_own()
    await store(tier, {make_key(0): b"x"})
    mine = [bytearray(8 * MIB) for _ in range(12)]
    own_server.pause()
    await given_up(
        asyncio.ensure_future(
            tier.put([(make_key(i), [memoryview(m)]) for i, m in enumerate(mine)])
        )
    )
    for memory in mine:
        assert_nobody_holds(memory)
    own_server.resume()
    assert await tier.probe([make_key(i) for i in range(12)]) == [1, *[None] * 11]


async def test_a_get_from_a_silent_server_can_be_cancelled_and_lets_go_of_memory(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    tier, values = await open_own(), {make_key(i): make_value(i, 2 * MIB) for i in range(3)}
    await store(tier, values)
    mine = [bytearray(2 * MIB) for _ in values]
    own_server.pause()
    await given_up(asyncio.ensure_future(tier.get(list(values), [[memoryview(m)] for m in mine])))
    seen = [bytes(memory) for memory in mine]
    own_server.resume()
    assert await fetch(tier, list(values), [2 * MIB] * 3) == list(values.values())
    assert [bytes(memory) for memory in mine] == seen
    for memory in mine:
        assert_nobody_holds(memory)


async def test_other_calls_on_a_silent_server_can_be_cancelled(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    tier = await open_own()
    await store(tier, {make_key(1): b"x"})
    own_server.pause()
    for call in every_call(tier, [make_key(1)]):
        await given_up(asyncio.ensure_future(call()))
    own_server.resume()
    assert await tier.probe([make_key(1)]) in ([1], [None])  # the delete may have arrived


async def test_a_server_killed_amid_a_put_is_unavailable(
    own_server: MotoServer, open_own: OpenTier
) -> None:
    tier, mine = await open_own(), bytearray(32 * MIB)
    await store(tier, {make_key(0): b"x"})
    own_server.pause()
    call = asyncio.ensure_future(tier.put([(make_key(1), [memoryview(mine)])]))
    await asyncio.wait((call,), timeout=0.2)
    own_server.kill()
    await asyncio.wait((call,))
    assert isinstance(call.exception(), TierUnavailable)
    del call  # whose traceback has the caller's memory in its frames
    await nobody_holds_soon(mine)


async def test_what_obstore_has_raised_holds_nobodys_memory(
    open_own: OpenTier, own_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore lets go of its exceptions when it is called again, which may be never."""
    raised: list[BaseException] = []

    def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
        async def kept(*given: Any, **options: Any) -> Any:
            try:
                return await call(*given, **options)
            except Exception as error:
                raised.append(error)
                raise

        return kept

    tier, mine = await open_own(), bytearray(1 * MIB)
    await store(tier, {make_key(0): b"x"})
    for name in ("get_async", "get_range_async", "put_async", "head_async"):
        monkeypatch.setattr(obstore, name, keeping(getattr(obstore, name)))
    assert await tier.get([make_key(1)], [[memoryview(mine)]]) == [None]
    assert await tier.get([make_key(0)], [[memoryview(mine)]], starts=[7]) == [None]
    assert await tier.put([(make_key(0), [memoryview(mine)])]) == [None]
    assert await tier.replace([(make_key(1), [memoryview(mine)])]) == [False]
    assert len(raised) == 4
    own_server.kill()
    for call in (
        tier.put([(make_key(1), [memoryview(mine)])]),
        tier.get([make_key(0)], [[memoryview(mine)]]),
    ):
        with pytest.raises(TierUnavailable):
            await call
    assert len(raised) == 6
    del call
    assert_nobody_holds(mine)


async def test_a_connection_that_breaks_amid_a_value_loses_that_value_alone(
    server: MotoServer, prefix: str
) -> None:
    values = {
        make_key(i): make_value(i, nbytes) for i, nbytes in enumerate((1_000, 3 * MIB, 2_000))
    }
    async with broken_after(server.port, 1 * MIB) as port:
        endpoint = f"http://127.0.0.1:{port}"
        tier = opened(
            S3Tier.from_url(parse_url(server.url(f"{BUCKET}/{prefix}", endpoint=endpoint)))
        )
        assert await store(tier, values) == [True] * 3
        memory = [bytearray(3 * MIB) for _ in values]
        got = await tier.get(list(values), [[memoryview(m)] for m in memory])
        await tier.close()
    assert [got[0], got[2]] == [1_000, 2_000]
    assert isinstance(got[1], TierError)
    assert memory[0][:1_000] == values[make_key(0)]


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (409, "ConditionalRequestConflict", TierError, "ConditionalRequestConflict"),
        (503, "SlowDown", TierUnavailable, "SlowDown"),
        (500, "InternalError", TierUnavailable, "InternalError"),
        (507, "", TierFull, "507"),
        (403, "QuotaExceeded", TierFull, "QuotaExceeded"),
        (400, "EntityTooLarge", TierFull, "EntityTooLarge"),
        (403, "AccessDenied", TierDenied, "rights"),
        (401, "", TierDenied, "credentials"),
        (400, "AuthorizationHeaderMalformed", TierUnavailable, "region"),
        (301, "PermanentRedirect", TierUnavailable, "region"),
        (400, "InvalidRequest", TierError, "InvalidRequest"),
    ],
)
async def test_answers_that_moto_never_gives_are_named(
    status: int, code: str, kind: type[TierError], message: str
) -> None:
    body = (
        f"<Error><Code>{code}</Code><Message>said</Message><AWSAccessKeyId>hidden</AWSAccessKeyId></Error>"
        if code
        else ""
    )
    async with answering(
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    ) as port:
        url = f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{port}&access_key_id=hidden&secret_access_key=hidden"
        tier = opened(S3Tier.from_url(parse_url(url)))
        items = [(make_key(1), [memoryview(b"x")])]
        ended = (await asyncio.gather(tier.put(items), return_exceptions=True))[0]
        await tier.close()
    fault = ended[0] if isinstance(ended, list) else ended
    assert type(fault) is kind
    assert message in str(fault)
    assert "hidden" not in str(fault)


@pytest.mark.parametrize(
    ("codes", "fault", "asked"),
    [
        (["UnknownError", ""], None, 2),  # Ceph, for an object that is replaced at that moment
        (["UnknownError"] * 3, TierUnavailable, 3),
        (["AccessDenied"], TierDenied, 1),
    ],
)
async def test_objects_that_are_not_removed_are_removed_again(
    codes: list[str], fault: type[TierError] | None, asked: int
) -> None:
    """codes: of the answers, one after the other; empty: the object is removed"""
    deletes: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = ""
        if head.startswith(b"POST"):
            code = codes[len(deletes)]
            deletes.append(code)
            name = tier._name_of(make_key(1))
            said = f"<Error><Key>{name}</Key><Code>{code}</Code><Message>no</Message></Error>"
            removed = f"<Deleted><Key>{name}</Key></Deleted>"
            body = f"<DeleteResult>{said if code else removed}</DeleteResult>"
        dates = 'Last-Modified: Thu, 26 Nov 2026 10:00:00 GMT\r\nETag: "1"\r\n'
        length = 7 if head.startswith(b"HEAD") else len(body)
        writer.write(
            f"HTTP/1.1 200 OK\r\n{dates}Content-Length: {length}\r\nConnection: close\r\n\r\n"
            f"{body}".encode()
        )
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    url = f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{port}&access_key_id=k&secret_access_key=k"
    tier = opened(S3Tier.from_url(parse_url(url)))
    try:
        if fault is None:
            assert await tier.delete([make_key(1)]) == [True]
        else:
            with pytest.raises(fault, match=f"objects were not removed: {codes[-1]}"):
                await tier.delete([make_key(1)])
    finally:
        listener.close()
        await tier.close()
    assert len(deletes) == asked


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


def every_call(tier: S3Tier, keys: list[bytes]) -> list[Callable[[], Any]]:
    return [
        tier.check,
        lambda: tier.probe(keys),
        lambda: fetch(tier, keys, [1] * len(keys)),
        lambda: store(tier, dict.fromkeys(keys, b"x")),
        lambda: scanned(tier),
        lambda: tier.delete(keys),
    ]


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """The port of a server that says this to whatever it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


@asynccontextmanager
async def broken_after(port: int, nbytes: int) -> AsyncIterator[int]:
    """The port of a way to `port` whose connections break after so many bytes from there."""

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: float
    ) -> None:
        try:
            while most > 0 and (data := await reader.read(1 << 16)):
                writer.write(data)
                await writer.drain()
                most -= len(data)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(forward(reader, back, float("inf")), forward(there, writer, nbytes))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
