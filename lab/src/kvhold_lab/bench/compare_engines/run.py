import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kvhold_lab.bench.compare_engines.child import ChildOptions
from kvhold_lab.bench.compare_engines.rows import (
    CACHED_DISK,
    DISK,
    DISKS,
    IMPORT,
    IMPORT_CLIENT,
    LOOKUP,
    LOWER_TIERS,
    MEMORY,
    NO_TIER,
    REDIS,
    RETRIEVE,
    START,
    STORE,
    WRITTEN,
    Measured,
)
from kvhold_lab.bench.compare_engines.systems import (
    KVHOLD,
    KVHOLD_CACHED,
    MODES,
    PeerFailed,
    PeerSystem,
    import_command,
    new_folder,
    start,
)
from kvhold_lab.bench.compare_engines.tier_limits import DiskLimits, Limits, Moved, RedisLimit
from kvhold_lab.servers.base import NotInstalled
from kvhold_lab.servers.redis import RedisServer

TIERS = ("ram", *LOWER_TIERS)
_CACHED_PROMPTS = 3
_SHAPE = ("num_tokens", "tokens_per_chunk", "tokens_per_block", "layers", "heads", "head_dim")
_VOCABULARY = 128_000
_ALONE_ROUNDS = 3

Launch = Callable[[str], PeerSystem]


@dataclass(frozen=True)
class Work:
    num_tokens: int = 4096
    lookup_tokens: int = 128_000
    tokens_per_chunk: int = 256
    tokens_per_block: int = 16
    layers: int = 8
    heads: int = 8
    head_dim: int = 128
    rounds: int = 5
    threads: int = 2

    def options(self, tier: str) -> ChildOptions:
        shape = {name: getattr(self, name) for name in _SHAPE}
        kind, page_cache = (DISK, tier == CACHED_DISK) if tier in DISKS else (tier, False)
        options = ChildOptions(
            mode="", tier=kind, cache_bytes=0, folder="", page_cache=page_cache, **shape
        )
        return replace(options, cache_bytes=_CACHED_PROMPTS * options.prompt_bytes)


def measure(
    work: Work,
    systems: Sequence[str],
    tiers: Sequence[str],
    launch: Launch,
    *,
    folder: Path | None,
    say: Callable[[str], None],
) -> Measured:
    measured = Measured()
    chance = random.Random(0)
    for tier in tiers:
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="kvhold-compare-", dir=folder) as own,
            ExitStack() as stack,
        ):
            try:
                redis = stack.enter_context(RedisServer()) if tier == REDIS else None
            except NotInstalled as error:
                measured.errors |= {(tier, name): str(error) for name in systems}
                continue
            options = replace(work.options(tier), redis_port=redis.port if redis else 0)
            there = [name for name in systems if tier in DISKS or name != KVHOLD_CACHED]
            limits = _limits(options, Path(own), threads=work.threads)
            peers = stack.enter_context(
                _started(there, options, launch, Path(own), measured, tier=tier)
            )
            for number in range(1 + work.rounds):
                tokens = _tokens(number, work.num_tokens)
                moved = limits.measure() if limits else {}
                _round(
                    peers,
                    tier,
                    tokens,
                    number,
                    measured,
                    chance,
                    moved,
                    count=number > 0,
                    nbytes=options.prompt_bytes,
                )
                if redis:
                    redis.call("FLUSHALL")
        say(f"{tier}: {time.monotonic() - began:.0f} s")
    if "ram" not in tiers:
        return measured
    if work.lookup_tokens:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvhold-compare-", dir=folder) as own:
            _lookups(work, systems, launch, Path(own), measured, chance)
        say(f"lookup: {time.monotonic() - began:.0f} s")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvhold-compare-", dir=folder) as own:
        _alone(work, systems, launch, Path(own), measured)
    say(f"start-up and memory: {time.monotonic() - began:.0f} s")
    return measured


def measure_imports(
    measured: Measured, work: Work, systems: Sequence[str], python: Path | None
) -> None:
    for operation, client in ((IMPORT, False), (IMPORT_CLIENT, True)):
        for number in range(1 + _alone_rounds(work)):
            values = {}
            for name in systems:
                began = time.perf_counter()
                done = subprocess.run(
                    import_command(name, client=client, python=python),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                values[name] = time.perf_counter() - began
                if done.returncode:
                    measured.errors[NO_TIER, name] = done.stderr
                    del values[name]
            if number:
                measured.add(operation, NO_TIER, values)


def _limits(options: ChildOptions, folder: Path, *, threads: int) -> Limits | None:
    if options.tier == DISK:
        return DiskLimits(
            options.prompt_bytes,
            options.chunk_bytes,
            folder,
            threads=threads,
            page_cache=options.page_cache,
        )
    return (
        RedisLimit(options.prompt_bytes, options.chunk_bytes, options.redis_port)
        if options.tier == REDIS
        else None
    )


def _round(
    peers: dict[str, PeerSystem],
    tier: str,
    tokens: list[int],
    seed: int,
    measured: Measured,
    chance: random.Random,
    moved: Mapping[str, Moved],
    *,
    count: bool,
    nbytes: int,
) -> None:
    stored: dict[str, float] = {}
    written: dict[str, float] = {}
    retrieved: dict[str, float] = {}
    checksums: dict[str, str] = {}
    wrong: set[str] = set()
    for name in chance.sample(list(peers), len(peers)):
        try:
            put = peers[name].do("store", tokens=tokens, seed=seed)
            if tier in LOWER_TIERS:
                peers[name].do("forget")
            got = peers[name].do("retrieve", tokens=tokens)
            if tier not in LOWER_TIERS:
                peers[name].do("forget")
        except PeerFailed as error:
            _drop(peers, name, tier, str(error), measured)
            continue
        checksums[name] = put.checksum
        if got.checksum != put.checksum or got.num_tokens != len(tokens):
            wrong.add(name)
        stored[name], written[name], retrieved[name] = put.seconds, put.written_s, got.seconds
    if not checksums:
        return
    reference = checksums.get(KVHOLD, next(iter(checksums.values())))
    for name, found in checksums.items():
        measured.compare(RETRIEVE, tier, name, name not in wrong and found == reference)
    if count:
        written |= {
            name: limit.write_s for name, limit in moved.items() if limit.write_s is not None
        }
        retrieved |= {name: limit.read_s for name, limit in moved.items()}
        measured.add(STORE, tier, stored, nbytes)
        if tier in LOWER_TIERS:
            measured.add(WRITTEN, tier, written, nbytes)
        measured.add(RETRIEVE, tier, retrieved, nbytes)


def _lookups(
    work: Work,
    systems: Sequence[str],
    launch: Launch,
    folder: Path,
    measured: Measured,
    chance: random.Random,
) -> None:
    long = replace(work, num_tokens=work.lookup_tokens, layers=1, heads=1, head_dim=8)
    tokens = _tokens(0, work.lookup_tokens)
    there = [
        name for name in systems if name != KVHOLD_CACHED and ("ram", name) not in measured.errors
    ]
    with _started(there, long.options("ram"), launch, folder, measured, tier="ram") as peers:
        for name in list(peers):
            try:
                peers[name].do("store", tokens=tokens, seed=0)
            except PeerFailed as error:
                _drop(peers, name, "ram", str(error), measured)
        for number in range(1 + 2 * work.rounds):
            values = {}
            for name in chance.sample(list(peers), len(peers)):
                try:
                    found = peers[name].do("lookup", tokens=tokens)
                except PeerFailed as error:
                    _drop(peers, name, "ram", str(error), measured)
                    continue
                measured.compare(LOOKUP, "ram", name, found.num_tokens == len(tokens))
                values[name] = found.seconds
            if number:
                measured.add(LOOKUP, "ram", values)


def _alone(
    work: Work, systems: Sequence[str], launch: Launch, folder: Path, measured: Measured
) -> None:
    """Two systems' memory would count half."""
    options = work.options("ram")
    for _ in range(_alone_rounds(work)):
        started_s: dict[str, float] = {}
        memory: dict[str, float] = {}
        for name in systems:
            if (
                name == KVHOLD_CACHED
                or ("ram", name) in measured.errors
                or (NO_TIER, name) in measured.errors
            ):
                continue
            peer = launch(name)
            try:
                seconds = start(peer, replace(options, mode=MODES[name], folder=new_folder(folder)))
                tokens = _tokens(0, work.num_tokens)
                peer.do("store", tokens=tokens, seed=0)
                peer.do("retrieve", tokens=tokens)
                memory[name] = float(peer.do("memory").nbytes)
                started_s[name] = seconds
                peer.do("stop")
            except PeerFailed as error:
                measured.errors[NO_TIER, name] = str(error)
            finally:
                peer.close()
        measured.add(START, NO_TIER, started_s)
        measured.add(MEMORY, NO_TIER, memory)


@contextmanager
def _started(
    systems: Sequence[str],
    options: ChildOptions,
    launch: Launch,
    folder: Path,
    measured: Measured,
    *,
    tier: str,
) -> Iterator[dict[str, PeerSystem]]:
    peers: dict[str, PeerSystem] = {}
    try:
        for name in systems:
            peers[name] = launch(name)
            try:
                start(peers[name], replace(options, mode=MODES[name], folder=new_folder(folder)))
            except PeerFailed as error:
                _drop(peers, name, tier, str(error), measured)
        yield peers
        for name in list(peers):
            try:
                peers[name].do("stop")
            except PeerFailed as error:
                measured.errors[tier, name] = str(error)
    finally:
        for peer in peers.values():
            peer.close()


def _drop(peers: dict[str, PeerSystem], name: str, tier: str, why: str, measured: Measured) -> None:
    measured.errors[tier, name] = why
    peers.pop(name).close()


def _tokens(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(_VOCABULARY), k=length)


def _alone_rounds(work: Work) -> int:
    return min(work.rounds, _ALONE_ROUNDS)
