"""Tiers on moto's server, and what lies there, for tests."""

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any, Protocol

import pytest

from kvhold.core.keys import NAMESPACE_BYTES
from kvhold.tiers.s3 import S3Tier
from kvhold.tiers.url import parse_url
from kvhold_lab.servers.s3 import MotoServer, S3Server, boto_client
from tests.tiers.conftest import start_or_skip

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


def assert_nobody_holds(memory: bytearray) -> None:
    gc.collect()
    memory.append(0)  # a BufferError if anybody has a view of it
