"""`faults+...`: a tier that fails on purpose.

    # faults+disk:///kv?faults=get:corrupt:0.01&faults_seed=7
    tier.rules = parse_rules("get:hang:@3"); ...; tier.release()  # at any time; resets the counts

A rule is `operation:kind[:when[:with]]`. `when` is a probability (`0.01`), a number (`@3`), or both
(`0.5@3`). Default: always.

    error     raises; the tier is not called. With error, unavailable, full or denied
    delay     waits first. With a time: 0.5s, 20ms
    hang      waits for cancellation or `release`
    corrupt   get: flips bits of a value. With their number; default 1
    truncate  get, probe: delivers or reports fewer bytes
    swap      get: delivers another seen key's value
    stale     get, probe: misses a stored value; a probe also finds a removed one

`@n` counts calls for `error`, `delay` and `hang`, keys for `swap` and a probe's `stale`, and hits
for all others.
"""

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Self

from kvhold.core.errors import ConfigError, TierDenied, TierError, TierFull, TierUnavailable
from kvhold.core.setting import apply, setting
from kvhold.tiers.base import (
    FolderMet,
    HasFolders,
    Parts,
    Tier,
    TierTraits,
    check_lengths,
    replace,
    size_of,
)
from kvhold.tiers.scans import closing_scan

OPERATIONS = ("probe", "get", "put", "replace", "delete", "scan", "check")
KINDS: dict[str, tuple[str, ...]] = {
    "error": OPERATIONS,
    "delay": OPERATIONS,
    "hang": OPERATIONS,
    "corrupt": ("get",),
    "truncate": ("get", "probe"),
    "swap": ("get",),
    "stale": ("get", "probe"),
}
ERRORS = {each.reason: each for each in (TierError, TierUnavailable, TierFull, TierDenied)}

log = logging.getLogger(__name__)

_NOISE = b"\xa5"
_SEEN_KEYS = 10_000
_WHEN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)?(?:@(\d+))?")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)")


@dataclass(frozen=True)
class Rule:
    """error: a key of ERRORS"""

    operation: str
    kind: str
    probability: float = 1.0
    nth: int | None = None
    error: str = "error"
    delay_s: float = 0.0
    bits: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"there is no kind of fault {self.kind!r}; known are {', '.join(KINDS)}"
            )
        if self.operation not in KINDS[self.kind]:
            raise ConfigError(
                f"{self.kind} is a fault of {' or '.join(KINDS[self.kind])}, not of "
                f"{self.operation!r}"
            )
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"{self.probability} is not a probability; it goes from 0 to 1")
        if self.nth is not None and self.nth < 1:
            raise ConfigError(f"@{self.nth}: the first is @1")
        if self.error not in ERRORS:
            raise ConfigError(f"there is no error {self.error!r}; known are {', '.join(ERRORS)}")
        if self.delay_s < 0 or self.bits < 1:
            raise ConfigError("a delay must be at least 0 s, and a corruption at least 1 bit")

    @property
    def name(self) -> str:
        return f"{self.operation}:{self.kind}"


@dataclass(frozen=True)
class FaultConfig:
    rules: str = setting(
        "",
        "faults as operation:kind[:when[:with]], separated by spaces or commas, such as "
        "get:corrupt:0.01",
    )
    seed: int = setting(0, "seed of the random numbers", minimum=0)


def parse_rules(text: str) -> list[Rule]:
    rules = []
    for part in re.split(r"[\s,]+", text.strip()) if text.strip() else ():
        try:
            rules.append(_parse_rule(part))
        except ConfigError as error:
            raise ConfigError(f"the fault {part!r}: {error}") from None
    return rules


class FaultTier:
    option_names: ClassVar[frozenset[str]] = frozenset({"faults", "faults_seed"})

    def __init__(self, inner: Tier, config: FaultConfig | None = None) -> None:
        config = config or FaultConfig()
        self.traits: TierTraits = inner.traits
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._random = Random(config.seed)
        self._released = asyncio.Event()
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self.rules = parse_rules(config.rules)

    @classmethod
    def from_url(cls, inner: Tier, options: Mapping[str, str], shown: str) -> Self:
        spelled = {"rules": "faults", "seed": "faults_seed"}
        values = {
            {v: k for k, v in spelled.items()}.get(name, name): value
            for name, value in options.items()
        }
        config = apply(
            FaultConfig(), values, source=shown, spell=lambda name: spelled.get(name, name)
        )
        try:
            return cls(inner, config)
        except ConfigError as error:
            raise ConfigError(f"{shown}: {error}") from None

    @property
    def rules(self) -> Sequence[Rule]:
        return self._rules

    @rules.setter
    def rules(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._counts = [0] * len(self._rules)

    def release(self) -> None:
        self._released.set()
        self._released = asyncio.Event()

    def watch_folders(self, met: FolderMet) -> None:
        if isinstance(self._inner, HasFolders):
            self._inner.watch_folders(met)

    async def check(self) -> None:
        await self._before("check")
        await self._inner.check()

    async def probe(self, keys: Sequence[bytes]) -> list[int | TierError | None]:
        await self._before("probe")
        found = await self._inner.probe(keys)
        return [self._probed(key, size) for key, size in zip(keys, found, strict=True)]

    async def get(
        self, keys: Sequence[bytes], into: Sequence[Parts], *, starts: Sequence[int] | None = None
    ) -> list[int | TierError | None]:
        check_lengths(keys, into, starts)
        await self._before("get")
        asked = [self._swapped(key, keys) for key in keys] if self._has("get", "swap") else keys
        got = await self._inner.get(asked, into, starts=starts)
        for key, item in zip(asked, got, strict=True):
            if starts is None and isinstance(item, int):
                self._remember(key, item)
        return [
            self._delivered(key, parts, item)
            for key, parts, item in zip(keys, into, got, strict=True)
        ]

    async def put(
        self, items: Sequence[tuple[bytes, Parts]], *, ttl_s: float | None = None
    ) -> list[TierError | None]:
        await self._before("put")
        faults = await self._inner.put(items, ttl_s=ttl_s)
        for (key, parts), fault in zip(items, faults, strict=True):
            if fault is None:
                self._remember(key, size_of(parts))
        return faults

    async def replace(self, items: Sequence[tuple[bytes, Parts]]) -> list[bool | TierError]:
        await self._before("replace")
        done = await replace(self._inner, items)
        for (key, parts), outcome in zip(items, done, strict=True):
            if outcome is True:
                self._remember(key, size_of(parts))
        return done

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        await self._before("delete")
        return await self._inner.delete(keys)

    async def scan(self, prefix: bytes) -> AsyncIterator[bytes]:
        await self._before("scan")
        async with closing_scan(self._inner, prefix) as keys:
            async for key in keys:
                yield key

    async def close(self) -> None:
        self.release()
        await self._inner.close()

    async def _before(self, operation: str) -> None:
        for rule in self._due(operation, "delay"):
            await asyncio.sleep(rule.delay_s)
        for _ in self._due(operation, "hang"):
            await self._released.wait()
        for rule in self._due(operation, "error"):
            raise ERRORS[rule.error](self.traits.name, operation, "a fault on purpose")

    def _probed(self, key: bytes, size: int | TierError | None) -> int | TierError | None:
        if isinstance(size, TierError):
            return size
        if self._due("probe", "stale"):
            return None if size is not None else self._seen.get(key)
        if size is None:
            return None
        self._remember(key, size)
        return self._random.randrange(size) if size and self._due("probe", "truncate") else size

    def _swapped(self, key: bytes, keys: Sequence[bytes]) -> bytes:
        others = [other for other in keys if other != key and other in self._seen] or [
            other for other in self._seen if other != key
        ]
        return self._random.choice(others) if others and self._due("get", "swap") else key

    def _delivered(
        self, key: bytes, parts: Parts, item: int | TierError | None
    ) -> int | TierError | None:
        if not isinstance(item, int):
            return item
        if self._due("get", "stale"):
            return None
        if item and self._due("get", "truncate"):
            left = self._random.randrange(item)
            _overwrite(parts, left, item)
            item = left
        for rule in self._due("get", "corrupt") if item else ():
            for bit in self._random.sample(range(8 * item), min(rule.bits, 8 * item)):
                _flip(parts, bit)
        return item

    def _has(self, operation: str, kind: str) -> bool:
        return any((rule.operation, rule.kind) == (operation, kind) for rule in self._rules)

    def _due(self, operation: str, kind: str) -> list[Rule]:
        due = []
        for i, rule in enumerate(self._rules):
            if (rule.operation, rule.kind) == (operation, kind):
                self._counts[i] += 1
                if rule.nth in (None, self._counts[i]) and self._random.random() < rule.probability:
                    due.append(rule)
                    self.injected[rule.name] += 1
                    log.debug("%s: fault on purpose: %s", self.traits.name, rule.name)
        return due

    def _remember(self, key: bytes, size: int) -> None:
        self._seen[key] = size
        self._seen.move_to_end(key)
        if len(self._seen) > _SEEN_KEYS:
            self._seen.popitem(last=False)


def _parse_rule(text: str) -> Rule:
    parts = text.split(":")
    if not 2 <= len(parts) <= 4:
        raise ConfigError(
            "write operation:kind[:when[:with]], such as get:corrupt:0.01 or put:delay:@3:0.5s"
        )
    operation, kind, when, what = (*parts, "", "")[:4]
    match = _WHEN.fullmatch(when)
    if match is None:
        raise ConfigError(
            f"{when!r} does not say when; write a probability such as 0.01, a number such "
            "as @3, or 0.5@3"
        )
    rule = Rule(operation, kind, float(match[1] or 1), int(match[2]) if match[2] else None)
    return _with(rule, what)


def _with(rule: Rule, what: str) -> Rule:
    error, delay_s, bits = rule.error, rule.delay_s, rule.bits
    if rule.kind == "error" and what:
        error = what
    elif rule.kind == "delay":
        match = _TIME.fullmatch(what)
        if match is None:
            raise ConfigError(
                f"{what!r} is not a time; write 0.5s or 20ms, after `when`: delay:1:0.5s"
            )
        delay_s = float(match[1]) / (1000 if match[2] == "ms" else 1)
    elif rule.kind == "corrupt" and what:
        if not what.isdecimal():
            raise ConfigError(f"{what!r} is not a number of bits")
        bits = int(what)
    elif what:
        raise ConfigError(f"{rule.kind} takes nothing after `when`, not {what!r}")
    return Rule(rule.operation, rule.kind, rule.probability, rule.nth, error, delay_s, bits)


def _flip(parts: Parts, bit: int) -> None:
    at = bit // 8
    for part in parts:
        if at < part.nbytes:
            part.cast("B")[at] ^= 1 << bit % 8
            return
        at -= part.nbytes


def _overwrite(parts: Parts, start: int, stop: int) -> None:
    for part in parts:
        first, last = min(max(start, 0), part.nbytes), min(max(stop, 0), part.nbytes)
        part.cast("B")[first:last] = _NOISE * (last - first)
        start, stop = start - part.nbytes, stop - part.nbytes
