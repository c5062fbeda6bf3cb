"""Tiny models with random weights, large enough apart in their logits that a rounding error changes
no choice; and prompts for them.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from kvhold.core.config import Config, load_config

VOCABULARY = 211
SMALLEST_TOKEN = 3  # below are pad, begin and end
TOKENS_PER_CHUNK = 16

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=256,
    ),
}


def sizes(**others: Any) -> dict[str, Any]:
    """Arguments for most configurations of transformers."""
    return {**_SIZES, **others}


def model_of(config: Any, *, seed: int = 0) -> Any:
    """A causal language model with random weights, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_model(kind: str = "llama", *, seed: int = 0) -> Any:
    return model_of(CONFIGS[kind](), seed=seed)


def prompt_of(num_tokens: int, *, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """int64 [rows, num_tokens]; two lengths of one seed share their beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALLEST_TOKEN, VOCABULARY, (rows, 512), generator=generator)[
        :, :num_tokens
    ]


def small_chunks() -> Config:
    return load_config({"tokens_per_chunk": TOKENS_PER_CHUNK}, environ={})
