"""Llamas with random weights of a fixed seed.

Attention is sharp, so output depends on the whole context.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhold_lab.engines.prompts import (
    END_OF_TEXT,
    VOCAB_SIZE,
    corpus_digest,
    save_tokenizer,
    train_tokenizer,
)
from kvhold_lab.once import default_root, fingerprint, make_once

Weights = npt.NDArray[np.float32]

MAX_MODEL_LEN = 32_768
_RECIPE = 1  # increase when the weights change
_SEED = 20_260
_QUERY_KEY_GAIN = 1.6
_ATTENTION_GAIN = 1.2
_MLP_GAIN = 1.5
_LOGIT_STD = 3.0


@dataclass(frozen=True)
class ModelGeometry:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int = VOCAB_SIZE

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape, _ in self.tensors())

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape and standard deviation; 0: ones."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        fan_in = hidden**-0.5
        yield "model.embed_tokens.weight", (self.vocab_size, hidden), 1.0
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (hidden,), 0.0
            yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden), _QUERY_KEY_GAIN * fan_in
            yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden), _QUERY_KEY_GAIN * fan_in
            yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden), fan_in
            yield (
                f"{prefix}.self_attn.o_proj.weight",
                (hidden, queries),
                _ATTENTION_GAIN * queries**-0.5,
            )
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.0
            yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden), fan_in
            yield f"{prefix}.mlp.up_proj.weight", (inner, hidden), fan_in
            yield f"{prefix}.mlp.down_proj.weight", (hidden, inner), _MLP_GAIN * inner**-0.5
        yield "model.norm.weight", (hidden,), 0.0
        yield "lm_head.weight", (self.vocab_size, hidden), _LOGIT_STD * fan_in


SIZES = {
    "tiny": ModelGeometry(
        hidden_size=192,
        intermediate_size=640,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
    ),
    "small": ModelGeometry(
        hidden_size=512,
        intermediate_size=1_792,
        num_layers=12,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
    ),
    "mid": ModelGeometry(
        hidden_size=1_024,
        intermediate_size=3_072,
        num_layers=16,
        num_heads=16,
        num_kv_heads=2,
        head_dim=64,
    ),
}


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: Path
    geometry: ModelGeometry
    max_model_len: int = MAX_MODEL_LEN

    @property
    def num_parameters(self) -> int:
        return self.geometry.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return self.geometry.kv_bytes_per_token


def make_model(size: str, root: Path | None = None) -> ModelInfo:
    """Make it if it is missing. Safe in several processes. Raises ValueError, OSError."""
    if size not in SIZES:
        raise ValueError(f"{size!r} is not a size of model; there are {', '.join(SIZES)}")
    geometry = SIZES[size]
    root = default_root() if root is None else root
    path = make_once(
        root / f"{size}-{_fingerprint(geometry)}", lambda folder: _write(geometry, folder)
    )
    return ModelInfo(name=size, path=path, geometry=geometry)


def _fingerprint(geometry: ModelGeometry) -> str:
    recipe = [
        _RECIPE,
        _SEED,
        MAX_MODEL_LEN,
        asdict(geometry),
        [std for _, _, std in geometry.tensors()],
        corpus_digest(),
    ]
    return fingerprint(recipe)


def _write(geometry: ModelGeometry, folder: Path) -> None:
    from safetensors.numpy import save_file

    tokenizer = train_tokenizer()
    save_tokenizer(tokenizer, folder, max_model_len=MAX_MODEL_LEN)
    end_of_text_id = tokenizer.token_to_id(END_OF_TEXT)
    assert end_of_text_id is not None, "the trainer knows its special token"
    config = _config(geometry, end_of_text_id=end_of_text_id)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name: _draw(index, shape, std)
        for index, (name, shape, std) in enumerate(geometry.tensors())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _draw(index: int, shape: tuple[int, ...], std: float) -> Weights:
    if std == 0.0:
        return np.ones(shape, dtype=np.float32)
    weights = np.random.default_rng([_SEED, index]).standard_normal(shape, dtype=np.float32)
    weights *= np.float32(std)
    return weights


def _config(geometry: ModelGeometry, *, end_of_text_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end_of_text_id,
        "pad_token_id": end_of_text_id,
        "use_cache": True,
    }
