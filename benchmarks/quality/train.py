"""Train the small model that `kvhold bench quality` asks: some ten minutes of one core.

    python benchmarks/quality/train.py  # writes benchmarks/quality/model/

A Llama (RoPE, grouped heads, head_dim 64) learns the questions of `kvhold_lab.bench.quality.tasks`,
contexts short at first. The same seed gives the same steps. Tests are drawn from another seed.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvhold_lab.bench.quality.model import RECALL_MARK, RECALL_VERSION
from kvhold_lab.bench.quality.tasks import (
    BEGIN,
    KINDS,
    NO_KIND,
    NUM_KEYS,
    VOCAB_SIZE,
    Asked,
    Exams,
    draw,
)

SEED = 11
FOLDER = Path(__file__).resolve().parent / "model"


@dataclass(frozen=True)
class Phase:
    """Steps with batches of `num_exams` contexts of one random length."""

    steps: int
    num_exams: int
    shortest: int
    longest: int
    asked: Asked
    num_keys: int = NUM_KEYS


PHASES = (
    Phase(100, 32, 13, 21, Asked(lookups=6, hops=0, runs=0), 24),
    Phase(400, 32, 56, 72, Asked(lookups=6, hops=4, runs=1)),
    Phase(300, 24, 72, 160, Asked(lookups=10, hops=5, runs=1)),
    Phase(350, 12, 160, 512, Asked(lookups=24, hops=10, runs=2)),
)

# Initial weights of heads. ALIKE: the factor of queries and keys. STEEP_PAIRS, STEEP: the number of
# channel pairs that attend to the previous token, and their strength. QUIET: the factor of the
# layers' outputs, which would otherwise hide the embeddings.
ALIKE, STEEP_PAIRS, STEEP, QUIET = 1.2, 5, 7.0, 0.12
PEAK_RATE, WARM_UP_STEPS, LAST_RATE = 1.5e-3, 50, 0.03


def model_of_seed(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        initializer_range=0.07,
        tie_word_embeddings=True,
        bos_token_id=BEGIN,
        eos_token_id=None,
        **{RECALL_MARK: RECALL_VERSION},
    )
    model = LlamaForCausalLM(config)
    start_recalling(model)
    return model


def start_recalling(model: Any) -> None:
    """Set the first half of each layer's heads so that recall can begin.

    In layer 0 they write the previous token beside the token's own embedding; above, they look for
    a token with the current one beside it. From random weights, this takes many times as many
    steps. The rest is learnt.
    """
    config = model.config
    size, rotary = config.head_dim, config.head_dim // 2
    first = slice(0, size)  # the first head of keys and values
    heads = [
        slice(at * size, (at + 1) * size)
        for at in range(config.num_attention_heads // config.num_key_value_heads)
    ]
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(rotary) / rotary)
    near = torch.zeros(2, rotary)
    near[0, :STEEP_PAIRS] = STEEP
    before = torch.stack([near[0] * angles.cos(), -near[0] * angles.sin()])
    with torch.no_grad():
        shared = torch.randn(config.hidden_size)
        # a direction that means only "a token is here"
        model.model.embed_tokens.weight.add_(shared * config.initializer_range)
        direction = shared / shared.norm() / (config.hidden_size / 2) ** 0.5
        reads, writes = (
            torch.nn.init.orthogonal_(torch.empty(size, config.hidden_size)) for _ in range(2)
        )
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            attention.o_proj.weight *= QUIET
            layer.mlp.down_proj.weight *= QUIET
            attention.v_proj.weight[first] = reads
            if number == 0:
                attention.k_proj.weight[first] = torch.outer(near.flatten(), direction)
                attention.q_proj.weight[heads[0]] = torch.outer(before.flatten(), direction)
                attention.o_proj.weight[:, heads[0]] = QUIET * writes.T
            else:
                attention.k_proj.weight[first] = ALIKE * writes
                for head in heads:
                    attention.q_proj.weight[head] = ALIKE * reads
                    attention.o_proj.weight[:, head] = QUIET * reads.T


def batches(
    rng: np.random.Generator, phases: tuple[Phase, ...] = PHASES
) -> Iterator[tuple[int, Exams]]:
    """The number of the phase, and a batch."""
    for number, phase in enumerate(phases):
        for _ in range(phase.steps):
            num_tokens = int(rng.integers(phase.shortest, phase.longest + 1))
            yield (
                number,
                draw(
                    rng,
                    num_exams=phase.num_exams,
                    num_tokens=num_tokens,
                    asked=phase.asked,
                    num_keys=phase.num_keys,
                ),
            )


def answers_of(model: Any, exams: Exams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [answers, vocabulary], answers [answers], and their kinds [answers]."""
    tokens = torch.from_numpy(np.concatenate([exams.contexts, exams.questions], axis=1))
    start = exams.contexts.shape[1]
    rows, places = (torch.from_numpy(index) for index in np.nonzero(exams.kinds != NO_KIND))
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[rows, start + places - 1])
    return logits, tokens[rows, start + places], torch.from_numpy(exams.kinds)[rows, places]


def train(seed: int, say: Any = print) -> Any:
    model, rng = model_of_seed(seed), np.random.default_rng(seed)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))
    total = sum(phase.steps for phase in PHASES)
    begun, seen = time.perf_counter(), 0
    model.train()
    for step, (number, exams) in enumerate(batches(rng)):
        share = step / total
        rate = (
            PEAK_RATE
            * min(1.0, (step + 1) / WARM_UP_STEPS)
            * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits, answers, kinds = answers_of(model, exams)
        loss = torch.nn.functional.cross_entropy(logits, answers)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += exams.contexts.size + exams.questions.size
        if step % 50 == 49 or step == total - 1:
            right = logits.argmax(-1) == answers
            shares = {
                name: right[kinds == mark].float().mean().item() for name, mark in KINDS.items()
            }
            took, worked = time.perf_counter() - begun, time.process_time()
            shown = "  ".join(f"{name} {share:5.3f}" for name, share in shares.items())
            say(
                f"{step + 1:5} phase {number}  loss {loss.item():6.4f}  {shown}  "
                f"{took:5.0f} s, {worked:5.0f} of CPU, {seen:,} tokens",
                flush=True,
            )
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    model = train(options.seed)
    model.to(torch.bfloat16).save_pretrained(options.folder)
    (options.folder / "generation_config.json").unlink(missing_ok=True)
    with torch.no_grad():
        exams = draw(
            np.random.default_rng(options.seed + 1),
            num_exams=64,
            num_tokens=384,
            asked=Asked(lookups=20, hops=6, runs=2),
        )
        logits, answers, kinds = answers_of(model.float(), exams)
    right = logits.argmax(-1) == answers
    print(
        "of 384-token contexts: "
        + ", ".join(
            f"{name} {right[kinds == mark].float().mean():.4f}" for name, mark in KINDS.items()
        )
    )


if __name__ == "__main__":
    main()
