from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import numpy as np

from kvhold.blend.canary import drift_of
from kvhold.core.errors import ConfigError
from kvhold.integrations.transformers.blending import Blender
from kvhold_lab.bench.blend.arms import BlendPrompt, answer, arms, ask, f1, names_of, prefill
from kvhold_lab.bench.blend.intervals import interval
from kvhold_lab.retrieval.language import NUM_DOCUMENTS, QUESTION_TOKENS, Shape, draw
from kvhold_lab.retrieval.model import make_retrieval_model

_SEED = 1_000_003
_TIMED_PROMPTS = 3


@dataclass(frozen=True)
class BlendRow:
    """recomputed:  share of the prompt's tokens computed in the last layer
    ttft_ratio:     median time until the first token's logits, with copies / full prefill's
    f1, f1_full:    of the answers' tokens
    f1_low, f1_high: 95 % interval of f1 - f1_full, over prompts
    kl:             mean KL(full || this) of the next token, in nats
    reused_tokens:  that keep stored KV, mean
    """

    engine: str
    selector: str
    recomputed: float
    ttft_s: float
    ttft_ratio: float
    f1: float
    f1_full: float
    f1_low: float
    f1_high: float
    kl: float
    reused_tokens: float
    prompts: int


def load_blender(folder: Path | None) -> Blender:
    import torch
    from transformers import AutoModelForCausalLM

    folder = folder or make_retrieval_model()
    return Blender(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def rows(
    blender: Blender,
    *,
    num_tokens: int,
    num_prompts: int,
    rounds: int,
    only: tuple[str, ...] = (),
    seed: int = _SEED,
) -> Iterator[BlendRow]:
    known = arms(len(blender.geometry.empty().layers))
    names = names_of(only, known)
    shape = Shape.of((num_tokens - QUESTION_TOKENS) // NUM_DOCUMENTS)
    rng = np.random.default_rng(seed)
    tries: dict[str, list[_Try]] = {name: [] for name in names}
    timed: list[BlendPrompt] = []
    for _ in range(num_prompts):
        prompt = ask(blender, draw(rng, shape, 1), rng)
        if len(timed) < _TIMED_PROMPTS:
            timed.append(prompt)
        full = None
        for name in names:
            prefilled = prefill(blender, prompt, known[name])
            full = prefilled.logits if full is None else full
            kl = drift_of(full, prefilled.logits).kl
            right = f1(answer(blender, prefilled), prompt.answer)
            counts = prefilled.num_recomputed, prefilled.num_reused
            tries[name].append(_Try(right, kl, *counts))
    seconds = _times(blender, timed, names, rounds)
    for name in names:
        yield _row(name, tries[name], tries["full"], seconds[name], seconds["full"])


@dataclass(frozen=True)
class _Try:
    f1: float
    kl: float
    num_recomputed: int
    num_reused: int


def _times(
    blender: Blender, prompts: Sequence[BlendPrompt], names: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each prompt and round; the first round is not counted."""
    if rounds < 5:
        raise ConfigError(f"rounds is {rounds}; medians need 5 or more")
    known = arms(len(blender.geometry.empty().layers))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1 + rounds):
        for prompt in prompts:
            for name in names if number % 2 else reversed(names):
                begun = perf_counter()
                prefill(blender, prompt, known[name])
                if number:
                    seconds[name].append(perf_counter() - begun)
    return seconds


def _row(
    name: str, tries: list[_Try], full: list[_Try], seconds: list[float], full_seconds: list[float]
) -> BlendRow:
    low, high = interval([one.f1 - other.f1 for one, other in zip(tries, full, strict=True)])
    total = tries[0].num_recomputed + tries[0].num_reused
    return BlendRow(
        engine="transformers",
        selector=name,
        recomputed=mean(one.num_recomputed for one in tries) / total,
        ttft_s=median(seconds),
        ttft_ratio=median(seconds) / median(full_seconds),
        f1=mean(one.f1 for one in tries),
        f1_full=mean(one.f1 for one in full),
        f1_low=low,
        f1_high=high,
        kl=mean(one.kl for one in tries),
        reused_tokens=mean(one.num_reused for one in tries),
        prompts=len(tries),
    )
