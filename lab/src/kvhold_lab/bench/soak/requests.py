"""Random requests of two engines with a small shared node. Each answer must equal that of a third
engine without a cache, up to the first near tie (`_SURE`).
"""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from msgspec import structs

from kvhold.blend.selection import NoSelection, selector_text
from kvhold.core.config import ClientConfig
from kvhold.core.errors import KVHoldError
from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.blend.trial_permit import grant_trial
from kvhold_lab.bench.soak.texts import DocumentTexts, Texts, TextShape
from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import STAGES, Serve, Start, Started, VerifyArrival, VerifyServed
from kvhold_lab.verify.notes import FOLDER, read_loads

_SHAPE = TextShape(block=32, chunk=64, limit=448)
_LONGEST_ANSWER = 64
_RAM_BYTES = 4 << 20
_BLOCKS = 1 + 20
_WINDOW = 100
# smallest sure difference of logarithms; batches cause 1e-5
_SURE = 1e-3
_PATIENT_S = 60.0
_ENGINE_TIMEOUT_S = 900.0
_SHOWN = 5
_SPANS = "spans"


@dataclass(frozen=True)
class Requests:
    """wrong, errors, kv_wrong, kv_unknown and missing must be 0 or empty.

    kv_unknown:  blocks that no engine computed, and loads that ended inside one
    unsteady:    answers that the third engine gives, too, to the prompt alone
    """

    requests: int
    aborted: int
    aborted_in: dict[str, int]
    preemptions: int
    hits: int
    loaded_tokens: int
    evicted: int
    blended: int
    kv_compared: int
    kv_wrong: int
    kv_unknown: int
    wrong: int
    unsteady: int
    errors: int
    near_ties: int
    differences: list[str]
    missing: list[str]
    seconds: float
    passed: bool


@dataclass(frozen=True)
class SoakAnswer:
    token_ids: list[int]
    near_tie: bool

    @classmethod
    def of(cls, token_ids: Sequence[int], margins: Sequence[float]) -> "SoakAnswer":
        sure = next((at for at, margin in enumerate(margins) if margin < _SURE), len(token_ids))
        return cls(list(token_ids[:sure]), sure < len(token_ids))


@dataclass(frozen=True)
class Difference:
    engine: int
    arrival: VerifyArrival
    expected: list[int]
    token_ids: list[int]
    name: str


@dataclass
class SoakTally:
    requests: int = 0
    aborted_in: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    def add(
        self,
        engine: int,
        arrivals: Sequence[VerifyArrival],
        expected: Sequence[list[int]],
        served: VerifyServed,
    ) -> None:
        self.requests += len(arrivals)
        self.preemptions += served.num_preemptions
        self.ends.update(served.ends)
        self.aborted_in.update(stage for stage in served.aborted_in if stage)
        for arrival, whole, got, end, name in zip(
            arrivals, expected, served.token_ids, served.ends, served.names, strict=True
        ):
            wanted = whole[: len(got)] if end == "abort" else whole
            if got != wanted and end in ("abort", "length") and _SPANS not in arrival.rules:
                self.differences.append(Difference(engine, arrival, wanted, got, name))

    @property
    def errors(self) -> int:
        return sum(count for end, count in self.ends.items() if end not in ("abort", "length"))


def run(
    requests: int, seed: int, *, blends: bool = False, connector: str = "WitnessedConnector"
) -> Requests:
    """blends: half of the document prompts are blended"""
    began = time.monotonic()
    model = make_checkpoint("llama").path
    with tempfile.TemporaryDirectory(prefix="kvhold-requests-") as folder, ExitStack() as stack:
        socket, notes = Path(folder) / "node.sock", Path(folder) / "notes"
        notes.mkdir()
        stack.callback(end_node, socket)
        sharing = _sharing(model, socket, notes)
        if blends:
            for given in sharing:
                # else vLLM may wait forever: loads hold all blocks, and the first needs more
                given["scheduler_reserve_full_isl"] = True
                _blend(given["kv_transfer_config"], Path(folder), connector)
        arguments = [_alone(model), *sharing]
        crew = [stack.enter_context(_Engine(given)) for given in arguments]
        started = [engine.started.result() for engine in crew]
        soak = _Soak(crew, started[0].vocabulary, random.Random(seed), blends=blends)
        soak.run(requests)
        counters: dict[str, Any] = {}
        try:
            with NodeClient(socket, ClientConfig(call_timeout_s=_PATIENT_S), name="soak") as client:
                counters = client.status()["counters"]
        except KVHoldError as error:
            soak.failed.append(f"the node: {error}")
        loads = list(read_loads(notes))
        return _report(
            soak,
            loads,
            evicted=int(counters.get("kvhold_evicted_chunks{tier=ram}", 0)),
            blended=(
                int(counters.get("kvhold_blended_requests{result=blended}", 0)) if blends else None
            ),
            seconds=round(time.monotonic() - began, 1),
        )


class _Engine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engines = Engines(timeout_s=_ENGINE_TIMEOUT_S, threads=1)
        self._thread = ThreadPoolExecutor(1)
        self.started: Future[Started] = self._thread.submit(
            self._engines.start, Start(engine=arguments)
        )

    def serve(
        self, arrivals: list[VerifyArrival], *, margins: bool = False
    ) -> "Future[VerifyServed]":
        return self._thread.submit(self._engines.serve, Serve(arrivals=arrivals, margins=margins))

    def __enter__(self) -> "_Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._engines.close()


@dataclass
class _Window:
    batches: tuple[list[VerifyArrival], list[VerifyArrival]]
    asked: list[VerifyArrival]
    answers: "Future[VerifyServed]"


class _Soak:
    def __init__(
        self,
        crew: Sequence[_Engine],
        vocabulary: Sequence[int],
        chance: random.Random,
        *,
        blends: bool = False,
    ) -> None:
        self._alone, *self._pair = crew
        self._chance = chance
        self._documents = DocumentTexts(chance, vocabulary, _SHAPE) if blends else None
        self._texts = self._documents or Texts(chance, vocabulary, _SHAPE)
        self._answers: dict[tuple[int, ...], SoakAnswer] = {}
        self.tally = SoakTally()
        self.near_ties = 0
        self.unsteady: list[Difference] = []
        self.wrong: list[Difference] = []
        self.failed: list[str] = []

    def run(self, requests: int) -> None:
        try:
            left, window = requests, self._draw(min(_WINDOW, requests))
            while left:
                batches = self._learn(window)
                serving = [
                    engine.serve(batch) for engine, batch in zip(self._pair, batches, strict=True)
                ]
                if left := left - sum(map(len, batches)):
                    window = self._draw(min(_WINDOW, left))
                for number, (batch, future) in enumerate(zip(batches, serving, strict=True)):
                    self.tally.add(
                        number, batch, [self._answer(arrival) for arrival in batch], future.result()
                    )
                self._judge()
        except EngineFailed as error:
            self.failed.append(str(error))

    def _draw(self, count: int) -> _Window:
        batches: tuple[list[VerifyArrival], list[VerifyArrival]] = [], []
        steps = [0, 0]
        asked: dict[tuple[int, ...], VerifyArrival] = {}
        for _ in range(count):
            number = self._chance.randrange(2)
            steps[number] += self._chance.choice((0, 0, 0, 1, 2, 4, 8))
            arrival = _random_arrival(
                self._chance, self._texts.prompt(), step=steps[number], has_priorities=number == 1
            )
            arrival = self._marked(arrival)
            batches[number].append(arrival)
            if _SPANS in arrival.rules:
                continue
            name = tuple(arrival.tokens)
            known = self._answers.get(name)
            enough = known is not None and (
                known.near_tie or len(known.token_ids) >= arrival.max_tokens
            )
            if not enough and (name not in asked or asked[name].max_tokens < arrival.max_tokens):
                asked[name] = VerifyArrival(tokens=arrival.tokens, max_tokens=arrival.max_tokens)
        arrivals = list(asked.values())
        return _Window(batches, arrivals, self._alone.serve(arrivals, margins=True))

    def _marked(self, arrival: VerifyArrival) -> VerifyArrival:
        known = self._documents.spans if self._documents is not None else {}
        spans = known.get(tuple(arrival.tokens))
        if spans is None or self._chance.random() < 0.5:
            return arrival
        return structs.replace(arrival, rules=arrival.rules | {_SPANS: spans})

    def _learn(self, window: _Window) -> list[list[VerifyArrival]]:
        served = window.answers.result()
        assert set(served.ends) <= {"length"}, (
            f"the engine without a connector ended requests by {set(served.ends)}"
        )
        for arrival, token_ids, margins in zip(
            window.asked, served.token_ids, served.margins, strict=True
        ):
            answer = SoakAnswer.of(token_ids, margins)
            self._answers[tuple(arrival.tokens)] = answer
            self._texts.answered(arrival.tokens, answer.token_ids)
        return [
            [shorter for arrival in batch if (shorter := self._shorter(arrival))]
            for batch in window.batches
        ]

    def _shorter(self, arrival: VerifyArrival) -> VerifyArrival | None:
        if _SPANS in arrival.rules:
            return arrival
        sure = len(self._answers[tuple(arrival.tokens)].token_ids)
        if arrival.max_tokens <= sure:
            return arrival
        self.near_ties += 1
        return structs.replace(arrival, max_tokens=sure) if sure else None

    def _answer(self, arrival: VerifyArrival) -> list[int]:
        if _SPANS in arrival.rules:
            return []
        return self._answers[tuple(arrival.tokens)].token_ids[: arrival.max_tokens]

    def _judge(self) -> None:
        differences, self.tally.differences = self.tally.differences, []
        for difference in differences:
            arrival = VerifyArrival(
                tokens=difference.arrival.tokens, max_tokens=difference.arrival.max_tokens
            )
            again = self._alone.serve([arrival]).result().token_ids[0]
            (
                self.unsteady
                if again[: len(difference.expected)] == difference.token_ids
                else self.wrong
            ).append(difference)


def _random_arrival(
    chance: random.Random, tokens: list[int], *, step: int, has_priorities: bool
) -> VerifyArrival:
    rules: dict[str, Any] = {}
    if chance.random() < 0.15:
        rules = chance.choice(
            (
                {"tags": {"tenant": "a"}},
                {"tags": {"tenant": "b"}},
                {"store": False},
                {"load": False},
                {"ttl_s": 0.5},
            )
        )
    abort = chance.choice((*STAGES, "loading")) if chance.random() < 0.25 else None
    return VerifyArrival(
        tokens=tokens,
        max_tokens=chance.choice(
            (
                1,
                2,
                chance.randint(3, 12),
                chance.randint(13, _LONGEST_ANSWER),
                chance.randint(13, _LONGEST_ANSWER),
            )
        ),
        step=step,
        abort=abort,
        abort_after=chance.choice((0, 0, 1, 3)) if abort != "decode" else chance.randint(0, 8),
        salt=chance.choice(("a", "b")) if chance.random() < 0.1 else "",
        rules=rules,
        priority=chance.randrange(3) if has_priorities else 0,
    )


def _alone(model: Path) -> dict[str, Any]:
    return _engine(model) | {
        "enable_prefix_caching": False,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2_048,
        "kv_cache_memory_bytes": 128 << 20,
    }


def _sharing(model: Path, socket: Path, notes: Path) -> list[dict[str, Any]]:
    cramped = {
        "num_gpu_blocks_override": _BLOCKS,
        "kv_cache_memory_bytes": 128 << 20,
        "max_num_seqs": 8,
        "enable_chunked_prefill": True,
        "scheduler_reserve_full_isl": False,  # prompts that do not fit are preempted
    }
    one = {"enable_prefix_caching": True, "max_num_batched_tokens": 96}
    two = {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 160,
        "scheduling_policy": "priority",
        "async_scheduling": False,
    }
    return [
        _engine(model)
        | cramped
        | one
        | {"kv_transfer_config": _transfer(socket, notes, save_decode=False)},
        _engine(model)
        | cramped
        | two
        | {"kv_transfer_config": _transfer(socket, notes, save_decode=True)},
    ]


def _engine(model: Path) -> dict[str, Any]:
    longest = _SHAPE.limit + _LONGEST_ANSWER
    common = {"model": str(model), "dtype": "float32", "enforce_eager": True, "seed": 0}
    return common | {"max_model_len": longest, "block_size": _SHAPE.block}


def _transfer(socket: Path, notes: Path, *, save_decode: bool) -> dict[str, Any]:
    settings = {
        "tokens_per_chunk": _SHAPE.chunk,
        "ram_bytes": _RAM_BYTES,
        "save_decode": save_decode,
        "rules": {"plan": False},
        "node": {"socket": str(socket), "idle_exit_s": 600},
        "client": {"connect_timeout_s": _PATIENT_S, "call_timeout_s": _PATIENT_S},
    }
    return {
        "kv_connector": "WitnessedConnector",
        "kv_connector_module_path": "kvhold_lab.verify.witness",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings | {FOLDER: str(notes)},
    }


def _blend(transfer: dict[str, Any], folder: Path, connector: str) -> None:
    model, selector = "soak", NoSelection()
    grant_trial(folder, model, selector_text(selector))
    transfer["kv_connector"] = connector
    transfer["kv_connector_extra_config"] |= {
        "model_id": model,
        "blend": {"selector": selector.name, "permits": str(folder), "canary_share": 0.0},
    }


def _report(
    soak: _Soak,
    loads: Sequence[dict[str, Any]],
    *,
    evicted: int,
    seconds: float,
    blended: int | None = None,
) -> Requests:
    tally = soak.tally
    blocks = sum(load["compared"] for load in loads)
    kv_wrong = sum(len(load["wrong"]) for load in loads)
    kv_unknown = sum(len(load["unknown"]) + load["in_part"] for load in loads)
    errors = tally.errors + len(soak.failed)
    met = {
        "hits": bool(blocks),
        "evictions": bool(evicted),
        "preemptions": bool(tally.preemptions),
        "aborts": bool(tally.aborted_in.total()),
        "blended requests": blended is None or bool(blended),
    }
    missing = [
        f"no {name}: this run shows nothing of them; ask for more requests"
        for name, is_met in met.items()
        if not is_met
    ]
    return Requests(
        requests=tally.requests,
        aborted=tally.aborted_in.total(),
        aborted_in={stage: tally.aborted_in[stage] for stage in STAGES},
        preemptions=tally.preemptions,
        hits=sum(1 for load in loads if load["compared"]),
        loaded_tokens=blocks * _SHAPE.block,
        evicted=evicted,
        blended=blended or 0,
        kv_compared=blocks,
        kv_wrong=kv_wrong,
        kv_unknown=kv_unknown,
        wrong=len(soak.wrong),
        unsteady=len(soak.unsteady),
        errors=errors,
        near_ties=soak.near_ties,
        differences=[
            *soak.failed,
            *(_told(difference, loads) for difference in [*soak.wrong, *soak.unsteady][:_SHOWN]),
        ],
        missing=missing,
        seconds=seconds,
        passed=not (soak.wrong or errors or kv_wrong or kv_unknown or missing),
    )


def _told(difference: Difference, loads: Sequence[dict[str, Any]]) -> str:
    own = [load for load in loads if load["request"] == difference.name]
    bad = sum(len(load["wrong"]) + len(load["unknown"]) for load in own)
    kv = (
        f"{bad} of {sum(load['compared'] for load in own)} loaded blocks wrong"
        if own
        else "nothing loaded"
    )
    prompt = (
        f"a prompt of {len(difference.arrival.tokens)} tokens (engine {difference.engine + 1}, "
        f"request {difference.name})"
    )
    pairs = enumerate(zip_longest(difference.token_ids, difference.expected))
    at, (got, expected) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return f"{prompt}: token {at + 1} of {len(difference.expected)} is {got}, not {expected}; {kv}"
