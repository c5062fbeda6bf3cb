"""The plainest means that tiers are held against: that they move what they say they move.

A Redis is real.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvhold_lab.bench.limits import RawFiles, RawRedis
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

VALUE_BYTES, NUM_VALUES = 4096, 101  # more than two digits count


@pytest.fixture
def values() -> list[memoryview]:
    return [memoryview(os.urandom(VALUE_BYTES)) for _ in range(NUM_VALUES)]


@pytest.fixture
def into() -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, VALUE_BYTES)) for _ in range(NUM_VALUES)]


@pytest.fixture
def redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(password=request.param)
    try:
        server.start()
    except NotInstalled as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.close()


def test_files_come_back_as_they_were_written(
    values: list[memoryview], into: list[memoryview], tmp_path: Path
) -> None:
    with closing(RawFiles(tmp_path, values, threads=2, direct=False)) as files:
        files.write()
        files.read(into)
        assert into == values
        seen = []
        files.read(into, then=lambda at: seen.append((at, into[at] == values[at])))
    assert sorted(seen) == [(at, True) for at in range(NUM_VALUES)]


@pytest.mark.server
@pytest.mark.parametrize("redis", ["", "right"], indirect=True)
def test_each_value_goes_to_redis_and_comes_back_with_and_without_a_password(
    redis: RedisServer,
    values: list[memoryview],
    into: list[memoryview],
    request: pytest.FixtureRequest,
) -> None:
    with closing(
        RawRedis(redis.port, request.node.callspec.params["redis"], values, connections=4)
    ) as raw:
        raw.set()
        assert redis.call("DBSIZE") == NUM_VALUES
        raw.get(into)
        assert into == values
        redis.call("FLUSHALL")
        with pytest.raises(OSError, match="where 4096 bytes were stored"):
            raw.get(into)


@pytest.mark.server
@pytest.mark.parametrize("redis", [""], indirect=True)
def test_what_redis_refuses_is_no_measurement(redis: RedisServer, values: list[memoryview]) -> None:
    redis.call("CONFIG", "SET", "maxmemory", "1")
    with (
        closing(RawRedis(redis.port, "", values, connections=1)) as raw,
        pytest.raises(OSError, match="the server said"),
    ):
        raw.set()
