"""Train a small Llama (RoPE, grouped heads) to answer `language`'s questions, in three minutes of
one core. Documents stand at random distances, so that short ones teach long prompts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvhold_lab.retrieval.language import (
    ANSWER_TOKENS,
    BEGIN,
    END,
    FIRST_VALUE,
    NO_LABEL,
    NUM_VALUES,
    QUESTION_TOKENS,
    VOCAB_SIZE,
    Shape,
    Tokens,
    draw,
)

SEED = 5
MAX_TOKENS = 8_192


@dataclass(frozen=True)
class TrainingPhase:
    """Steps with batches of `rows` prompts of one random length; prompts end before `reach`."""

    steps: int
    rows: int
    shortest: int
    longest: int
    questions: int
    reach: int


PHASES = (
    TrainingPhase(60, 24, 8, 16, 6, 256),
    TrainingPhase(80, 12, 20, 40, 8, 1_024),
    TrainingPhase(80, 4, 60, 140, 10, 4_500),
    TrainingPhase(12, 1, 700, 800, 24, 4_500),
)
_PEAK_RATE, _WARM_UP_STEPS, _LAST_RATE = 1.5e-3, 20, 0.03
_RESOLVE_WEIGHT = 0.5


def train(
    folder: Path, phases: Sequence[TrainingPhase] = PHASES, say: Callable[[str], object] = print
) -> None:
    """Write the model's files."""
    import torch

    torch.manual_seed(SEED)
    model, rng = _make_model(), np.random.default_rng(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.98))
    steps = [phase for phase in phases for _ in range(phase.steps)]
    begun = time.perf_counter()
    model.train()
    for step, phase in enumerate(steps):
        warmth = min(1.0, (step + 1) / _WARM_UP_STEPS)
        cooled = (1 + math.cos(math.pi * step / len(steps))) / 2
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_RATE * warmth * (_LAST_RATE + (1 - _LAST_RATE) * cooled)
        batch = _batch(rng, phase)
        loss, right, resolved = _loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19 or step == len(steps) - 1:
            say(
                f"step {step + 1}, {batch.tokens.shape[1]} tokens: loss {loss.item():.3f}, "
                f"answers {right:.3f}, uses {resolved:.3f}, {time.perf_counter() - begun:.0f} s"
            )
    model.eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class _Batch:
    """[rows, tokens]; labels: of the same place's output"""

    tokens: Tokens
    positions: Tokens
    labels: Tokens
    is_use: Any


def _batch(rng: np.random.Generator, phase: TrainingPhase) -> _Batch:
    shape = Shape.of(int(rng.integers(phase.shortest, phase.longest + 1)))
    rows = [_row(rng, phase, shape) for _ in range(phase.rows)]
    return _Batch(*(np.stack(parts) for parts in zip(*rows, strict=True)))


def _row(rng: np.random.Generator, phase: TrainingPhase, shape: Shape) -> tuple[Any, ...]:
    exercise = draw(rng, shape, phase.questions)
    tokens = np.concatenate([exercise.documents.ravel(), exercise.questions.ravel()])
    labels = np.full_like(exercise.questions, NO_LABEL)
    first = QUESTION_TOKENS - 1
    labels[:, first : first + ANSWER_TOKENS] = exercise.questions[:, QUESTION_TOKENS:]
    resolved = exercise.resolved.ravel()
    spare = max(0, phase.reach - len(tokens))
    gaps = np.diff(np.sort(rng.integers(0, spare + 1, len(exercise.documents) + 1)), prepend=0)
    steps = np.ones(len(tokens), np.int64)
    starts = np.arange(len(gaps)) * shape.document_tokens
    steps[starts] += gaps
    steps[0] -= 1
    return (
        tokens,
        np.cumsum(steps),
        np.concatenate([resolved, labels.ravel()]),
        np.arange(len(tokens)) < len(resolved),
    )


def _loss(model: Any, batch: _Batch) -> tuple[Any, float, float]:
    """The loss, and the shares of answers and uses that are right."""
    import torch

    rows, places = (torch.from_numpy(found) for found in np.nonzero(batch.labels != NO_LABEL))
    tokens = torch.from_numpy(batch.tokens)
    hidden = model.model(
        tokens,
        attention_mask=torch.ones_like(tokens),  # or each document is taken for a sequence
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[rows, places])
    labels = torch.from_numpy(batch.labels)[rows, places]
    is_use = torch.from_numpy(batch.is_use)[rows, places]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    right = (logits.argmax(-1) == labels).float()
    return (
        losses[~is_use].mean() + _RESOLVE_WEIGHT * losses[is_use].mean(),
        right[~is_use].mean().item(),
        right[is_use].mean().item(),
    )


# A hidden state has a token's content, and what the last token and the one before it were. Other
# layers' outputs begin QUIET.
_CONTENT, _LAST, _BEFORE = slice(0, 64), slice(64, 96), slice(96, 128)
_EMBEDDING_STD, _SHARED_NORM, _QUIET = 0.1, 0.6, 0.03
_ALIKE = 2.2  # the factor of queries and keys that look for a token
_STEEP_PAIRS, _STEEP = 5, 7.0  # channel pairs that attend to a near token
_COPIED, _SAID = 0.8, 2.0  # factors of a found token's content, of an answer's logit


def _make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        initializer_range=0.07,
        tie_word_embeddings=False,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    _start_recalling(model)
    return model


def _start_recalling(model: Any) -> None:
    """Set the first heads of each layer so that recall can begin.

    In layer 0 they write the last token and the one before it; above, they look for a place where
    the last token is this one, or the one before the last, and copy its content.
    """
    import torch

    config = model.config
    size, hidden, rotary = config.head_dim, config.hidden_size, config.head_dim // 2
    first, second = slice(0, size), slice(size, 2 * size)
    slow = torch.cat(
        [torch.arange(rotary // 2, rotary), torch.arange(rotary // 2, rotary) + rotary]
    )
    content = _CONTENT.stop - _CONTENT.start
    with torch.no_grad():
        basis = torch.linalg.qr(torch.randn(content, content)).Q
        # a direction that means only "a token is here", and what is read of the others
        shared, reads = basis[0], basis[1 : 1 + len(slow)]
        embeddings = model.model.embed_tokens.weight
        embeddings[:, content:] *= 0.1
        embeddings[:, _CONTENT] = torch.randn(len(embeddings), content) * _EMBEDDING_STD
        embeddings[:, _CONTENT] -= torch.outer(embeddings[:, _CONTENT] @ shared, shared)
        embeddings[:, _CONTENT] += _SHARED_NORM * shared
        answers = slice(FIRST_VALUE, FIRST_VALUE + NUM_VALUES)
        model.lm_head.weight.zero_()
        model.lm_head.weight[answers, _CONTENT] = _SAID * embeddings[answers, _CONTENT]
        norm = embeddings.norm(dim=1).mean()
        written = torch.eye(len(slow)) * norm / hidden**0.5
        copied = _COPIED * torch.eye(content) * norm / hidden**0.5
        direction = torch.zeros(hidden)
        direction[_CONTENT] = shared * norm / (_SHARED_NORM * hidden**0.5)
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            query, key = attention.q_proj.weight, attention.k_proj.weight
            value, output = attention.v_proj.weight, attention.o_proj.weight
            output *= _QUIET
            layer.mlp.down_proj.weight *= _QUIET
            for part in (query[first], query[second], key[first], value[first]):
                part.zero_()
            output[:, : 2 * size] = 0
            if number == 0:
                _attend_to_near(query, key, direction, config.rope_parameters["rope_theta"])
                value[: len(slow), _CONTENT] = reads
                for head, written in ((0, _LAST), (size, _BEFORE)):
                    output[written, head : head + len(slow)] = (
                        torch.eye(len(slow)) * norm / hidden**0.5
                    )
                continue
            key[slow, _LAST] = _ALIKE * torch.eye(len(slow))
            query[slow, _CONTENT] = _ALIKE * reads
            query[slow + size, _BEFORE] = _ALIKE * torch.eye(len(slow))
            value[first, _CONTENT] = torch.eye(content) - torch.outer(shared, shared)
            for head in (first, second):
                output[_CONTENT, head] = copied


def _attend_to_near(query: Any, key: Any, direction: Any, theta: float) -> None:
    import torch

    size = 64
    rotary = size // 2
    angles = theta ** (-torch.arange(rotary) / rotary)
    near = torch.zeros(2, rotary)
    near[0, :_STEEP_PAIRS] = _STEEP
    key[:size] = torch.outer(near.flatten(), direction)
    for head, distance in ((0, 1), (1, 2)):
        turned = torch.stack(
            [near[0] * (distance * angles).cos(), -near[0] * (distance * angles).sin()]
        )
        query[head * size : (head + 1) * size] = torch.outer(turned.flatten(), direction)
