"""The chunks of other nodes (docs/peers.md).

Each peer is followed, so a probe sends nothing. A peer's chunks are found only if it has made this
host's clears (`clear_numbers.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from socket import gethostname
from typing import ClassVar, NamedTuple, Self

from kvhold.core.config import ServePeersConfig
from kvhold.core.errors import ConfigError, TierCannotList, TierDenied, TierError, TierUnavailable
from kvhold.core.keys import NAMESPACE_BYTES, Query
from kvhold.core.metrics import Metrics
from kvhold.core.reasons import PEER_EVICTED, PEER_GONE
from kvhold.core.secrets import read_secret
from kvhold.core.setting import setting
from kvhold.core.status import FollowedPeersStatus
from kvhold.core.turns import next_turn
from kvhold.net import login
from kvhold.net.addresses import is_loopback
from kvhold.net.peers import DEFAULT_PORT, Introduce, PeerLoad
from kvhold.net.stream import Address, open_stream
from kvhold.net.tls import client_context
from kvhold.tiers.base import Origin, Parts, TierTraits, check_lengths
from kvhold.tiers.calls import now
from kvhold.tiers.exchanges import Getting, gettings
from kvhold.tiers.peers.bus import Bus, BusConfig, Inboxes, end_task
from kvhold.tiers.peers.channel import NOT_WITH_TLS, ChannelPlan
from kvhold.tiers.peers.clear_numbers import ClearNumbers
from kvhold.tiers.peers.directory import MOST_NAME, Directory, DirectoryConfig, Own
from kvhold.tiers.peers.faults import TIER
from kvhold.tiers.peers.follower import Follower
from kvhold.tiers.peers.index import MOST_PEERS, PeerIndex, digest_of, numbers_of
from kvhold.tiers.peers.keepers import keeper_of
from kvhold.tiers.peers.loading import PeerLoading
from kvhold.tiers.peers.peer import Connect, Peer
from kvhold.tiers.peers.roster import TOO_MANY, Roster
from kvhold.tiers.peers.speed import PeerQueues
from kvhold.tiers.spare_chunks import KEPT_ELSEWHERE, KEPT_HERE, ONLY_HERE
from kvhold.tiers.url import TierUrl

_THREADS = 4
_KEYS_A_TURN = 300  # about a millisecond
_OTHERS_S = 1.0


@dataclass(frozen=True)
class PeersConfig(BusConfig):
    token: str = setting(
        "", "the peers' token; better in the URL's password, or in a file", secret=True
    )
    token_file: str = setting("", "a file with the token")
    tls: bool = setting(False, "use TLS")
    insecure: bool = setting(
        False,
        "send the token to other hosts without TLS; anyone who listens on the network can read it",
    )
    ca_file: str = setting(
        "",
        "PEM file of the certificate authorities to trust for the peers; empty: the system's",
    )
    cert_file: str = setting(
        "", "PEM file of this node's certificate, if the peers require one (mTLS)"
    )
    key_file: str = setting("", "PEM file of the certificate's key; empty: it is in cert_file")
    connections: int = setting(4, "connections to one peer that carry chunks", minimum=1)
    answer_timeout_s: float = setting(
        2.0, "deadline of one peer's part of a get; then it is left alone", minimum=0.001
    )
    pause_s: float = setting(
        1.0,
        "how long a peer that failed is left alone; grows with each failure, up to 30 s",
        minimum=0.001,
    )
    forget_s: float = setting(
        60.0, "the chunks of a lost peer leave the index after this time", minimum=0
    )
    most_chunks: int = setting(
        4_000_000, "most chunks in the index, at up to 48 bytes each; more are not found", minimum=1
    )


class _Share(NamedTuple):
    peer: Peer
    items: list[Getting]


class PeersTier:
    traits: ClassVar[TierTraits] = TierTraits(
        name=TIER,
        shared=True,
        read_only=True,
        lost=PEER_EVICTED,
        lists=False,
        batch_bytes=16 << 20,
    )

    def __init__(
        self,
        addresses: Sequence[Address],
        config: PeersConfig,
        *,
        directory: Directory | None = None,
        timing: DirectoryConfig | None = None,
        connect: Connect = open_stream,
    ) -> None:
        """addresses: of the peers; with a directory: to whose hosts a token may be sent

        Raises ConfigError.
        """
        if not config.tls and (config.ca_file or config.cert_file or config.key_file):
            raise ConfigError("peers: ca_file, cert_file and key_file are for TLS; add tls=true")
        token = (
            read_secret(config.token_file, where="peers: token_file")
            if config.token_file
            else config.token
        )
        if len(token.encode()) > login.MAX_TOKEN_BYTES:
            raise ConfigError(f"peers: token: at most {login.MAX_TOKEN_BYTES} bytes are allowed")
        for address in addresses:
            if token and not config.tls and not config.insecure and not is_loopback(address.host):
                raise ConfigError(
                    f"peers: {address}: the token would cross the network in clear text; add "
                    "tls=true, or insecure=true if the network is trusted"
                )
        tls = (
            client_context(config.ca_file, config.cert_file, config.key_file)
            if config.tls
            else None
        )
        self._config = config
        self._is_closed = False
        self.clear_numbers = ClearNumbers()
        self._learned: Callable[[bytes], None] = lambda prefix: None
        self.own_number: Callable[[], Awaitable[int]] | None = None
        """Of the latest change here; None: no peers are served."""
        self._index = PeerIndex()
        self.metrics = Metrics()
        self._bus = self.make_bus()
        self._inboxes = None if self._bus is None else Inboxes(self.metrics)
        self._reading: asyncio.Task[None] | None = None
        self._plan = ChannelPlan()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvhold-receive")
        self._roster = Roster(
            self._index,
            make_peer=lambda number, address: Peer(
                number,
                address,
                token=token,
                tls=tls,
                connections=config.connections,
                pause_s=config.pause_s,
                connect=connect,
                introduction=self._introduction,
                metrics=self.metrics,
                plan=self._plan,
                threads=self._threads,
            ),
            make_follower=self._follower,
            forget_s=config.forget_s,
            addresses=() if directory is not None else addresses,
            directory=directory,
            timing=timing,
        )

    @classmethod
    def from_url(cls, url: TierUrl) -> Self:
        if url.path not in ("", "/") or not url.hosts:
            raise ConfigError(
                f"tiers: {url.shown}: write peers://host-a:{DEFAULT_PORT},host-b:{DEFAULT_PORT}"
            )
        addresses = [Address(host, port or DEFAULT_PORT) for host, port in url.hosts]
        if not 0 < len(addresses) <= MOST_PEERS or len(set(addresses)) < len(addresses):
            raise ConfigError(
                f"peers: {len(addresses)} peers are named; write 1 to {MOST_PEERS} different ones, "
                f"such as peers://host-a:{DEFAULT_PORT},host-b:{DEFAULT_PORT}; {TOO_MANY}"
            )
        return cls(addresses, url.apply(PeersConfig(token=cls.token_of(url))))

    @staticmethod
    def token_of(url: TierUrl) -> str:
        """Raises ConfigError if the URL has a user, too."""
        if url.username:
            raise ConfigError(
                f"tiers: {url.shown}: there are no users, only a token; write "
                f"{url.scheme}://:TOKEN@host, with a colon before the token"
            )
        return url.password

    @property
    def peers(self) -> list[Peer]:
        return self._roster.peers

    async def listed(self) -> list[Peer]:
        if self._roster.has_directory:
            self._start()
            await self._roster.wait_for_list()
        return self.peers

    @property
    def index_bytes(self) -> int:
        return self._index.nbytes

    @property
    def num_chunks(self) -> int:
        return len(self._index)

    def peers_status(self) -> FollowedPeersStatus:
        status = self._roster.status()
        if self._bus is not None and self._inboxes is not None:
            status |= {
                "bus": self._bus.source,
                "bus_fault": self._bus.fault,
                "bus_ignored": self._inboxes.num_ignored,
            }
        return status

    def make_bus(self) -> Bus | None:
        if not self._config.bus:
            return None
        try:
            module = import_module("kvhold.tiers.peers.nats_bus")
        except ImportError as error:
            raise ConfigError(f"peers: bus: {error}: pip install 'kvhold[nats]'") from error
        bus: Bus = module.NatsBus(self._config)
        return bus

    def use_channel(self, plan: ChannelPlan) -> None:
        if self._config.tls and plan.memory is not None and plan.is_measured:
            plan = ChannelPlan(reason=NOT_WITH_TLS)
        self._plan = plan
        for peer in self.peers:
            peer.channel.use(plan)

    def check_serving(self, config: ServePeersConfig) -> None:
        """Raises ConfigError if the node of this tier could not be registered."""

    def serve_as(self, own: Own) -> None:
        """The node of this tier, if it serves peers. Any thread."""
        self._roster.serve_as(own)
        if self._inboxes is not None:
            self._inboxes.own_incarnation = own.incarnation

    def copies_of(self, key: bytes, root: bytes) -> int:
        """See `SpareChunks`. Any thread."""
        mask = self._index.peers_of(digest_of(key))
        holders = [
            peer.incarnation
            for peer in (self._roster.by_number(number) for number in numbers_of(mask))
            if peer is not None
            and peer.is_listed
            and peer.is_followed
            and self.clear_numbers.allow(key[:NAMESPACE_BYTES], peer.clears)
        ]
        if not holders:
            return ONLY_HERE
        own = self._roster.own.incarnation
        keeps = own and keeper_of(digest_of(root), (own, *holders)) == own
        return KEPT_HERE if keeps else KEPT_ELSEWHERE

    def address_to_load(self, name: str) -> str:
        """name: address, host or name of a peer. Any thread. Raises ConfigError."""
        others = [peer for peer in self.peers if not peer.is_self and not peer.is_elsewhere]
        found = [
            peer
            for peer in others
            if name and name in (str(peer.address), peer.address.host, peer.name)
        ]
        if len(found) != 1:
            known = [str(peer.address) for peer in others]
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"host:{name[:MOST_NAME]}: {len(found) or 'no'} peers have this name; peers: "
                f"{', '.join(known) or 'none'}{f'; did you mean {near[0]}?' if near else ''}"
            )
        [peer] = found
        if self.own_number is None:
            raise ConfigError(f"host:{name}: peers cannot load from here: set peers.listen")
        if (fault := peer.why_not_asked()) is not None:
            raise ConfigError(f"host:{name}: {fault}")
        return str(peer.address)

    async def load_at(self, address: str, query: Query) -> PeerLoading:
        """Raises TierError."""
        peer = next((one for one in self.peers if str(one.address) == address), None)
        if peer is None or self.own_number is None:
            raise TierUnavailable(TIER, "load", f"{address} is no peer now")
        request = PeerLoad(query, self._roster.own.incarnation, await self.own_number())
        return await PeerLoading.begin(peer, request)

    def knows_changes(self, incarnation: int, number: int) -> bool | None:
        """None: not followed. Any thread."""
        found = [peer for peer in self.peers if peer.incarnation == incarnation]
        if not any(peer.is_followed for peer in found):
            return None
        return any(peer.after >= number for peer in found)

    @property
    def numbers(self) -> dict[bytes, int]:
        return self.clear_numbers.numbers

    def keep_clears(
        self, learned: Callable[[bytes], None], numbers: Mapping[bytes, int] | None
    ) -> None:
        self._learned = learned
        self.clear_numbers.resume(numbers or {})

    def advance(self, prefix: bytes, asked_s: float | None = None) -> None:
        self.clear_numbers.advance(prefix, asked_s)

    def announce(self, prefix: bytes) -> None:
        self.clear_numbers.announce(prefix)

    async def check(self) -> None:
        """Pass once one peer is followed. The others may take `_OTHERS_S` more."""
        self._start()
        await self._roster.wait_for_list()
        trying = {asyncio.ensure_future(peer.tried.wait()) for peer in self.peers}
        try:
            while trying and not any(peer.is_followed for peer in self.peers):
                _, trying = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            if trying:
                _, trying = await asyncio.wait(trying, timeout=_OTHERS_S)
        finally:
            for waiting in trying:
                waiting.cancel()
        others = [peer for peer in self.peers if not peer.is_self]
        if not self.peers and self._roster.list_fault:
            raise TierUnavailable(TIER, "check", self._roster.list_fault)
        if others and not any(peer.is_followed for peer in others):
            faults = [peer.last_fault for peer in others if peer.last_fault is not None]
            why = "; ".join(str(fault) for fault in faults) or "no peer answers"
            all_denied = faults and all(isinstance(fault, TierDenied) for fault in faults)
            fault = (TierDenied if all_denied else TierUnavailable)(TIER, "check", why)
            misses = {one.miss for one in faults}
            fault.miss = misses.pop() if len(misses) == 1 else PEER_GONE
            raise fault

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        self._start()
        masks: dict[bytes, tuple[int, dict[int, TierError]]] = {}
        sizes: list[int | TierError | None] = []
        for number, key in enumerate(keys, 1):
            if number % _KEYS_A_TURN == 0:
                await next_turn()
            space = key[:NAMESPACE_BYTES]
            if space not in masks:
                masks[space] = self._allowed(space), self._faults(space)
            allowed, faults = masks[space]
            found = self._index.find(digest_of(key)) if allowed or faults else None
            if found is None:
                sizes.append(None)
            elif found.peers & allowed:
                sizes.append(found.nbytes)
            else:
                sizes.append(
                    next((fault for mask, fault in faults.items() if found.peers & mask), None)
                )
        return sizes

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        origins: list[Origin | None] = [None] * len(keys)
        return await self.get_from(keys, into, starts=starts, origins=origins)

    async def get_from(
        self,
        keys: Sequence[bytes],
        into: Sequence[Parts],
        *,
        starts: Sequence[int] | None,
        origins: list[Origin | None],
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        self._start()
        items = gettings(keys, into, starts)
        shares = self._shares(items)
        faults: dict[int, TierError] = {}
        arrived: dict[int, Origin] = {}
        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(self._fetch(share.peer, share.items, faults, arrived))
        origins[:] = [arrived.get(id(item)) for item in items]
        return [item.size if item.size is not None else faults.get(id(item)) for item in items]

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        return [TierError(TIER, "put", "nothing is written to peers") for _ in items]

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget chunks, such as damaged ones, until a peer adds them again."""
        for peer in self.peers:
            peer.channel.found_damaged(keys)
        for key in keys:
            for number in self._roster.numbers:
                self._index.remove(digest_of(key), peer=number)
        return [False] * len(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        keys: tuple[bytes, ...] = ()
        for key in keys:
            yield key
        raise TierCannotList(TIER, "scan", "the index has digests of keys, not keys")

    async def close(self) -> None:
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()
        await self._roster.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._reading is not None:
            await end_task(self._reading)

    def _introduction(self) -> Introduce:
        return Introduce(gethostname(), self._roster.own.port)

    def _start(self) -> None:
        self._roster.start()
        if self._bus is None or self._inboxes is None:
            return
        if self._reading is None and not self._is_closed:
            self._reading = asyncio.ensure_future(self._bus.read(self._inboxes))

    def _follower(self, peer: Peer) -> Follower:
        return Follower(
            peer,
            self._index,
            self.clear_numbers,
            most_chunks=self._config.most_chunks,
            forget_s=self._config.forget_s,
            own_incarnation=lambda: self._roster.own.incarnation,
            is_followed_elsewhere=partial(self._roster.is_followed_elsewhere, peer),
            learned=self._learned,
            inboxes=self._inboxes,
        )

    def _allowed(self, space: bytes) -> int:
        return sum(
            peer.mask
            for peer in self.peers
            if peer.may_be_asked() and self.clear_numbers.allow(space, peer.clears)
        )

    def _faults(self, space: bytes) -> dict[int, TierError]:
        return {
            peer.mask: fault
            for peer in self.peers
            if self.clear_numbers.allow(space, peer.clears)
            and (fault := peer.why_not_asked()) is not None
        }

    def _shares(self, items: Sequence[Getting]) -> list["_Share"]:
        shares: dict[int, _Share] = {}
        allowed: dict[bytes, int] = {}
        peers = {peer.number: peer for peer in self.peers}
        now_s = now()
        queues = PeerQueues(
            {number: peer.speed.seconds_per_byte(now_s) for number, peer in peers.items()},
            {number: peer.asked_bytes for number, peer in peers.items()},
        )
        for item in items:
            space = item.key[:NAMESPACE_BYTES]
            if space not in allowed:
                allowed[space] = self._allowed(space)
            found = self._index.find(digest_of(item.key))
            mask = 0 if found is None else found.peers & allowed[space]
            if mask:
                having = (number for number, peer in peers.items() if peer.mask & mask)
                number = queues.put(item.nbytes, having)
                shares.setdefault(number, _Share(peers[number], [])).items.append(item)
        return list(shares.values())

    async def _fetch(
        self,
        peer: Peer,
        items: list[Getting],
        faults: dict[int, TierError],
        arrived: dict[int, Origin],
    ) -> None:
        began_s = now()
        fault = await peer.fetch(items, deadline_s=self._config.answer_timeout_s)
        origin = Origin(str(peer.address), began_s, now())
        for item in items:
            if item.size is not None:
                arrived[id(item)] = origin
                continue
            if fault is not None:
                faults[id(item)] = fault
            elif item.start is None and self._roster.by_number(peer.number) is peer:
                self._index.remove(digest_of(item.key), peer=peer.number)
        peer.record.indexed(self._index.count(peer.number))
