"""Answers with and without blend, and who may have a permit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

import numpy as np
import torch

from kvhold import __version__
from kvhold.blend.canary import Drift, drift_of
from kvhold.blend.permits import Permit, now
from kvhold.blend.selection import Selector
from kvhold.core.blend_config import BlendConfig
from kvhold.integrations.transformers.blending import Blender
from kvhold_lab.bench.blend.arms import (
    BlendArm,
    BlendPrompt,
    PrefilledPrompt,
    answer,
    compute_alone,
    prefill,
)
from kvhold_lab.bench.blend.intervals import change_interval, interval, prompts_needed
from kvhold_lab.verify.blend.questions import BlendQuestion, Score, Speech

_FULL = BlendArm(None)


@dataclass(frozen=True)
class BlendVerifyRow:
    """As in a permit.

    agreement: share of prompts with the same likeliest next token
    reason: why there is no permit
    is_worse: beyond a bound with 95 % confidence
    prompts_needed: for a permit, with changes like these; 0: no number
    """

    model: str
    selector: str
    data: str
    prompts: int
    recomputed: float
    f1: float
    f1_full: float
    f1_low: float
    f1_high: float
    exact_match: float
    exact_match_full: float
    kl: float
    kl_high: float
    kl_usual: float
    agreement: float
    reason: str
    is_worse: bool
    prompts_needed: int

    def permit(self, model: str, config: BlendConfig) -> Permit:
        same = {
            name: getattr(self, name) for name in Permit.__struct_fields__ if hasattr(self, name)
        }
        bounds = {"max_f1_loss": config.max_f1_loss, "max_kl": config.max_kl}
        return Permit(**same | bounds | {"model": model, "granted": now(), "version": __version__})


@dataclass(frozen=True)
class _Trial:
    score: Score
    full: Score
    drift: Drift
    recomputed: float


def measure(
    blender: Blender,
    speech: Speech,
    questions: Sequence[BlendQuestion],
    selectors: Mapping[str, Selector],
    config: BlendConfig,
    *,
    model: str,
    data: str,
    say: Callable[[str], None],
) -> Iterator[BlendVerifyRow]:
    """selectors: by their texts"""
    trials: dict[str, list[_Trial]] = {text: [] for text in selectors}
    for number, question in enumerate(questions):
        if number % 50 == 0 and number:
            say(f"{number} of {len(questions)} prompts")
        for text, trial in _try(blender, speech, question, selectors):
            trials[text].append(trial)
    for text in selectors:
        yield _row(trials[text], config, model=model, text=text, data=data)


def _try(
    blender: Blender, speech: Speech, question: BlendQuestion, selectors: Mapping[str, Selector]
) -> Iterator[tuple[str, _Trial]]:
    device = blender.model.device
    tokens = torch.tensor([question.tokens], device=device)
    stored = [
        compute_alone(blender, torch.tensor([document], device=device))
        for document in question.documents
    ]
    prompt = BlendPrompt(tokens, (), stored, [], 0, start=len(question.before))

    def run(arm: BlendArm) -> tuple[PrefilledPrompt, list[int]]:
        prefilled = prefill(blender, prompt, arm)
        said = answer(blender, prefilled, ends=speech.ends(question), limit=speech.limit)
        return prefilled, said

    in_full, full = run(_FULL)
    full_score = speech.score(full, question, full)
    for text, selector in selectors.items():
        prefilled, said = run(BlendArm(selector))
        yield (
            text,
            _Trial(
                speech.score(said, question, full),
                full_score,
                drift_of(in_full.logits, prefilled.logits),
                prefilled.num_recomputed / tokens.shape[1],
            ),
        )


def _row(
    trials: list[_Trial], config: BlendConfig, *, model: str, text: str, data: str
) -> BlendVerifyRow:
    changes = [trial.score.f1 - trial.full.f1 for trial in trials]
    kls = [trial.drift.kl for trial in trials]
    low, high = change_interval(changes)
    kl_low, kl_high = interval(kls)
    most_loss, most_kl = config.max_f1_loss, config.max_kl
    needed, is_worse = prompts_needed(changes, most_loss), high < -most_loss
    reasons = []
    if low < -most_loss:
        reasons.append(
            f"F1 may be {-100 * low:.1f} points lower; blend.max_f1_loss is {100 * most_loss:g} "
            "points"
        )
    if not isfinite(kl_high):
        reasons.append("the model's logits are not finite")
        needed, is_worse = 0, True
    elif most_kl is not None and kl_high > most_kl:
        reasons.append(f"the KL may be {kl_high:.3g}; blend.max_kl is {most_kl:g}")
        needed, is_worse = needed if fmean(kls) < most_kl else 0, is_worse or kl_low > most_kl
    return BlendVerifyRow(
        model=model,
        selector=text,
        data=data,
        prompts=len(trials),
        recomputed=fmean(trial.recomputed for trial in trials),
        f1=fmean(trial.score.f1 for trial in trials),
        f1_full=fmean(trial.full.f1 for trial in trials),
        f1_low=low,
        f1_high=high,
        exact_match=fmean(trial.score.is_exact for trial in trials),
        exact_match_full=fmean(trial.full.is_exact for trial in trials),
        kl=fmean(kls),
        kl_high=kl_high,
        kl_usual=float(np.quantile(kls, 0.95, method="higher")),
        agreement=fmean(trial.drift.agrees for trial in trials),
        reason="; ".join(reasons),
        is_worse=is_worse,
        prompts_needed=needed if reasons else len(trials),
    )
