"""Documents in another order: full prefill, and blend with a permit measured here."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from kvhold.blend.permits import Permits
from kvhold.blend.selection import selector_of, selector_text
from kvhold.cache import open_cache
from kvhold.core.config import Config, load_config
from kvhold.core.errors import ConfigError
from kvhold.integrations.transformers import Reuse
from kvhold_lab.bench.blend.arms import f1
from kvhold_lab.retrieval.language import (
    ANSWER_TOKENS,
    END,
    FIRST_VALUE,
    NUM_DOCUMENTS,
    QUESTION_TOKENS,
    Exercise,
    Shape,
    draw,
)
from kvhold_lab.verify.blend.measure import BlendVerifyRow, measure
from kvhold_lab.verify.blend.model import LoadedModel, load, names_in_permits
from kvhold_lab.verify.blend.questions import made_questions

_SEED = 3_000_017
_PERMIT_TOKENS = 1_000
_SETTINGS = {"selector": "query", "ratio": 0.19, "max_f1_loss": 0.1}


@dataclass(frozen=True)
class BlendAnswer:
    """full_s, blended_s: TTFT
    expected, full, blended: numbers of the language's values
    recomputed, reused: tokens
    """

    full_s: float
    blended_s: float
    expected: list[int]
    full: list[int]
    blended: list[int]
    recomputed: int
    reused: int


@dataclass(frozen=True)
class BlendDemoResult:
    """canary_kl: of one more prompt, in nats"""

    num_parameters: int
    prompt_tokens: int
    permit: BlendVerifyRow
    max_f1_loss: float
    canary_kl: float
    answers: list[BlendAnswer] = field(default_factory=list)

    @property
    def recomputed(self) -> float:
        return mean(one.recomputed for one in self.answers) / self.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """Times are medians."""
        full_s = median(one.full_s for one in self.answers)
        blended_s = median(one.blended_s for one in self.answers)
        return {
            "model_params": self.num_parameters,
            "prompt_tokens": self.prompt_tokens,
            "selector": self.permit.selector,
            "full_ttft_s": full_s,
            "blended_ttft_s": blended_s,
            "ttft_ratio": blended_s / full_s,
            "recomputed": self.recomputed,
            "reused_tokens": round(mean(one.reused for one in self.answers)),
            "f1_full": mean(f1(one.full, one.expected) for one in self.answers),
            "f1": mean(f1(one.blended, one.expected) for one in self.answers),
            "permit": {
                name: getattr(self.permit, name)
                for name in ("prompts", "f1", "f1_full", "f1_low", "f1_high", "kl")
            },
            "canary_kl": self.canary_kl,
            "runs": len(self.answers),
        }


def run_blend(
    *,
    num_tokens: int,
    repeats: int,
    permit_prompts: int,
    say: Callable[[str], None],
    model: str | None = None,
    **settings: Any,
) -> BlendDemoResult:
    """model: folder of a model of the lab's language; None: the trained one
    settings: of `blend`, instead of the demo's

    Raises ConfigError: the measurement gives no permit.
    """
    loaded = load(model, dtype="float32", limit=ANSWER_TOKENS)
    shape = Shape.of((num_tokens - QUESTION_TOKENS) // NUM_DOCUMENTS)
    rng = np.random.default_rng(_SEED)
    with tempfile.TemporaryDirectory(prefix="kvhold-demo-") as folder:
        blend = _SETTINGS | settings | {"permits": folder}
        config = _config(blend, canary_share=0)
        say(f"measuring {permit_prompts} prompts for a permit ...")
        permit = _measure(loaded, config, permit_prompts, say)
        exercises = [draw(rng, shape, 1) for _ in range(repeats + 2)]
        room = 4 * len(exercises) * loaded.blender.geometry.layout.chunk_bytes(0, num_tokens)
        with open_cache(ram_bytes=room + (64 << 20), huge_pages="never") as cache:
            reuse = Reuse(loaded.blender.model, cache, config=config)
            answers = [_ask(reuse, exercise, rng) for exercise in exercises[:-1]]
            watched = Reuse(loaded.blender.model, cache, config=_config(blend, canary_share=1))
            drift = _compare(reuse, watched, exercises[-1], rng)
    return BlendDemoResult(
        loaded.blender.model.num_parameters(),
        NUM_DOCUMENTS * shape.document_tokens + QUESTION_TOKENS,
        permit,
        config.blend.max_f1_loss,
        drift,
        answers[1:],
    )


def _config(blend: dict[str, Any], *, canary_share: float) -> Config:
    return load_config({"blend": blend | {"canary_share": canary_share}}, environ={})


def _measure(
    loaded: LoadedModel, config: Config, count: int, say: Callable[[str], None]
) -> BlendVerifyRow:
    selector = selector_of(config.blend)
    assert selector is not None
    name, questions = made_questions(loaded.speech, count, num_tokens=_PERMIT_TOKENS)
    [row] = measure(
        loaded.blender,
        loaded.speech,
        questions,
        {selector_text(selector): selector},
        config.blend,
        model=loaded.name,
        data=name,
        say=say,
    )
    if row.reason:
        raise ConfigError(f"no permit for {row.selector}: {row.reason}")
    permits = Permits.of(config.blend)
    for name in names_in_permits(loaded, ""):
        permits.grant(row.permit(name, config.blend))
    return row


def _ask(reuse: Reuse, exercise: Exercise, rng: np.random.Generator) -> BlendAnswer:
    _show_documents(reuse, exercise, rng)
    prompt, spans = _prompt(exercise.documents, exercise)
    model, options = reuse.model, {"do_sample": False, "max_new_tokens": ANSWER_TOKENS}

    def timed(generate: Any, **marks: Any) -> float:
        begun = perf_counter()
        generate(prompt, do_sample=False, max_new_tokens=1, **marks)
        return perf_counter() - begun

    full_s, blended_s = timed(model.generate), timed(reuse.generate, spans=spans)
    blended = reuse.generate(prompt, spans=spans, **options)
    return BlendAnswer(
        full_s,
        blended_s,
        _values(exercise.questions[0, QUESTION_TOKENS:].tolist()),
        _values(model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()),
        _values(blended[0, prompt.shape[1] :].tolist()),
        reuse.last.num_computed,
        reuse.last.num_blended,
    )


def _compare(reuse: Reuse, watched: Reuse, exercise: Exercise, rng: np.random.Generator) -> float:
    _show_documents(reuse, exercise, rng)
    prompt, spans = _prompt(exercise.documents, exercise)
    watched.generate(prompt, spans=spans, do_sample=False, max_new_tokens=1)
    assert watched.last.drift is not None
    return watched.last.drift.kl


def _show_documents(reuse: Reuse, exercise: Exercise, rng: np.random.Generator) -> None:
    order = rng.permutation(NUM_DOCUMENTS)
    while order[0] == 0:
        order = rng.permutation(NUM_DOCUMENTS)
    prompt, spans = _prompt(exercise.documents[order], exercise)
    reuse.generate(prompt, spans=spans, do_sample=False, max_new_tokens=1)


def _prompt(documents: Any, exercise: Exercise) -> tuple[Any, list[tuple[int, int]]]:
    """[1, tokens], and the documents' places."""
    question = exercise.questions[0, :QUESTION_TOKENS]
    tokens = torch.from_numpy(np.concatenate([documents.flatten(), question]))[None]
    size = documents.shape[1]
    return tokens, [(at * size, (at + 1) * size) for at in range(len(documents))]


def _values(tokens: list[int]) -> list[int]:
    ends = tokens.index(END) if END in tokens else len(tokens)
    return [token - FIRST_VALUE for token in tokens[:ends]]
