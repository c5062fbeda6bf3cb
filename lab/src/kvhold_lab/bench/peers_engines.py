"""Real vLLMs: a hit from the other host, and one prompt for two engines at once.

Calls raise NoSecondHost, EngineFailed; OutputsDiffer.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from kvhold.core.status import NodeStatus, check_status
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.engines import PATIENT, ROOM_TOKENS, OutputsDiffer, flush_engines
from kvhold_lab.bench.peers_nodes import PATIENCE_S, wait_until
from kvhold_lab.bench.peers_rows import PeersRow, PeersSizes, peers_row
from kvhold_lab.bench.second_host import SecondHost, second_host
from kvhold_lab.engines.engine import Engine, binding, kvhold_connector, options_for
from kvhold_lab.engines.messages import Generated
from kvhold_lab.engines.models import ModelInfo, make_model
from kvhold_lab.engines.prompts import make_prompt
from kvhold_lab.servers.base import free_port

_OUTPUT_TOKENS = 4
_TOKENS_PER_CHUNK = 128
_LEARNING_SHARES = (0.1, 0.2, 0.4, 1.0)
_START_S = 600.0


@dataclass(frozen=True)
class _Host:
    engine: Engine
    socket: Path

    def ask(self, prompt: list[int]) -> Generated:
        return self.engine.generate(prompt, max_tokens=_OUTPUT_TOKENS)

    def ask_again(self, prompt: list[int]) -> Generated:
        assert self.engine.reset_prefix_cache(), "the engine is idle"
        return self.ask(prompt)

    def flush(self) -> None:
        with NodeClient(self.socket, PATIENT, name="kvhold bench") as client:
            flush_engines(client, patience_s=PATIENCE_S)

    def status(self) -> NodeStatus:
        with NodeClient(self.socket, PATIENT, name="kvhold bench") as client:
            return check_status(client.status())

    def of_peers(self) -> tuple[int, int]:
        """Chunks in the index, and loaded bytes."""
        [tier] = self.status()["tiers"]
        peers = tier["followed_peers"]["peers"]
        return sum(one["chunks"] for one in peers), sum(one["loaded_bytes"] for one in peers)

    def knows(self, num_chunks: int) -> bool:
        return self.of_peers()[0] >= num_chunks


def host_rows(sizes: PeersSizes) -> Iterator[PeersRow]:
    """In turn: computed; a local hit; and a hit of what the other host's engine has computed."""
    model, hit_chunks = make_model(sizes.model), sizes.tokens // _TOKENS_PER_CHUNK
    seconds: dict[str, list[float]] = {"cold": [], "local": [], "peer": []}
    loaded = 0
    with second_host(sizes.wire_mbit_s) as host, _two_hosts(model, sizes, host) as (here, there):
        for number in range(sizes.engine_rounds + 1):
            own, far = (make_prompt(model.path, sizes.tokens, seed=2 * number + n) for n in (0, 1))
            cold = here.ask(own)
            here.flush()
            local = here.ask_again(own)
            computed = there.ask(far)
            there.flush()
            wait_until(partial(here.knows, (number + 1) * hit_chunks))
            loaded = here.of_peers()[1]
            peer = here.ask_again(far)
            loaded = here.of_peers()[1] - loaded
            for first, second in ((cold, local), (computed, peer)):
                _check(first, second, hit_chunks * _TOKENS_PER_CHUNK)
            if number:
                for name, one in (("cold", cold), ("local", local), ("peer", peer)):
                    seconds[name].append(one.ttft_s)
    cold_s, local_s, peer_s = (median(seconds[name]) for name in ("cold", "local", "peer"))
    wire_s = loaded * 8e-6 / sizes.wire_mbit_s
    what = (
        f"TTFT of {sizes.tokens:,} tokens that the other host's engine has computed, {model.name} "
        f"model, {sizes.wire_mbit_s:,g} Mbit/s; limit: "
    )
    yield peers_row(f"{what}computing them", peer_s, "s", cold_s, "at most 0.15")
    yield peers_row(
        f"{what}{loaded:,} bytes on the wire, and a local hit ({local_s:.3f} s)",
        peer_s,
        "s",
        wire_s + local_s,
        "at most 1.15",
    )


def once_rows(sizes: PeersSizes) -> Iterator[PeersRow]:
    model = make_model(sizes.model)
    rest = sizes.tokens % _TOKENS_PER_CHUNK
    alone_s: list[float] = []
    together_s: dict[str, list[float]] = {"computes": [], "waits, or computes, too": []}
    computed: list[int] = []
    with _two_engines(model, sizes) as engines, ThreadPoolExecutor(2) as askers:
        for at, engine in enumerate(engines):
            for seed, share in enumerate(_LEARNING_SHARES):
                tokens = int(share * sizes.tokens)
                engine.ask(make_prompt(model.path, tokens, seed=1_000 + 10 * at + seed))
        for number in range(sizes.engine_rounds + 1):
            first = 100 * number
            one_s = [
                engine.ask(make_prompt(model.path, sizes.tokens, seed=first + at)).ttft_s
                for at, engine in enumerate(engines)
            ]
            prompt = make_prompt(model.path, sizes.tokens, seed=first + 2)
            asked = [askers.submit(engine.ask, prompt) for engine in engines]
            answers = sorted((one.result() for one in asked), key=lambda one: one.num_cached_tokens)
            _check(answers[0], answers[1])
            if number:
                alone_s += one_s
                for name, answer in zip(together_s, answers, strict=True):
                    together_s[name].append(answer.ttft_s)
                computed.append(sum(sizes.tokens - one.num_cached_tokens for one in answers))
    what = f"two engines get {sizes.tokens:,} tokens at once, {model.name} model: "
    for name, taken_s in together_s.items():
        yield peers_row(
            f"{what}TTFT of the one that {name}; limit: computing alone",
            median(taken_s),
            "s",
            median(alone_s),
            "at most 1.03",
        )
    yield peers_row(
        f"{what}tokens computed; limit: once, and the last chunk's rest twice",
        median(computed),
        "tokens",
        sizes.tokens + rest,
        "at most 1",
    )


def _check(first: Generated, second: Generated, hit_tokens: int | None = None) -> None:
    if first.token_ids != second.token_ids:
        raise OutputsDiffer(f"tokens {second.token_ids} of a hit, computed {first.token_ids}")
    cached = [first.num_cached_tokens, second.num_cached_tokens]
    if hit_tokens is not None and cached != [0, hit_tokens]:
        raise OutputsDiffer(f"{cached} tokens were cached, not [0, {hit_tokens}]")


@contextmanager
def _two_hosts(
    model: ModelInfo, sizes: PeersSizes, host: SecondHost
) -> Iterator[tuple[_Host, _Host]]:
    with tempfile.TemporaryDirectory(prefix="kvhold-peers-") as name:
        folder = Path(name)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text("kvhold bench peers\n")
        addresses = [f"{address}:{free_port()}" for address in (host.here, host.address)]
        tier = f"peers://{','.join(addresses)}?token_file={token}&insecure=true"
        connectors = [
            _connector(
                folder / f"{number}.sock",
                model,
                sizes,
                tiers=[tier],
                rules={"plan": False},
                peers={"listen": address, "token_file": str(token), "insecure": True},
            )
            for number, address in enumerate(addresses)
        ]
        with _started(folder, model, sizes, connectors, ((), host.enter)) as (here, there):
            yield here, there


@contextmanager
def _two_engines(model: ModelInfo, sizes: PeersSizes) -> Iterator[tuple[_Host, ...]]:
    with tempfile.TemporaryDirectory(prefix="kvhold-peers-") as name:
        folder = Path(name)
        connector = _connector(folder / "0.sock", model, sizes, rules={"wait_for_computing": True})
        with _started(folder, model, sizes, [connector] * 2, ((), ())) as engines:
            yield engines


def _connector(socket: Path, model: ModelInfo, sizes: PeersSizes, **others: Any) -> dict[str, Any]:
    prompts = 3 * (sizes.engine_rounds + 4)
    return kvhold_connector(
        socket,
        prompts * (sizes.tokens + _TOKENS_PER_CHUNK) * model.kv_bytes_per_token,
        client={"call_timeout_s": 30.0, "arrival_timeout_s": PATIENCE_S},
        **others,
    )


@contextmanager
def _started(
    folder: Path,
    model: ModelInfo,
    sizes: PeersSizes,
    connectors: list[dict[str, Any]],
    under: tuple[tuple[str, ...], ...],
) -> Iterator[tuple[_Host, ...]]:
    hosts = []
    for connector, words in zip(connectors, under, strict=True):
        options = options_for(
            model,
            max_model_len=sizes.tokens + ROOM_TOKENS,
            kv_transfer_config=connector,
            **binding(sizes.threads),
        )
        socket = Path(connector["kv_connector_extra_config"]["node"]["socket"])
        hosts.append(_Host(Engine(options, under=words), socket))
    with ExitStack() as stack, ThreadPoolExecutor(len(hosts)) as starters:
        for host in hosts:
            stack.callback(end_node, host.socket)
            stack.callback(host.engine.stop)
        for started in [starters.submit(host.engine.start, _START_S) for host in hosts]:
            started.result()
        yield tuple(hosts)
