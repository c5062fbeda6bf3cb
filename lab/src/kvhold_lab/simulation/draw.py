from dataclasses import dataclass
from random import Random
from typing import Any

from kvhold.cache.chores import TURN
from kvhold.core.keys import Namespace, Prompt
from kvhold.core.layout import Group, Layout
from kvhold.core.planning import ComputeCost, ComputeIntent, HandoverWait
from kvhold.core.store_options import DEFAULT_OPTIONS, StoreOptions
from kvhold.tiers.faults import Rule
from kvhold.tiers.guard_config import GuardConfig
from kvhold_lab.simulation.node import NodeDraw

_CHUNK_BYTES = 4096
_LEARNED = 0.2  # the share of seeds
_COMPUTING = 0.25
_HANDOVERS = 0.2  # of seeds with one host
_PROMPT_CLEARS = 0.3
_TIER_CLEARS = 0.3
_MOVES = 0.3
_SPANS = 0.25
_FAULTS = (
    *(("probe", kind) for kind in ("error", "delay", "hang", "truncate", "stale")),
    *(("get", kind) for kind in ("error", "delay", "hang", "corrupt", "truncate", "swap", "stale")),
    *(
        (operation, kind)
        for operation in ("put", "delete", "scan", "check", "replace")
        for kind in ("error", "delay", "hang")
    ),
)

_QUIET_FAULTS = (
    ("get", "corrupt"),
    ("get", "truncate"),
    ("get", "swap"),
    ("get", "stale"),
    ("probe", "truncate"),
    ("probe", "stale"),
)


@dataclass(frozen=True)
class Draw:
    node: NodeDraw
    num_clients: int
    tasks_a_client: int
    operations: int
    store_bytes: tuple[int, ...]
    spaces: tuple[Namespace, ...]
    prompts: tuple[Prompt, ...]
    trouble: float  # faults a second
    pressure_s: float  # 0: only a full arena evicts
    one_turn_keys: int
    computing: bool
    handovers: bool
    prompt_clears: bool
    tier_clears: bool
    moves: bool
    spans: bool


def draw(random: Random, *, seed: int) -> Draw:
    num_tiers = random.choice((0, 1, 1, 1, 1, 2, 2, 2, 3))
    turn_units = random.choice((1, 5, 50, TURN))
    spaces = tuple(_namespace(random, number) for number in range(random.choice((1, 1, 2))))
    return Draw(
        NodeDraw(
            arena_bytes=_CHUNK_BYTES * random.choice((6, 12, 24, 64)),
            quota_bytes=random.choice((0, 0, 0, 8 * _CHUNK_BYTES)),
            policy=_policy(random, seed),
            write_behind_bytes=random.choice((300, 2_000, 1 << 20, 1 << 20)),
            event_buffer=random.choice((0, 8, 100)),
            guards=tuple(draw_guard(random, number) for number in range(num_tiers)),
            turn_units=turn_units,
            drain_s=random.choice((0.0, 1.0)),
            stalled_after_s=random.choice((0.5, 5.0, 60.0)),
            scrub_interval_s=random.choice((0.0, 20.0, 60.0)),
        ),
        num_clients=random.choice((1, 2, 2, 3, 4)),
        tasks_a_client=random.choice((1, 1, 2, 3)),
        operations=random.choice((8, 20, 40)),
        store_bytes=tuple(random.choice((30_000, 1 << 20, 1 << 20)) for _ in range(num_tiers)),
        spaces=spaces,
        prompts=_prompts(random, spaces),
        trouble=random.choice((0.0, 0.2, 0.5, 2.0)),
        pressure_s=random.choice((0.0, 0.1, 0.3, 1.0)),
        one_turn_keys=random.choice((0, 0, 250)),
        computing=Random(f"computing {seed}").random() < _COMPUTING,
        handovers=Random(f"handovers {seed}").random() < _HANDOVERS,
        prompt_clears=Random(f"prompt clears {seed}").random() < _PROMPT_CLEARS,
        tier_clears=Random(f"tier clears {seed}").random() < _TIER_CLEARS,
        moves=Random(f"moves {seed}").random() < _MOVES,
        spans=Random(f"spans {seed}").random() < _SPANS,
    )


def draw_rules(random: Random) -> list[Rule]:
    rules = []
    quiet = random.random() < 0.4
    for operation, kind in random.sample(
        _QUIET_FAULTS if quiet else _FAULTS, random.choice((1, 2, 4))
    ):
        rules.append(
            Rule(
                operation,
                kind,
                probability=random.choice((0.3, 1.0)),
                nth=random.choice((None, None, None, 1)),
                error=random.choice(("error", "unavailable", "full", "denied")),
                delay_s=random.choice((0.01, 0.3, 2.0)),
                bits=random.choice((1, 5)),
            )
        )
    return rules


def draw_store_options(random: Random) -> StoreOptions:
    return (
        StoreOptions(ttl_s=random.choice((0.5, 3.0, 30.0)))
        if random.random() < 0.15
        else DEFAULT_OPTIONS
    )


def draw_cost(random: Random, prompt: Prompt) -> Any:
    if random.random() < 0.8:
        return None
    return ComputeCost(
        "request",
        prompt.num_tokens,
        step_s=0.001,
        token_s=random.choice((0.0, 1e-5, 1e-2, 1.0)),
        load_s=0.0001,
    )


def draw_intent(random: Random, prompt: Prompt) -> ComputeIntent:
    cost = ComputeCost(
        "request",
        prompt.num_tokens,
        step_tokens=random.choice((4, 8, 1 << 20)),
        token_s=random.choice((0.0, 1e-2, 0.1, 0.1, 1.0)),
        load_s=0.0001,
    )
    return ComputeIntent(cost, waits=random.random() < 0.8, announces=random.random() < 0.9)


def draw_producer(random: Random, prompt: Prompt, request: str) -> ComputeIntent:
    cost = ComputeCost(request, prompt.num_tokens, token_s=random.choice((0.0, 0.1)))
    keep_s = random.choice((0.01, 0.5, 0.5, 3.0))
    return ComputeIntent(cost, waits=False, keep_s=keep_s, announces_tail=keep_s == 0.5)


def draw_reader(random: Random, prompt: Prompt) -> ComputeIntent:
    wait = HandoverWait(random.choice((0.01, 0.5, 5.0)), random.choice((0.0, 0.0, 0.3)))
    return ComputeIntent(
        ComputeCost("request", prompt.num_tokens),
        waits=False,
        announces=random.random() < 0.3,
        handover=wait,
    )


def draw_guard(random: Random, number: int) -> GuardConfig:
    return GuardConfig(
        name=f"tier-{number}",
        read_only=random.random() < 0.05,
        codec=random.choice(("raw", "raw", "raw", "lossless")),
        probe_timeout_s=random.choice((0.1, 0.5, 0.5)),
        get_timeout_s=random.choice((0.3, 2.0, 5.0)),
        put_timeout_s=random.choice((0.2, 2.0, 10.0)),
        batch_bytes=random.choice((0, 1, 1000)),
        concurrent_calls=random.choice((1, 2, 4)),
        breaker_failures=random.choice((1, 3, 3)),
        breaker_pause_s=random.choice((0.1, 1.0)),
    )


def _policy(random: Random, seed: int) -> str:
    """A generator of its own keeps other seeds' histories."""
    policy = random.choice(("lru", "lfu", "fifo", "mru", "s3fifo"))
    return "learned" if Random(f"policy {seed}").random() < _LEARNED else policy


def _namespace(random: Random, number: int) -> Namespace:
    kinds: list[dict[str, Any]] = [{"attention": "full"}]
    kinds += random.choice(
        ([], [{"attention": "sliding", "window": random.choice((3, 8))}], [{"attention": "state"}])
    )
    if random.random() < 0.2:
        kinds = kinds[::-1]
    groups = tuple(
        Group(
            layers=random.choice((1, 2, 3)),
            planes=random.choice((1, 2)),
            heads=1,
            head_dim=random.choice((4, 8)),
            dtype="bfloat16",
            **kind,
        )
        for kind in kinds
    )
    layout = Layout(groups, tokens_per_chunk=4, tail_tokens=random.choice((0, 1, 2)))
    return Namespace(f"model-{number}", layout, shards=random.choice((1, 1, 2)))


def _prompts(random: Random, spaces: tuple[Namespace, ...]) -> tuple[Prompt, ...]:
    texts: list[list[int]] = [[random.randrange(100) for _ in range(random.randrange(1, 24))]]
    for _ in range(random.randrange(1, 4)):
        start = random.choice(texts)
        start = start[: random.randrange(len(start) + 1)]
        texts.append(start + [random.randrange(100) for _ in range(random.randrange(1, 20))])
    return tuple(space.prompt(text) for space in spaces for text in texts)
