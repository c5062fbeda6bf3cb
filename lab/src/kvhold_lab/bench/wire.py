import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvhold.core.keys import HASH_BYTES, KEY_BYTES, Namespace, Query
from kvhold.core.layout import Group, Layout
from kvhold.core.reasons import NEVER_STORED
from kvhold.net import messages as m
from kvhold.net.wire import encode
from kvhold.node import NodeClient
from kvhold.tiers.registry import make_tier
from kvhold_lab.bench.limits import PingPong, RawSocket
from kvhold_lab.bench.profiles import Profiles, Work, of_both
from kvhold_lab.bench.rows import Row, in_turn, rate_row, time_row
from kvhold_lab.bench.servers import running_central, running_node

CALLS = 100
LARGE_CALLS = 8
ROUNDS = 9
NAMES = 1_000
SMALL_BYTES, LARGE_BYTES = 4 << 10, 8 << 20
NAMESPACE = Namespace(
    model="bench",
    layout=Layout(groups=(Group(layers=1, planes=1, heads=1, head_dim=1, dtype="uint8"),)),
)


def rows(profiles: Profiles | None = None) -> list[Row]:
    profiles = profiles or Profiles()
    query = Query(NAMESPACE.digest, NAMESPACE.layout.fingerprint, 1, os.urandom(NAMES * HASH_BYTES))
    missed = m.LookupAnswer(0, 0, reason=NEVER_STORED)
    small_s, bare_small_s = _time_gets(SMALL_BYTES, CALLS)
    large_s, bare_large_s = _time_gets(LARGE_BYTES, LARGE_CALLS)
    small = time_row(
        f"get of {SMALL_BYTES >> 10} KiB from a central cache", small_s, bare_small_s, unit="us"
    )
    large = rate_row(
        f"get of {LARGE_BYTES >> 20} MiB from a central cache", LARGE_BYTES, large_s, bare_large_s
    )
    return [
        _node_row("smallest call to the node", NodeClient.ping, m.Ping(), m.Done(), profiles),
        _node_row(
            f"lookup of {NAMES:,} names by the node, a miss",
            lambda client: client.lookup(query),
            m.Lookup(query),
            missed,
            profiles,
        ),
        profiles.of(small, lambda: of_both(partial(_getting, SMALL_BYTES, CALLS))),
        profiles.of(large, lambda: of_both(partial(_getting, LARGE_BYTES, LARGE_CALLS))),
    ]


def _node_row(
    name: str,
    call: Callable[[NodeClient], object],
    request: m.Message,
    answer: m.Message,
    profiles: Profiles,
) -> Row:
    with _calling(call) as work, PingPong(len(encode(request)), len(encode(answer))) as bare:
        seconds = in_turn({"kvhold": work, "sockets": lambda: _often(bare.exchange)}, rounds=ROUNDS)
    row = time_row(name, seconds["kvhold"] / CALLS, seconds["sockets"] / CALLS, unit="us")
    return profiles.of(row, lambda: of_both(partial(_calling, call)))


def _time_gets(nbytes: int, calls: int) -> tuple[float, float]:
    into = memoryview(bytearray(nbytes))
    with _getting(nbytes, calls) as work, RawSocket([into], receive=False) as bare:
        seconds = in_turn(
            {"kvhold": work, "TCP": lambda: _often(lambda: bare.receive([into]), calls)},
            rounds=ROUNDS,
        )
    return seconds["kvhold"] / calls, seconds["TCP"] / calls


@contextmanager
def _calling(call: Callable[[NodeClient], object], under: Sequence[str] = ()) -> Iterator[Work]:
    with running_node(under) as client:
        client.register(NAMESPACE)
        yield lambda: _often(lambda: call(client))


@contextmanager
def _getting(nbytes: int, calls: int, under: Sequence[str] = ()) -> Iterator[Work]:
    key, value, into = (
        os.urandom(KEY_BYTES),
        memoryview(os.urandom(nbytes)),
        memoryview(bytearray(nbytes)),
    )
    with running_central(under) as url, asyncio.Runner() as runner:
        tier, _ = make_tier(url)

        async def get() -> None:
            for _ in range(calls):
                sizes = await tier.get([key], [[into]])
                assert sizes == [nbytes], sizes

        try:
            faults = runner.run(tier.put([(key, [value])]))
            assert faults == [None], faults
            yield lambda: runner.run(get())
        finally:
            runner.run(tier.close())


def _often(work: Work, calls: int = 0) -> None:
    for _ in range(calls or CALLS):
        work()
