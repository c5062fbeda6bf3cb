"""From two statuses of a node. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvhold.core.sizes import format_size
from kvhold.core.status import MEMORY, ActivityStatus, CacheTierStatus, NodeStatus

_OPERATIONS = ("probe", "get", "put")
_OWN_CLIENTS = ("kvhold top", "kvhold control")
_BAR = 20


@dataclass(frozen=True)
class TierFigures:
    """ms: mean of a call, by operation; None: no call"""

    name: str
    state: str
    used_bytes: int | None
    size_bytes: int | None
    hit_tokens_s: float
    read_bytes_s: float
    written_bytes_s: float
    waiting_chunks: float = 0
    pending_clears: int = 0
    ms: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ActivityFigures:
    """name: a namespace's digest, or a tenant"""

    name: str
    tenant: str
    title: str
    lookups_s: float
    lookup_tokens_s: float
    hit_rate: float | None
    used_bytes: int | None = None


@dataclass(frozen=True)
class ClientFigures:
    name: str
    pid: int
    silent_s: float


@dataclass(frozen=True)
class TopFigures:
    """Rates are of `seconds`.

    hit_rate: None: nothing was looked up
    """

    at_s: float
    seconds: float
    version: str
    pid: int
    socket: str
    uptime_s: float
    hit_rate: float | None
    lookup_tokens_s: float
    hit_tokens_s: float
    lookups: Mapping[str, float]
    missed: Mapping[str, float]
    loaded_bytes_s: float
    stored_bytes_s: float
    stored_chunks_s: float
    chunks: int
    pinned_chunks: int
    tiers: Sequence[TierFigures]
    namespaces: Sequence[ActivityFigures]
    tenants: Sequence[ActivityFigures]
    clients: Sequence[ClientFigures]


def figures(
    before: NodeStatus, now: NodeStatus, titles: Mapping[str, str], at_s: float
) -> TopFigures:
    """before: of the same run of the node, or of its start"""
    seconds = max(1e-9, now["uptime_s"] - before["uptime_s"])
    counters = _Rates(_counters(before), _counters(now), seconds)
    looked_up = counters.of("kvhold_lookup_tokens")
    found = sum(counters.by("kvhold_hit_tokens", "source").values())
    return TopFigures(
        at_s,
        seconds,
        now["version"],
        now["pid"],
        now["socket"],
        now["uptime_s"],
        found / looked_up if looked_up else None,
        looked_up,
        found,
        counters.by("kvhold_lookup_requests", "result"),
        counters.by("kvhold_missed_tokens", "reason"),
        counters.of("kvhold_leased_bytes"),
        counters.of("kvhold_stored_bytes"),
        counters.of("kvhold_stored_chunks"),
        now["chunks"],
        now["pinned_chunks"],
        [_memory(now, counters), *(_tier(tier, counters) for tier in now.get("tiers", []))],
        _activities(before["busiest_namespaces"], now["busiest_namespaces"], seconds, titles, now),
        _activities(before["busiest_tenants"], now["busiest_tenants"], seconds, titles, now),
        [
            ClientFigures(one["name"], one["pid"], one["silent_s"])
            for one in now["clients"]
            if one["name"] not in _OWN_CLIENTS
        ],
    )


def is_same_run(before: NodeStatus, now: NodeStatus) -> bool:
    return before["pid"] == now["pid"] and before["uptime_s"] < now["uptime_s"]


def at_its_start(status: NodeStatus) -> NodeStatus:
    """So that rates are of its whole run."""
    return {
        **status,
        "uptime_s": 0.0,
        "counters": {},
        "tier_counters": {},
        "busiest_namespaces": [],
        "busiest_tenants": [],
    }


def lines(shown: TopFigures, *, width: int = 120) -> list[str]:
    """Without control characters, each at most `width` long."""
    return [_plain(line)[:width] for line in _lines(shown)]


class _Rates:
    def __init__(
        self, before: Mapping[str, float], now: Mapping[str, float], seconds: float
    ) -> None:
        self._before = before
        self._now = now
        self._seconds = seconds

    def now(self, name: str) -> float:
        return self._now.get(name, 0)

    def change(self, name: str) -> float:
        return max(0.0, self._now.get(name, 0) - self._before.get(name, 0))

    def of(self, name: str) -> float:
        return self.change(name) / self._seconds

    def by(self, name: str, label: str) -> dict[str, float]:
        """The largest first, without zeros."""
        start = f"{name}{{{label}="
        rates = {
            key.removeprefix(start).removesuffix("}"): rate
            for key in self._now
            if key.startswith(start) and (rate := self.of(key))
        }
        return dict(sorted(rates.items(), key=lambda item: -item[1]))

    def mean_ms(self, name: str, labels: str) -> float | None:
        calls, seconds = (
            sum(
                self.change(key) for key in self._now if key.startswith(f"{name}_{part}{{{labels},")
            )
            for part in ("count", "sum")
        )
        return 1e3 * seconds / calls if calls else None


def _counters(status: NodeStatus) -> dict[str, float]:
    return status["counters"] | status.get("tier_counters", {})


def _memory(now: NodeStatus, counters: _Rates) -> TierFigures:
    return TierFigures(
        MEMORY,
        "in use",
        now["used_bytes"],
        now["arena_bytes"],
        counters.of(f"kvhold_hit_tokens{{source={MEMORY}}}"),
        counters.of("kvhold_leased_bytes"),
        counters.of("kvhold_stored_bytes"),
    )


def _tier(tier: CacheTierStatus, counters: _Rates) -> TierFigures:
    name = tier["name"]
    return TierFigures(
        name,
        "in use" if tier["available"] else f"not used: {tier['last_fault']}",
        tier["used_bytes"],
        None,
        counters.of(f"kvhold_hit_tokens{{source={name}}}"),
        counters.of(f"kvhold_tier_bytes{{tier={name},operation=get}}"),
        counters.of(f"kvhold_tier_bytes{{tier={name},operation=put}}"),
        counters.now(f"kvhold_tier_queued_chunks{{tier={name}}}"),
        tier["pending_clears"],
        {
            operation: counters.mean_ms("kvhold_tier_seconds", f"tier={name},operation={operation}")
            for operation in _OPERATIONS
        },
    )


def _activities(
    before: Sequence[ActivityStatus],
    now: Sequence[ActivityStatus],
    seconds: float,
    titles: Mapping[str, str],
    status: NodeStatus,
) -> list[ActivityFigures]:
    """The busiest first. One that was not listed before counts from its start."""
    earlier = {(one["namespace"], one["tenant"] * (not one["namespace"])): one for one in before}
    found = []
    for one in now:
        space = one["namespace"]
        then = earlier.get((space, one["tenant"] * (not space)))
        lookups, asked, hit = (
            max(0, one["lookups"] - (then["lookups"] if then else 0)),
            max(0, one["lookup_tokens"] - (then["lookup_tokens"] if then else 0)),
            max(0, one["hit_tokens"] - (then["hit_tokens"] if then else 0)),
        )
        found.append(
            ActivityFigures(
                space or one["tenant"],
                one["tenant"] if space else "",
                titles.get(space, ""),
                lookups / seconds,
                asked / seconds,
                hit / asked if asked else None,
                status["namespaces"].get(space, 0) if space else None,
            )
        )
    return sorted(found, key=lambda one: -one.lookup_tokens_s)


def _lines(shown: TopFigures) -> Iterable[str]:
    results = ", ".join(f"{rate:,.1f} {name}" for name, rate in shown.lookups.items())
    missed = ", ".join(f"{rate:,.0f} {name}" for name, rate in shown.missed.items())
    yield (
        f"kvhold {shown.version}, node pid {shown.pid}, up {_time(shown.uptime_s)}, {shown.socket}"
    )
    yield (
        f"hit rate  {_percent(shown.hit_rate)} {_bar(shown.hit_rate or 0)}  "
        f"{shown.hit_tokens_s:,.0f} of {shown.lookup_tokens_s:,.0f} tokens/s"
    )
    yield f"lookups/s {results or 'none'}"
    yield f"missed/s  {missed or 'none'} (tokens)"
    yield (
        f"loaded    {_size(shown.loaded_bytes_s)}/s   stored {_size(shown.stored_bytes_s)}/s, "
        f"{shown.stored_chunks_s:,.0f} chunks/s   {shown.chunks:,} chunks, "
        f"{shown.pinned_chunks:,} pinned"
    )
    yield ""
    yield (
        f"{'TIER':12} {'USED':>20} {'HIT TOK/S':>10} {'READ/S':>10} {'WRITTEN/S':>10} "
        f"{'WAITING':>8} {'PROBE MS':>9} {'GET MS':>8} {'PUT MS':>8}  STATE"
    )
    for tier in shown.tiers:
        used = "-" if tier.used_bytes is None else format_size(tier.used_bytes)
        of = "" if tier.size_bytes is None else f" of {format_size(tier.size_bytes)}"
        state = tier.state + (
            f", {tier.pending_clears} clears pending" if tier.pending_clears else ""
        )
        times = [_ms(tier.ms.get(operation)) for operation in _OPERATIONS]
        yield (
            f"{tier.name:12.12} {used + of:>20} {tier.hit_tokens_s:>10,.0f} "
            f"{_size(tier.read_bytes_s):>10} {_size(tier.written_bytes_s):>10} "
            f"{tier.waiting_chunks:>8,.0f} {times[0]:>9} {times[1]:>8} {times[2]:>8}  {state}"
        )
    yield ""
    yield f"{'NAMESPACE':14} {'LOOKUPS/S':>10} {'TOKENS/S':>10} {'HIT':>7} {'MEMORY':>10}  TITLE"
    for one in shown.namespaces:
        what = " ".join(part for part in (one.title, one.tenant and f"({one.tenant})") if part)
        yield f"{one.name:14.12} {_rates(one)} {format_size(one.used_bytes or 0):>10}  {what}"
    if shown.tenants:
        yield ""
        yield f"{'TENANT':14} {'LOOKUPS/S':>10} {'TOKENS/S':>10} {'HIT':>7}"
        for one in shown.tenants:
            yield f"{one.name:14.14} {_rates(one)}"
    yield ""
    yield f"{'CLIENT':24} {'PID':>8} {'SILENT':>8}"
    for client in shown.clients:
        yield f"{client.name:24.24} {client.pid:8} {client.silent_s:7.1f}s"


def _rates(one: ActivityFigures) -> str:
    return f"{one.lookups_s:>10,.1f} {one.lookup_tokens_s:>10,.0f} {_percent(one.hit_rate):>7}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _bar(share: float) -> str:
    full = round(_BAR * min(1.0, share))
    return f"[{'#' * full}{'-' * (_BAR - full)}]"


def _size(nbytes: float) -> str:
    return format_size(int(nbytes))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _time(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def _plain(text: str) -> str:
    """Names come from clients."""
    return "".join(one if one.isprintable() else "?" for one in text)
