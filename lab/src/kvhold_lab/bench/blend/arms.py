"""Ways to prefill one prompt: in full, from a prefix, and from documents' own KV."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvhold.blend.selection import (
    BlendPlan,
    Budget,
    DeviationSelector,
    FirstTokensSelector,
    NoSelection,
    QuerySelector,
    Selector,
    StoredSpan,
)
from kvhold.integrations.transformers.blending import Blender
from kvhold_lab.retrieval.language import ANSWER_TOKENS, END, QUESTION_TOKENS, Exercise

_CHUNK_TOKENS = 16  # of a prefix cache


@dataclass(frozen=True)
class BlendArm:
    """selector: None: no documents' KV
    is_turned:  keys are turned to their new positions
    """

    selector: Selector | None
    is_turned: bool = True
    has_prefix: bool = False


def arms(layers: int) -> dict[str, BlendArm]:
    """By the names of rows; the first is the full prefill."""
    found = {
        "full": BlendArm(None),
        "prefix": BlendArm(None, has_prefix=True),
        "unturned": BlendArm(NoSelection(), is_turned=False),
        "none": BlendArm(NoSelection()),
    }
    for percent in (5, 10, 15, 19):
        budget = Budget(ratio=percent / 100)
        found[f"first-{percent}"] = BlendArm(FirstTokensSelector(budget))
        for check in range(1, min(3, layers)):
            found[f"deviation@{check}-{percent}"] = BlendArm(
                DeviationSelector((budget,), check_layer=check)
            )
        found[f"query-{percent}"] = BlendArm(QuerySelector(budget))
    return found


@dataclass(frozen=True)
class BlendPrompt:
    """A question after documents.

    tokens:    [1, tokens]
    stored:    of each document alone, from position 0: by layer, keys and values
               `[heads, document_tokens, head_dim]`
    earlier:   KV of another prompt, whose first `shared` tokens are this one's
    """

    tokens: Any
    answer: tuple[int, ...]
    stored: list[list[tuple[Any, Any]]]
    earlier: list[tuple[Any, Any]]
    shared: int


@dataclass(frozen=True)
class PrefilledPrompt:
    """logits: of the next token, [vocabulary]"""

    kv: Any
    logits: Any
    num_recomputed: int
    num_reused: int


def ask(blender: Blender, exercise: Exercise, rng: np.random.Generator) -> BlendPrompt:
    """The exercise's first question; the earlier prompt has the documents in another order."""
    documents = torch.from_numpy(exercise.documents)
    asked = torch.from_numpy(exercise.questions[0])
    order = rng.permutation(len(documents)).tolist()
    shared = 0
    while shared < len(order) and order[shared] == shared:
        shared += 1
    shared_tokens = shared * documents.shape[1] // _CHUNK_TOKENS * _CHUNK_TOKENS
    beginning = documents.flatten()[None, :shared_tokens]
    return BlendPrompt(
        torch.cat([documents.flatten(), asked[:QUESTION_TOKENS]])[None],
        tuple(exercise.questions[0, QUESTION_TOKENS:-1].tolist()),
        [_alone(blender, document[None]) for document in documents],
        _alone(blender, beginning) if shared_tokens else [],
        shared_tokens,
    )


def prefill(blender: Blender, prompt: BlendPrompt, arm: BlendArm) -> PrefilledPrompt:
    num_tokens = prompt.tokens.shape[1]
    if arm.selector is None:
        shared = prompt.shared if arm.has_prefix else 0
        kv = blender.geometry.empty()
        if shared:
            for number, (keys, values) in enumerate(prompt.earlier):
                kv.update(keys[None].clone(), values[None].clone(), number)
        with torch.no_grad():
            logits = blender.model(
                prompt.tokens[:, shared:], past_key_values=kv, use_cache=True, logits_to_keep=1
            ).logits
        return PrefilledPrompt(kv, logits[0, -1], num_tokens - shared, shared)
    kv, spans = blender.geometry.allocated(1, num_tokens), []
    start = 0
    for document in prompt.stored:
        stop = start + document[0][0].shape[1]
        for layer, (keys, values) in zip(kv.layers, document, strict=True):
            layer.keys[0, :, start:stop] = keys
            layer.values[0, :, start:stop] = values
        spans.append(StoredSpan(start, stop, 0 if arm.is_turned else start))
        start = stop
    plan = BlendPlan(num_tokens, tuple(spans))
    blended = blender.prefill(prompt.tokens, kv, plan, arm.selector)
    return PrefilledPrompt(kv, blended.logits[0, -1], blended.num_recomputed, blended.num_reused)


def answer(blender: Blender, prefilled: PrefilledPrompt) -> list[int]:
    """Continue greedily, up to END."""
    tokens: list[int] = []
    logits = prefilled.logits
    while (token := int(logits.argmax())) != END and len(tokens) < ANSWER_TOKENS:
        tokens.append(token)
        with torch.no_grad():
            logits = blender.model(
                torch.tensor([[token]]), past_key_values=prefilled.kv, use_cache=True
            ).logits[0, -1]
    return tokens


def f1(found: list[int], expected: tuple[int, ...]) -> float:
    """Of the tokens, in any order."""
    common = sum(min(found.count(token), expected.count(token)) for token in set(found))
    return 2 * common / (len(found) + len(expected))


def _alone(blender: Blender, tokens: Any) -> list[tuple[Any, Any]]:
    kv = blender.geometry.empty()
    with torch.no_grad():
        blender.model(tokens, past_key_values=kv, use_cache=True, logits_to_keep=1)
    return [(layer.keys[0], layer.values[0]) for layer in kv.layers]


def names_of(only: tuple[str, ...], known: Mapping[str, BlendArm]) -> list[str]:
    """Arms whose names begin as those in `only`; "full" always."""
    return [
        name
        for name in known
        if name == "full" or not only or any(name.startswith(part) for part in only)
    ]
