"""Known namespaces, running re-encodings and their owners. No I/O."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import itemgetter

from kvhold.cache.chores import Turns
from kvhold.cache.index.presence import Presence
from kvhold.cache.transfer.commands import Command, ReencodeCommand, Space, StopCommand
from kvhold.cache.transfer.named_tiers import find_tier
from kvhold.codecs import check_codec
from kvhold.codecs.registry import LOSES_NOTHING
from kvhold.core.api import ReencodeProgress
from kvhold.core.errors import ConfigError, ProtocolError
from kvhold.core.keys import NAMESPACE_BYTES, Query
from kvhold.core.layout import Layout
from kvhold.core.store_options import StoreOptions

_MOST_SPACES = 1 << 16
_MOST_REENCODINGS = 64
_SPACES_A_STEP = 250
_MOST_TENANTS = 1000


@dataclass(frozen=True)
class ReencodableTier:
    """refusal:     why its chunks cannot be re-encoded
    lossy_below: a lower tier with lossy frames
    """

    number: int
    encrypted: bool = False
    refusal: str | None = None
    lossy_below: str | None = None


@dataclass(frozen=True)
class ReencodeRequest:
    tier: str
    codec: str
    namespace: bytes | None = None
    query: Query | None = None


@dataclass
class _Running:
    owner: Hashable
    progress: ReencodeProgress


class Reencodings:
    def __init__(self, give_command: Callable[[Command], None]) -> None:
        self.tiers: dict[str, ReencodableTier] = {}
        self._give_command = give_command
        # latest last; with the strictest budget so far
        self._known: OrderedDict[bytes, Space] = OrderedDict()
        self._shared: set[bytes] = set()
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return sum(not running.progress.done for running in self._running.values())

    def learn(self, namespace: bytes, layout: Layout, store_options: StoreOptions) -> None:
        known = self._known.get(namespace)
        if known is None:
            self._known[namespace] = Space(layout, replace(store_options, ttl_s=None))
        elif known.store_options != store_options:
            before = known.store_options
            self._known[namespace] = Space(layout, _within(before, store_options))
            if store_options.tenant != before.tenant:
                self._shared.add(namespace)
        self._known.move_to_end(namespace)
        if len(self._known) > _MOST_SPACES:
            oldest, _ = self._known.popitem(last=False)
            self._shared.discard(oldest)

    def within_budget(self, namespace: bytes, store_options: StoreOptions) -> StoreOptions:
        known = self._known.get(namespace)
        return store_options if known is None else _within(store_options, known.store_options)

    def tenant_of(self, namespace: bytes) -> str | None:
        """None: unknown, or several."""
        known = self._known.get(namespace)
        return None if known is None or namespace in self._shared else known.store_options.tenant

    def owned_turns(self, tenant: str) -> Turns[list[bytes]]:
        owned = []
        for number, (namespace, space) in enumerate(list(self._known.items()), 1):
            if space.store_options.tenant == tenant and namespace not in self._shared:
                owned.append(namespace)
            if number % _SPACES_A_STEP == 0:
                yield _SPACES_A_STEP
        return owned

    def tenants_turns(self, used: Sequence[tuple[bytes, int]]) -> Turns[dict[str, int]]:
        totals: dict[str, int] = {}
        for number, (namespace, nbytes) in enumerate(used, 1):
            tenant = self.tenant_of(namespace) or ""
            totals[tenant] = totals.get(tenant, 0) + nbytes
            if number % _SPACES_A_STEP == 0:
                yield _SPACES_A_STEP
        return dict(nlargest(_MOST_TENANTS, totals.items(), key=itemgetter(1)))

    def layout_of(self, namespace: bytes) -> Layout | None:
        """Any thread."""
        known = self._known.get(namespace)
        return None if known is None else known.layout

    def known_layout(self, namespace: bytes) -> Layout:
        """Raises ConfigError."""
        layout = self.layout_of(namespace)
        if layout is None:
            raise ConfigError(
                f"namespace {namespace.hex()} is not known here: its engine has not connected "
                "since the start"
            )
        return layout

    def begin(
        self,
        number: int,
        owner: Hashable,
        request: ReencodeRequest,
        layouts: Mapping[bytes, Layout],
    ) -> None:
        """Raises ConfigError."""
        tier = find_tier(self.tiers, request.tier)
        check_codec(request.codec)
        if tier.lossy_below is not None and request.codec not in LOSES_NOTHING:
            raise ConfigError(
                f"tier {request.tier}: some of its chunks may come from tier {tier.lossy_below}, "
                f"whose codec may be lossy; codec {request.codec!r} could lose precision a second "
                f"time, so only {' and '.join(LOSES_NOTHING)} are allowed here"
            )
        if len(self._running) >= _MOST_REENCODINGS:
            raise ConfigError(
                f"{_MOST_REENCODINGS} re-encodings are running or not closed; close one first"
            )
        keys = None
        if request.query is not None:
            keys = Presence(request.query, layouts[request.query.layout], _nothing).missing()
        command = ReencodeCommand(
            number,
            tier.number,
            request.codec,
            self._spaces(request, tier, layouts),
            dict(layouts),
            keys,
        )
        if request.codec not in LOSES_NOTHING:
            self.tiers = {
                name: replace(one, lossy_below=one.lossy_below or request.tier)
                if one.number < tier.number
                else one
                for name, one in self.tiers.items()
            }
        self._running[number] = _Running(owner, ReencodeProgress())
        self._give_command(command)

    def find(self, owner: Hashable, number: int) -> ReencodeProgress | None:
        running = self._running.get(number)
        return running.progress if running is not None and running.owner == owner else None

    def progressed(self, number: int, progress: ReencodeProgress) -> None:
        if number in self._running:
            self._running[number].progress = progress

    def drop(self, number: int) -> None:
        if not self._running.pop(number).progress.done:
            self._give_command(StopCommand(number))

    def drop_all(self, owner: Hashable) -> None:
        for number in [
            number for number, running in self._running.items() if running.owner == owner
        ]:
            self.drop(number)

    def _spaces(
        self, request: ReencodeRequest, tier: ReencodableTier, layouts: Mapping[bytes, Layout]
    ) -> dict[bytes, Space]:
        digest = request.namespace if request.query is None else request.query.namespace
        if digest is None:
            return {
                digest: space
                for digest, space in self._known.items()
                if not (tier.encrypted and digest in self._shared)
            }
        if len(digest) != NAMESPACE_BYTES:
            raise ProtocolError(
                f"the namespace has {len(digest)} bytes; a digest has {NAMESPACE_BYTES}"
            )
        if request.query is not None and request.namespace not in (None, digest):
            raise ProtocolError("the namespace to re-encode differs from the query's namespace")
        tenant = request.query.tenant if request.query is not None else None
        known = self._known.get(digest)
        if known is None and request.codec not in LOSES_NOTHING:
            raise ConfigError(
                f"namespace {digest.hex()} is not known here, so neither is its error budget: only "
                f"{' and '.join(LOSES_NOTHING)} are allowed until an engine that uses it has "
                "connected"
            )
        if tenant is None and tier.encrypted and (known is None or digest in self._shared):
            raise ConfigError(
                f"tier {request.tier} is encrypted, and the tenant whose key encrypts namespace "
                f"{digest.hex()} is not known here"
            )
        if known is None:
            layout = layouts[request.query.layout] if request.query is not None else None
            return {digest: Space(layout, StoreOptions(tenant=tenant or ""))}
        return {
            digest: known
            if tenant is None
            else replace(known, store_options=replace(known.store_options, tenant=tenant))
        }


def _within(store_options: StoreOptions, budget: StoreOptions) -> StoreOptions:
    error, bits = (
        _strictest(store_options.max_error, budget.max_error),
        _strictest(store_options.max_bits, budget.max_bits),
    )
    if (error, bits) == (store_options.max_error, store_options.max_bits):
        return store_options
    return replace(store_options, max_error=error, max_bits=bits)


def _strictest(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)


def _nothing(_: bytes) -> None:
    return None
