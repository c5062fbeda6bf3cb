import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from kvhold_lab.servers.base import ServerProcess
from kvhold_lab.servers.central import CentralServer
from kvhold_lab.servers.memcached import MemcachedServer
from kvhold_lab.servers.redis import RedisServer
from kvhold_lab.servers.s3 import MotoServer

_SMALL = "8mb"


class BenchPlace(Protocol):
    name: str

    def url(self) -> str:
        pass

    def full_url(self) -> str | None:
        """None: impossible."""

    def denied_url(self) -> str | None:
        """None: the place has no rights."""

    def kill(self) -> None:
        pass

    def revive(self) -> None:
        pass

    def pause(self) -> bool:
        """Hang. False: impossible."""

    def resume(self) -> None:
        pass

    def close(self) -> None:
        pass


class DiskPlace:
    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="kvhold-place-"))
        self._kv = self._folder / "kv"

    def url(self) -> str:
        return f"{self.name}://{self._kv}" + ("?max_bytes=2GiB" if self.name == "disk" else "")

    def full_url(self) -> str | None:
        return f"disk://{self._folder}/small?max_bytes=1MiB" if self.name == "disk" else None

    def denied_url(self) -> str | None:
        return f"{self.name}:///proc/kvhold"

    def kill(self) -> None:
        while self._kv.is_dir():
            shutil.rmtree(self._kv, ignore_errors=True)
        self._kv.write_text("a file where the folder was")

    def revive(self) -> None:
        self._kv.unlink()

    def pause(self) -> bool:
        return False

    def resume(self) -> None:
        pass

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class ServerPlace:
    def __init__(
        self,
        name: str,
        server: ServerProcess,
        url: Callable[[ServerProcess], str],
        *,
        full: tuple[ServerProcess, Callable[[ServerProcess], str]] | None = None,
        denied: Callable[[ServerProcess], str] | None = None,
        prepare: Callable[[ServerProcess], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._server = server
        self._make_url = url
        self._full = full
        self._denied = denied
        self._prepare = prepare
        server.start()
        prepare(server)

    def url(self) -> str:
        return self._make_url(self._server)

    def full_url(self) -> str | None:
        if self._full is None:
            return None
        server, url = self._full
        if not server.running:
            server.start()
        return url(server)

    def denied_url(self) -> str | None:
        return None if self._denied is None else self._denied(self._server)

    def kill(self) -> None:
        self._server.kill()

    def revive(self) -> None:
        self._server.start()
        self._prepare(self._server)

    def pause(self) -> bool:
        self._server.pause()
        return True

    def resume(self) -> None:
        self._server.resume()

    def close(self) -> None:
        for server in (self._server, *((self._full[0],) if self._full else ())):
            server.close()


def _redis() -> BenchPlace:
    server = RedisServer(password="right")
    small = RedisServer(settings={"maxmemory": _SMALL, "maxmemory-policy": "noeviction"})
    return ServerPlace(
        "redis",
        server,
        lambda s: f"redis://:right@127.0.0.1:{s.port}/0",
        full=(small, lambda s: f"redis://127.0.0.1:{s.port}/0"),
        denied=lambda s: f"redis://:wrong@127.0.0.1:{s.port}/0",
    )


def _memcached() -> BenchPlace:
    server = MemcachedServer(item_bytes=4 << 20)
    small = MemcachedServer(item_bytes=1 << 20, memory_bytes=8 << 20, evict=False)
    return ServerPlace("memcached", server, lambda _: server.url, full=(small, lambda _: small.url))


def _s3() -> BenchPlace:
    server = MotoServer()
    return ServerPlace(
        "s3",
        server,
        lambda _: server.url("kvhold/bench"),
        denied=lambda _: server.url("no-such-bucket/bench"),
        prepare=lambda _: server.create_bucket("kvhold"),
    )


def _central() -> BenchPlace:
    folder = Path(tempfile.mkdtemp(prefix="kvhold-place-"))
    token = folder / "token"
    token.write_text("right")
    server = CentralServer("--token-file", str(token), ram_bytes="1GiB")
    small = CentralServer(ram_bytes="4MiB")
    return ServerPlace(
        "kvhold",
        server,
        lambda s: f"kvhold://:right@127.0.0.1:{s.port}",
        full=(small, lambda s: f"kvhold://127.0.0.1:{s.port}"),
        denied=lambda s: f"kvhold://:wrong@127.0.0.1:{s.port}",
    )


PLACES: dict[str, Callable[[], BenchPlace]] = {
    "disk": DiskPlace,
    "fs": lambda: DiskPlace("fs"),
    "redis": _redis,
    "memcached": _memcached,
    "s3": _s3,
    "kvhold": _central,
}


@contextmanager
def open_place(name: str) -> Iterator[BenchPlace]:
    place = PLACES[name]()
    try:
        yield place
    finally:
        place.close()
