"""Ways to prefill one prompt: in full, from a prefix, and from documents' own KV."""

from collections.abc import Callable, Hashable, Mapping, Sequence
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

_CHUNK_TOKENS = 16


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
    start:     of the first document
    """

    tokens: Any
    answer: tuple[int, ...]
    stored: list[list[tuple[Any, Any]]]
    earlier: list[tuple[Any, Any]]
    shared: int
    start: int = 0


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
        [compute_alone(blender, document[None]) for document in documents],
        compute_alone(blender, beginning) if shared_tokens else [],
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
        logits = next_logits(blender, kv, prompt.tokens[:, shared:])
        return PrefilledPrompt(kv, logits, num_tokens - shared, shared)
    kv, spans = blender.geometry.allocated(1, num_tokens), []
    start = prompt.start
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


def _ends(tokens: list[int]) -> bool:
    return tokens[-1] == END


def answer(
    blender: Blender,
    prefilled: PrefilledPrompt,
    *,
    ends: Callable[[list[int]], bool] = _ends,
    limit: int = ANSWER_TOKENS,
) -> list[int]:
    """Continue greedily, up to the ending token."""
    tokens: list[int] = []
    logits = prefilled.logits
    while len(tokens) < limit:
        tokens.append(int(logits.argmax()))
        if ends(tokens):
            return tokens[:-1]
        logits = next_logits(blender, prefilled.kv, torch.tensor([tokens[-1:]]))
    return tokens


def next_logits(blender: Blender, kv: Any, tokens: Any) -> Any:
    """[vocabulary], after `tokens` [1, n], which `kv` has then, too"""
    with torch.no_grad():
        output = blender.model(
            tokens.to(blender.model.device), past_key_values=kv, use_cache=True, logits_to_keep=1
        )
    return output.logits[0, -1]


def f1(found: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """Of the tokens or words, in any order."""
    if not found and not expected:
        return 1.0
    common = sum(min(found.count(token), expected.count(token)) for token in set(found))
    return 2 * common / (len(found) + len(expected))


def compute_alone(blender: Blender, tokens: Any) -> list[tuple[Any, Any]]:
    kv = blender.geometry.empty()
    next_logits(blender, kv, tokens)
    return [(layer.keys[0], layer.values[0]) for layer in kv.layers]


def names_of(only: tuple[str, ...], known: Mapping[str, BlendArm]) -> list[str]:
    """Arms whose names begin as those in `only`; "full" always."""
    return [
        name
        for name in known
        if name == "full" or not only or any(name.startswith(part) for part in only)
    ]
