"""Run a model with and without the connector, path by path, and judge. The reference runs three
times.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from kvhold.core.config import Config
from kvhold.node import end_node
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.engines.protocol import EngineRefused
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import Answered, Ask, Choice, Question, Start, Started
from kvhold_lab.verify.notes import FOLDER, Verdict, read_verdict
from kvhold_lab.verify.paths import ITSELF, PATHS, Path
from kvhold_lab.verify.prompts import PromptSizes, crowd_tokens, make_batches, make_crowd
from kvhold_lab.verify.rows import UNSUPPORTED, VerifyRow
from kvhold_lab.verify.ties import at_near_tie

_SEED = 20_262
_CROWD_FITS = 3
_ARENA_SPARE_BYTES = 64 << 20
_NODE_OUTLIVES_ENGINES_S = 600.0
_LOGITS = {"logprobs_mode": "raw_logits"}
_PATIENT_S = 60.0


@dataclass(frozen=True)
class Subject:
    name: str
    model: str
    engine: dict[str, Any] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifySettings:
    dtype: str = "float32"
    max_tokens: int = 8
    max_model_len: int = 4_096
    kv_memory_bytes: int = 1 << 30
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineAnswers:
    started: Started
    token_ids: list[list[int]] = field(default_factory=list)
    choices: list[list[Choice]] = field(default_factory=list)
    num_preemptions: int = 0
    unsteady: set[int] = field(default_factory=set)

    def add(self, answered: Answered) -> None:
        self.token_ids += answered.token_ids
        self.choices += answered.choices
        self.num_preemptions += answered.num_preemptions

    def is_tie(self, number: int, answer: list[int]) -> bool:
        return at_near_tie(
            answer, self.token_ids[number], self.choices[number], dtype=self.started.dtype
        )


class Verification:
    def __init__(
        self,
        engines: Engines,
        subject: Subject,
        *,
        paths: Sequence[str],
        settings: VerifySettings,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engines = engines
        self._subject = subject
        self._paths = paths
        self._settings = settings
        self._say = say
        self._shape: Started | None = None
        self._references: dict[str, EngineAnswers] = {}

    def rows(self) -> Iterator[VerifyRow]:
        """Failures are rows, too. One row if vLLM does not run the model."""
        began = time.monotonic()
        self._say(f"{self._subject.name}: without kvhold ...")
        try:
            self._reference(PATHS["plain"])
        except EngineFailed as error:
            yield VerifyRow(
                self._subject.name,
                UNSUPPORTED,
                None,
                None,
                0,
                "unsupported",
                self._told(error),
                seconds=_since(began),
            )
            return
        for name in self._paths:
            self._say(f"{self._subject.name}: {name} ({PATHS[name].about}) ...")
            began = time.monotonic()
            yield replace(self._row(name), seconds=_since(began))

    def _row(self, name: str) -> VerifyRow:
        path = PATHS[name]
        row = VerifyRow(self._subject.name, name, None, None, 0, "unsupported")
        try:
            reference = self._reference(path)
        except EngineFailed as error:
            return replace(row, reason=self._told(error))
        if not path.is_on(reference.started):
            return replace(row, outcome="off", reason="vLLM does not do this here, whatever is set")
        with tempfile.TemporaryDirectory(prefix="kvhold-verify-") as folder:
            socket, notes = FilePath(folder) / "node.sock", FilePath(folder) / "notes"
            notes.mkdir()
            try:
                rounds = self._with_kvhold(
                    path, reference.started, self._transfer(path, socket, notes)
                )
            except EngineFailed as error:
                refused = isinstance(error, EngineRefused) and error.by_kvhold
                return replace(
                    row,
                    outcome="refused" if refused else "FAIL",
                    reason=str(error) if refused else self._told(error),
                )
            finally:
                end_node(socket)
            return judged(row, path, reference, rounds, read_verdict(notes))

    def _told(self, error: EngineFailed) -> str:
        if isinstance(error, EngineRefused):
            self._say(f"the end of the engine's log:\n{error.log_tail}")
        return str(error)

    def _reference(self, path: Path) -> EngineAnswers:
        engine = self._engine_of(path)
        name = json.dumps([engine, path.crowded], sort_keys=True)
        if name not in self._references:
            asked = EngineAnswers(self._start(engine | _LOGITS))
            self._shape = self._shape or asked.started
            if path.is_on(asked.started):
                self._answer_all(asked, path, choices=True)
                asked.unsteady = self._unsteady(asked, path)
            self._engines.stop()
            self._references[name] = asked
        return self._references[name]

    def _unsteady(self, asked: EngineAnswers, path: Path) -> set[int]:
        again, alone = EngineAnswers(asked.started), EngineAnswers(asked.started)
        self._answer_all(again, path)
        self._engines.reset()
        for batch in self._batches(path):
            for question in batch:
                alone.add(self._answer([question]))
        return {
            number
            for number, first in enumerate(asked.token_ids)
            for other in (again.token_ids[number], alone.token_ids[number])
            if other != first and not asked.is_tie(number, other)
        }

    def _with_kvhold(
        self, path: Path, reference: Started, transfer: dict[str, Any]
    ) -> list[EngineAnswers]:
        num_tokens = sum(
            len(question.tokens) for batch in self._batches(path) for question in batch
        )
        transfer["kv_connector_extra_config"].setdefault(
            "ram_bytes", 4 * num_tokens * reference.token_bytes + _ARENA_SPARE_BYTES
        )
        engine = self._engine_of(path) | {"kv_transfer_config": transfer}
        stored = EngineAnswers(self._start(engine))
        self._answer_all(stored, path)
        if path.restart:
            self._engines.stop()
            self._start(engine)
        else:
            self._engines.reset()
        loaded = EngineAnswers(stored.started)
        self._answer_all(loaded, path)
        self._engines.stop()
        return [stored, loaded]

    def _answer_all(self, asked: EngineAnswers, path: Path, *, choices: bool = False) -> None:
        for batch in self._batches(path):
            asked.add(self._answer(batch, choices=choices))

    def _answer(self, questions: list[Question], *, choices: bool = False) -> Answered:
        return self._engines.ask(
            Ask(questions=questions, max_tokens=self._settings.max_tokens, choices=choices)
        )

    def _start(self, engine: dict[str, Any]) -> Started:
        return self._engines.start(Start(engine=engine, adapters=list(self._subject.adapters)))

    def _batches(self, path: Path) -> list[list[Question]]:
        assert self._shape is not None
        sizes = self._sizes()
        if path.crowded:
            return make_crowd(
                self._shape.vocabulary, sizes, seed=_SEED, num_adapters=len(self._subject.adapters)
            )
        adapters, images = len(self._subject.adapters), self._shape.takes_images
        return make_batches(
            self._shape.vocabulary, sizes, seed=_SEED, num_adapters=adapters, images=images
        )

    def _sizes(self) -> PromptSizes:
        assert self._shape is not None, "the plain path is the first to run"
        limit = self._settings.max_model_len - self._settings.max_tokens
        block = max((size for size in self._shape.block_sizes if size < limit // 2), default=1)
        chunk = (
            -(
                -int(self._settings.config.get("tokens_per_chunk", Config().tokens_per_chunk))
                // block
            )
            * block
        )
        return PromptSizes(block=block, chunk=chunk, limit=limit)

    def _engine(self, arguments: dict[str, Any]) -> dict[str, Any]:
        common: dict[str, Any] = {
            "model": self._subject.model,
            "dtype": self._settings.dtype,
            "enforce_eager": True,
            "max_model_len": self._settings.max_model_len,
            "kv_cache_memory_bytes": self._settings.kv_memory_bytes,
            "max_num_seqs": 8,
            "seed": 0,
        }
        if self._subject.adapters:
            common |= {
                "enable_lora": True,
                "max_loras": len(self._subject.adapters),
                "max_lora_rank": 64,
            }
        return common | arguments | self._subject.engine

    def _engine_of(self, path: Path) -> dict[str, Any]:
        arguments = dict(path.engine)
        speculation = arguments.get("speculative_config", {})
        if speculation.get("model") == ITSELF:
            arguments["speculative_config"] = speculation | {"model": self._subject.model}
        if path.in_pieces:
            arguments["max_num_batched_tokens"] = max(16, self._sizes().block * 3 // 2)
        if path.crowded:
            assert self._shape is not None
            length = crowd_tokens(self._sizes())
            arguments["max_model_len"] = length + max(16, self._settings.max_tokens)
            arguments["num_gpu_blocks_override"] = 1 + _CROWD_FITS * sum(
                -(-length // size) for size in self._shape.block_sizes
            )
        return self._engine(arguments)

    def _transfer(self, path: Path, socket: FilePath, notes: FilePath) -> dict[str, Any]:
        ours: dict[str, Any] = {
            "client": {"call_timeout_s": _PATIENT_S, "connect_timeout_s": _PATIENT_S}
        }
        ours |= self._settings.config | path.config
        # load even where computing is faster
        ours["rules"] = {"plan": False} | ours.get("rules", {})
        ours |= {"node": {"socket": str(socket), "idle_exit_s": _NODE_OUTLIVES_ENGINES_S}}
        return {
            "kv_connector": "WitnessedConnector",
            "kv_connector_module_path": "kvhold_lab.verify.witness",
            "kv_role": "kv_both",
            "kv_connector_extra_config": ours | {FOLDER: str(notes)},
        }


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def judged(
    row: VerifyRow,
    path: Path,
    reference: EngineAnswers,
    rounds: list[EngineAnswers],
    verdict: Verdict,
) -> VerifyRow:
    """Tokens prove nothing if half of the questions are unsteady or tied."""
    differ: list[str] = []
    tied: dict[str, int] = {}
    for which, asked in zip(("first", "second"), rounds, strict=True):
        for number, (ours, theirs) in enumerate(
            zip(asked.token_ids, reference.token_ids, strict=True)
        ):
            if ours == theirs or number in reference.unsteady:
                continue
            told = f"question {number} of the {which} round"
            if reference.is_tie(number, ours):
                tied[told] = number
            else:
                differ.append(told)
    no_standard = 2 * len(reference.unsteady) >= len(reference.token_ids)
    judged_in_part = reference.unsteady | set(tied.values())
    proves_nothing = no_standard or (
        not differ and 2 * len(judged_in_part) >= len(reference.token_ids)
    )
    notes = []
    if reference.unsteady:
        notes.append(
            f"vLLM without kvhold answers {len(reference.unsteady)} of "
            f"{len(reference.token_ids)} questions differently from one time to the next"
        )
    if tied:
        notes.append(
            f"{len(tied)} answers part from those without kvhold at a near tie of vLLM's "
            f"own, first {next(iter(tied))}"
        )
    faults = []
    if differ and not no_standard:
        faults.append(f"{len(differ)} answers differ from those without kvhold, first {differ[0]}")
    if verdict.wrong:
        faults.append(
            f"{verdict.wrong} of {verdict.compared} loaded blocks hold other bytes than "
            "were computed"
        )
    if verdict.unknown:
        faults.append(
            f"{verdict.unknown} blocks were loaded for tokens that nobody was seen to compute"
        )
    if verdict.in_part:
        faults.append(f"{verdict.in_part} loads ended within a block, which cannot be compared")
    if not verdict.compared:
        faults.append("no hit: nothing was loaded from kvhold")
    if path.crowded and not sum(asked.num_preemptions for asked in rounds):
        faults.append("nothing was preempted")
    return replace(
        row,
        kv_exact=verdict.is_exact
        if verdict.compared or verdict.unknown or verdict.in_part
        else None,
        tokens_equal=None if proves_nothing else not differ,
        requests=sum(len(asked.token_ids) for asked in rounds),
        outcome="FAIL" if faults else "unsupported" if proves_nothing else "pass",
        reason="; ".join(faults or notes),
        blocks=verdict.compared,
        ties=len(tied),
    )
