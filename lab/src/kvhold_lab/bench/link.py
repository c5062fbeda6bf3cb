"""TTFT of vLLM's hits from Redis behind a slow link, by codec."""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.engines import alike, flush_engines
from kvhold_lab.bench.throttle import Throttle
from kvhold_lab.engines.engine import Engine, binding, kvhold_connector, options_for
from kvhold_lab.engines.messages import Generated
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.servers.redis import RedisServer

OUTPUT_TOKENS = 4
COLD = "no kvhold"
_PATIENT_S = 120.0


@dataclass(frozen=True)
class LinkRow:
    """ratio:        unencoded bytes / frame bytes
    ttft_p50_s:   of hits; in the row COLD, of computed prompts
    link_s:       of a prompt's bytes
    kl:           mean KL(computed || loaded) of the first token, in nats
    """

    codec: str
    ratio: float | None
    ttft_p50_s: float
    link_s: float | None
    kl: float
    tokens_equal: bool
    cached_share: float


def rows(
    codecs: Sequence[str],
    model: ModelInfo,
    *,
    num_tokens: int,
    num_prompts: int,
    gbit_s: float,
    num_threads: int,
) -> Iterator[LinkRow]:
    rng = np.random.default_rng(0)
    prompts = [
        [int(token) for token in rng.integers(10, 250, num_tokens)] for _ in range(num_prompts)
    ]
    options: dict[str, Any] = {"max_model_len": num_tokens + 128} | binding(num_threads)
    with alike(), Engine(options_for(model, prefix_caching=False, **options)) as engine:
        computed = _ask_all(engine, prompts)
    yield LinkRow(COLD, None, median(one.ttft_s for one in computed), None, 0.0, True, 0.0)
    for codec in codecs:
        yield _row(codec, model, prompts, computed, gbit_s * 1e9 / 8, options)


def _row(
    codec: str,
    model: ModelInfo,
    prompts: list[list[int]],
    computed: list[Generated],
    bytes_per_s: float,
    options: dict[str, Any],
) -> LinkRow:
    held = 2 * len(prompts) * len(prompts[0]) * model.kv_bytes_per_token
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhold-link-")))
        redis = stack.enter_context(RedisServer())
        link = stack.enter_context(Throttle(("127.0.0.1", redis.port), bytes_per_s=bytes_per_s))
        given = {
            "codec": codec,
            "probe_timeout_s": _PATIENT_S,
            "get_timeout_s": _PATIENT_S,
            "put_timeout_s": _PATIENT_S,
        }
        tier = f"redis://127.0.0.1:{link.port}/0?" + "&".join(
            f"{name}={value}" for name, value in given.items()
        )
        sockets = [folder / "store.sock", folder / "load.sock"]
        with (
            alike(),
            Engine(
                options_for(model, kv_transfer_config=_transfer(sockets[0], tier, held), **options)
            ) as engine,
        ):
            stack.callback(end_node, sockets[0])
            _ask_all(engine, prompts)
            ratio = _flushed_ratio(sockets[0])
        before = link.down_bytes
        with (
            alike(),
            Engine(
                options_for(model, kv_transfer_config=_transfer(sockets[1], tier, held), **options)
            ) as engine,
        ):
            stack.callback(end_node, sockets[1])
            _warm(sockets[1])
            loaded = _ask_all(engine, prompts)
        link_s = (link.down_bytes - before) / bytes_per_s / len(prompts)
    return LinkRow(
        codec=codec,
        ratio=ratio,
        ttft_p50_s=median(one.ttft_s for one in loaded),
        link_s=link_s,
        kl=sum(
            _kl(one.first_logprobs, other.first_logprobs)
            for one, other in zip(computed, loaded, strict=True)
        )
        / len(prompts),
        tokens_equal=all(
            one.token_ids == other.token_ids for one, other in zip(computed, loaded, strict=True)
        ),
        cached_share=sum(one.num_cached_tokens for one in loaded) / sum(map(len, prompts)),
    )


def _ask_all(engine: Engine, prompts: list[list[int]]) -> list[Generated]:
    return [
        engine.generate(prompt, max_tokens=OUTPUT_TOKENS, first_logprobs=True) for prompt in prompts
    ]


def _kl(computed: list[float], loaded: list[float]) -> float:
    return sum(
        math.exp(p) * (p - q) for p, q in zip(computed, loaded, strict=True) if p > -math.inf
    )


def _flushed_ratio(socket: Path) -> float:
    with NodeClient(
        socket, ClientConfig(call_timeout_s=_PATIENT_S), name="kvhold bench link"
    ) as client:
        flush_engines(client, patience_s=_PATIENT_S)
        counters = client.status()["tier_counters"]
    plain, framed = (
        sum(
            value for name, value in counters.items() if name.startswith(f"kvhold_encoded_{kind}{{")
        )
        for kind in ("plain_bytes", "bytes")
    )
    return float(plain / framed)


def _warm(socket: Path) -> None:
    with NodeClient(
        socket, ClientConfig(call_timeout_s=_PATIENT_S), name="kvhold bench link"
    ) as client:
        until = time.monotonic() + _PATIENT_S
        while not all(tier["codec_ready"] for tier in client.status()["tiers"]):
            if time.monotonic() > until:
                raise TimeoutError("the node did not compile its codec in time")
            time.sleep(0.05)


def _transfer(socket: Path, tier: str, held_bytes: int) -> dict[str, Any]:
    return kvhold_connector(
        socket,
        held_bytes,
        write_behind_bytes=held_bytes,
        tiers=[tier],
        rules={"plan": False, "max_error": 1},
        client={"arrival_timeout_s": _PATIENT_S, "call_timeout_s": 30.0},
    )
