"""The S3 tier when things go wrong between here and there."""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import obstore
import pytest

from kvhold.core.errors import TierDenied, TierError, TierFull, TierUnavailable
from kvhold.testing.tier import fetch, make_key, make_value, scanned, store
from kvhold.tiers.s3 import S3Tier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.s3 import MotoServer
from tests.tiers.conftest import opened
from tests.tiers.s3_tiers import (
    BUCKET,
    MIB,
    OpenTier,
    assert_nobody_holds,
    open_own,
    open_tier,
    own_server,
    prefix,
    server,
)

__all__ = ["open_own", "open_tier", "own_server", "prefix", "server"]

pytestmark = pytest.mark.usefixtures("nothing_stays_open")


async def given_up(call: "asyncio.Future[Any]") -> None:
    """Cancel a call that hangs."""
    done, _ = await asyncio.wait((call,), timeout=0.3)
    assert not done, "it should hang: its server is paused"
    call.cancel()
    await asyncio.wait((call,))
    assert call.cancelled()


async def nobody_holds_soon(memory: bytearray) -> None:
    """What a failed call leaves of frames may end with the loop's next turns."""
    until = asyncio.get_running_loop().time() + 5
    while asyncio.get_running_loop().time() < until:
        with suppress(BufferError):
            assert_nobody_holds(memory)
            return
        await asyncio.sleep(0.02)
    assert_nobody_holds(memory)


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
