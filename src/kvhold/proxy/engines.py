"""The engines behind a proxy: their health and load, and the choice of one.

A prefill engine's load is its requests' tokens, a decode engine's their number. No I/O.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from kvhold.core.errors import ConfigError
from kvhold.core.proxy_config import ProxyConfig
from kvhold.net.addresses import split_address

Role = Literal["prefill", "decode"]


class ProxiedEngine:
    """peer: host and port where decode engines fetch its KV (protocol p2p)"""

    def __init__(self, role: Role, url: str, peer: tuple[str, int] | None = None) -> None:
        self.role = role
        self.url = url
        self.peer = peer
        self.name = urlsplit(url).netloc + urlsplit(url).path
        self.is_up = False
        self.is_draining = False
        self.cause = "not probed yet"
        self.num_failures = 0
        self.running = 0
        self.tokens = 0
        self.last_chosen = 0.0
        self._waits: set[asyncio.Timeout] = set()

    @property
    def is_usable(self) -> bool:
        return self.is_up and not self.is_draining

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        self.running += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.running -= 1
            self.tokens -= tokens

    @contextmanager
    def waiting(self, until: asyncio.Timeout) -> Iterator[None]:
        """`give_up` ends this wait for an answer."""
        self._waits.add(until)
        try:
            yield
        finally:
            self._waits.discard(until)

    def give_up(self) -> None:
        for until in self._waits:
            until.reschedule(asyncio.get_running_loop().time())


class EnginePool:
    def __init__(self, role: Role, engines: Sequence[ProxiedEngine], *, session_slack: int) -> None:
        self.role = role
        self.engines = tuple(engines)
        self._slack = session_slack
        self._load: Callable[[ProxiedEngine], int] = (
            (lambda engine: engine.tokens) if role == "prefill" else (lambda engine: engine.running)
        )

    @property
    def num_usable(self) -> int:
        return sum(engine.is_usable for engine in self.engines)

    def choose(
        self, session: str | None, tried: Collection[ProxiedEngine] = ()
    ) -> ProxiedEngine | None:
        usable = [engine for engine in self.engines if engine.is_usable and engine not in tried]
        if not usable:
            return None
        chosen = self._least_loaded(usable)
        if session is not None:
            own = max(usable, key=lambda engine: _weight(session, engine))
            if own.running <= min(engine.running for engine in usable) + self._slack:
                chosen = own
        chosen.last_chosen = time.monotonic()
        return chosen

    def _least_loaded(self, engines: Iterable[ProxiedEngine]) -> ProxiedEngine:
        return min(
            engines, key=lambda engine: (self._load(engine), engine.running, engine.last_chosen)
        )


def make_pools(config: ProxyConfig) -> tuple[EnginePool, EnginePool]:
    if not config.decode:
        raise ConfigError(
            "proxy.decode: name at least one decode engine, such as --decode http://127.0.0.1:8200"
        )
    prefill = [_parse("prefill", text, config.protocol) for text in config.prefill]
    decode = [_parse("decode", text, config.protocol) for text in config.decode]
    seen: dict[str, ProxiedEngine] = {}
    for engine in (*prefill, *decode):
        if (other := seen.setdefault(engine.url, engine)) is not engine:
            raise ConfigError(
                f"proxy.{engine.role}: {engine.url} is also in proxy.{other.role}; name each "
                "engine once (a decode engine computes prompts, too)"
            )
    slack = config.session_slack
    return (
        EnginePool("prefill", prefill, session_slack=slack),
        EnginePool("decode", decode, session_slack=slack),
    )


def _weight(session: str, engine: ProxiedEngine) -> bytes:
    """Rendezvous hashing: only a failed engine's sessions move."""
    return blake2b(f"{session}\0{engine.url}".encode(errors="replace"), digest_size=16).digest()


def _parse(role: Role, text: str, protocol: str) -> ProxiedEngine:
    where = f"proxy.{role}"
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
    except ValueError:
        is_url = False
    if not is_url:  # it may contain a key
        raise ConfigError(f"{where}: not an engine's URL; write it as http://127.0.0.1:8100")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{where}: a URL of an engine has no user and password; name the file of its key in "
            "proxy.engine_api_key_file"
        )
    url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    if parts.fragment or options.keys() - {"p2p"}:
        raise ConfigError(f"{where}: after {url} there may only be ?p2p=HOST:PORT")
    peer = None
    if role == "prefill" and protocol == "p2p":
        if "p2p" not in options:
            raise ConfigError(
                f"{where}: the protocol p2p needs the address where decode engines fetch the KV "
                f"of {url}; write it as {url}?p2p=HOST:PORT"
            )
        peer = split_address(options["p2p"], f"{where}: the option p2p of {url}")
    return ProxiedEngine(role, url, peer)
