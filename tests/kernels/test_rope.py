"""Keys turned to new positions are those computed there, for every layout, scaling and dtype.

A stored key is within one rounding u of its dtype (2**-8, 2**-11, 2**-24 of its magnitude), and
turning rounds once more: the bound of a pair of norm r is 2 u r, and 2**-21 r of float32
arithmetic.
"""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvhold.core.errors import ConfigError
from kvhold.kernels import rope as dispatcher
from kvhold.kernels.reference_rope import pairs
from kvhold.kernels.rope import Rope, rotate
from kvhold.kernels.rope_config import HALF, INTERLEAVED
from kvhold.kernels.rotary import Scaling
from tests.kernels.compiled import GPUS, memory_of_threads

CASES = 10_000
WORKERS: tuple[dispatcher.Worker, ...] = ("numba", "reference")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SCALINGS = (
    Scaling(),
    Scaling("linear", 4.0),
    Scaling("dynamic", 2.0, 512),
    Scaling("yarn", 4.0, 1024),
    Scaling("yarn", 8.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
    Scaling("llama3", 8.0, 8192),
)


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The Triton worker under its interpreter. Other tests get another module."""
    pytest.importorskip("triton", reason="no Triton in this environment")
    names = [f"kvhold.kernels.triton_{name}" for name in ("floats", "rope")]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        patch.setenv("TRITON_INTERPRET", "1")
        module = import_module(names[-1])
        for name in names:
            sys.modules.pop(name)
    return module


def a_rope(rng: np.random.Generator) -> Rope:
    rotary_dim = int(rng.choice([2, 4, 6, 32, 64, 128]))
    before, after = (int(rng.choice([0, 0, 3, 16])) for _ in range(2))
    scaling = SCALINGS[rng.integers(len(SCALINGS))]
    if scaling.kind == "dynamic" and rotary_dim == 2:
        rotary_dim = 4
    return Rope(
        before + rotary_dim + after,
        rotary_dim,
        theta=float(rng.choice([1e4, 5e5, 1e6])),
        layout=("half", "interleaved")[rng.integers(2)],
        scaling=scaling,
        first=before,
    )


def computed(plain: Any, positions: Any, rope: Rope, length: int = 0) -> Any:
    """Keys that an engine computes at these positions, in float64. plain: not rotated"""
    angles = positions.astype(np.float32)[:, None] * rope.frequencies(length)
    cos, sin = (of(angles.astype(np.float64))[:, None] for of in (np.cos, np.sin))
    one, other = pairs(rope)
    x, y, keys = plain[..., one], plain[..., other], plain.copy()
    keys[..., one], keys[..., other] = x * cos - y * sin, y * cos + x * sin
    return keys


def of_dtype(keys: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(keys)).to(getattr(torch, dtype))


def errors(found: torch.Tensor, wanted: Any, rope: Rope) -> Any:
    """Of rotated elements, over the norm of their pair."""
    one, other = pairs(rope)
    norm = np.hypot(wanted[..., one], wanted[..., other]) + 1e-4
    apart = np.abs(found.double().numpy() - wanted)
    return np.maximum(apart[..., one], apart[..., other]) / norm


@pytest.mark.parametrize("worker", WORKERS)
def test_turned_keys_are_those_computed_at_the_new_positions(
    worker: dispatcher.Worker,
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(CASES):
        rope, dtype = a_rope(rng), str(rng.choice(list(ROUNDING)))
        tokens, heads = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        plain = rng.standard_normal((tokens, heads, rope.head_dim))
        old, new = rng.integers(0, 32_768, (2, tokens))
        lengths = (int(old.max()) + 1, int(new.max()) + 1)
        keys = of_dtype(computed(plain, old, rope, lengths[0]), dtype)
        found = rotate(keys, old, new, rope, worker=worker)
        wanted = computed(plain, new, rope, lengths[1])
        bound = 2 * ROUNDING[dtype] + 2.0**-21
        assert errors(found, wanted, rope).max() <= bound, (rope, dtype)
        rest = np.ones(rope.head_dim, bool)
        rest[rope.first : rope.first + rope.rotary_dim] = False
        assert torch.equal(found[..., rest], keys[..., rest])


def all_workers(keys: torch.Tensor, rope: Rope, interpreted: ModuleType) -> list[torch.Tensor]:
    tokens = keys.shape[-3]
    old, new = np.arange(tokens) * 7 + 3, np.arange(tokens)[::-1] * 100
    rotations = dispatcher.rotations(rope, old, new)
    by_triton = torch.empty_like(keys)
    interpreted.rotate(keys, rotations, rope, by_triton)
    in_place = keys.clone()
    interpreted.rotate(in_place, rotations, rope, in_place)
    found = [by_triton, in_place]
    for worker in WORKERS:
        found.append(rotate(keys, old, new, rope, worker=worker))
        in_place = keys.clone()
        assert rotate(in_place, old, new, rope, worker=worker, out=in_place) is in_place
        found.append(in_place)
    array = keys.view(torch.uint16).numpy() if keys.dtype == torch.bfloat16 else keys.numpy()
    for worker in WORKERS:
        turned = rotate(array, old, new, rope, worker=worker)
        found.append(torch.from_numpy(turned).view(keys.dtype))
    return found


def bits(keys: torch.Tensor) -> torch.Tensor:
    return keys.view(torch.int32 if keys.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 1, 2, 8), (3, 5, 2, 70), (2, 0, 4, 64), (1, 33, 3, 100)])
def test_all_workers_give_the_same_bits(
    interpreted: ModuleType, layout: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    keys = of_dtype(np.random.default_rng(1).standard_normal(shape), dtype)
    rope = Rope(shape[-1], shape[-1] // 4 * 2, layout=layout, first=shape[-1] % 4)
    first, *others = all_workers(keys, rope, interpreted)
    for other in others:
        assert torch.equal(bits(first), bits(other))


@pytest.mark.parametrize("worker", WORKERS)
def test_keys_may_have_any_strides(worker: dispatcher.Worker) -> None:
    rope, rng = Rope(16, 16), np.random.default_rng(2)
    kv = rng.standard_normal((3, 2, 5, 2, 16)).astype(np.float32)  # [layers, planes, ...]
    old, new = np.arange(5), np.arange(5) + 1000
    wanted = rotate(kv[:, 0].copy(), old, new, rope, worker="reference")
    values = kv[:, 1].copy()
    by_head = torch.from_numpy(kv[0, 0].copy()).transpose(0, 1).contiguous()  # [heads, tokens, dim]
    assert np.array_equal(
        rotate(by_head.transpose(0, 1), old, new, rope, worker=worker).numpy(), wanted[0]
    )
    turned = rotate(kv[:, 0, ::-1], old[::-1], new[::-1], rope, worker=worker)[:, ::-1]
    assert np.array_equal(turned, wanted)
    rotate(kv[:, 0], old, new, rope, out=kv[:, 0], worker=worker)
    assert np.array_equal(kv[:, 0], wanted) and np.array_equal(kv[:, 1], values)


def test_without_rotation_keys_stay() -> None:
    keys = np.random.default_rng(3).standard_normal((4, 2, 8)).astype(np.float16)
    assert np.array_equal(rotate(keys, range(4), range(9, 13), Rope(8, 0)), keys)


def test_a_turn_there_and_back_of_no_tokens_and_to_the_same_place() -> None:
    rope, keys = Rope(8, 8), np.ones((2, 1, 8), np.float32)
    assert np.array_equal(rotate(keys, [5, 6], [5, 6], rope), keys)
    assert rotate(keys[:0], [], [], rope).shape == (0, 1, 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"keys": np.ones((2, 1, 8), np.int64)}, "keys are int64"),
        ({"keys": np.ones((2, 1, 6), np.float32)}, r"\[..., tokens, heads, 8\]"),
        ({"old": [1]}, "1 old and 2 new positions for 2 tokens"),
        ({"new": [1, -1]}, "a position is -1"),
        ({"new": [0.5, 1.5]}, "positions must be integers"),
        ({"out": np.ones((2, 1, 8), np.float16)}, "out is float16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    keys = change.get("keys", np.ones((2, 1, 8), np.float32))
    with pytest.raises(ValueError, match=says):
        rotate(
            keys,
            change.get("old", [0, 1]),
            change.get("new", [2, 3]),
            Rope(8, 8),
            out=change.get("out"),
        )


BASE = {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 2048}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn exact": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("length", [0, 2048, 5000, 100_000])
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**BASE, rope_parameters=dict(CONFIGS[name]))
    rope = Rope.of(config.to_dict())
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        if name == "partial":
            theirs = 1e4 ** -(torch.arange(0, 32, 2) / 32)
    else:
        theirs, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length or None)
    np.testing.assert_allclose(rope.frequencies(length), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("model_type", sorted(HALF | INTERLEAVED))
def test_layouts_are_those_of_transformers(model_type: str) -> None:
    module_name = model_type.removesuffix("_text")
    module = pytest.importorskip(f"transformers.models.{module_name}.modeling_{module_name}")
    config = {"model_type": model_type, "head_dim": 16, "rope_theta": 1e4}
    rope = Rope.of(config)
    assert (rope.layout == "interleaved") == (model_type in INTERLEAVED)
    plain = np.random.default_rng(4).standard_normal((6, 2, 16)).astype(np.float32)
    angles = np.arange(6, dtype=np.float32)[:, None] * rope.frequencies()
    twice = np.repeat(angles, 2, 1) if rope.layout == "interleaved" else np.tile(angles, 2)
    keys = torch.from_numpy(plain).transpose(0, 1)[None]
    if model_type in ("gptj", "codegen"):
        half = torch.from_numpy(angles)[None]
        theirs = module.apply_rotary_pos_emb(keys.transpose(1, 2), half.sin(), half.cos())[0]
    else:
        tables = torch.from_numpy(twice)[None]
        if model_type == "gpt_oss":
            tables = torch.from_numpy(angles)[None]
        elif rope.layout == "interleaved" and not model_type.startswith("cohere"):
            tables = torch.from_numpy(np.tile(angles, 2))[None]  # it takes the first half
        _, turned = module.apply_rotary_pos_emb(keys, keys, tables.cos(), tables.sin())
        theirs = turned[0].transpose(0, 1)
    ours = rotate(plain, [0] * 6, range(6), rope)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)


def test_a_config_of_transformers_4_and_of_mla() -> None:
    old = {
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    }
    assert Rope.of(old) == Rope(64, 64, 5e5, scaling=Scaling("llama3", 8.0, 1024))
    neox = {"model_type": "gpt_neox", "head_dim": 64, "rotary_pct": 0.25, "rotary_emb_base": 1e4}
    assert Rope.of(neox) == Rope(64, 16)
    mla = {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "rope_theta": 1e4,
    }
    row = Rope.of(mla)
    assert row == Rope(576, 64, layout="interleaved", first=512)
    latent = np.random.default_rng(5).standard_normal((3, 1, 576)).astype(np.float32)
    turned = rotate(latent, range(3), range(5, 8), row)
    assert np.array_equal(turned[..., :512], latent[..., :512])
    assert not np.array_equal(turned[..., 512:], latent[..., 512:])
    assert Rope.of({"model_type": "bloom", "hidden_size": 64, "n_head": 4}).rotary_dim == 0
    assert Rope.of(BASE | {"alibi": True}).rotary_dim == 0
    two = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    assert Rope.of(BASE | {"rope_parameters": two}, layer_type="full_attention").theta == 1e6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type.*longrope"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, r"rope_scaling\.rope_type is 'su'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
        ({"rope_parameters": {}}, r"rope_theta is None"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "pass layer_type"),
        ({"model_type": "unheard_of", "rope_theta": 1e4}, "model_type is 'unheard_of'.*layout="),
        ({"no_rope_layers": [1, 0], "rope_theta": 1e4}, "no_rope_layers"),
        ({"head_dim": None, "rope_theta": 1e4}, "hidden_size"),
        ({"head_dim": 63, "rope_theta": 1e4}, "rotary_dim is 63"),
    ],
)
def test_a_config_that_cannot_be_turned_names_its_field(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Rope.of(BASE | change)


def test_dynamic_frequencies_of_another_length_are_undone() -> None:
    rope, rng = Rope(64, 64, scaling=Scaling("dynamic", 2.0, 512)), np.random.default_rng(6)
    plain = rng.standard_normal((4, 2, 64))
    old, new = np.arange(4) + 100, np.arange(4)
    keys = of_dtype(computed(plain, old, rope, 4000), "float32")
    wanted = computed(plain, new, rope, 900)
    found = rotate(keys, old, new, rope, old_length=4000, new_length=900)
    assert errors(found, wanted, rope).max() <= 2.0**-20
    assert errors(rotate(keys, old, new, rope), wanted, rope).max() > 1e-2
    linear = replace(rope, scaling=Scaling("linear", 2.0))
    assert np.array_equal(linear.frequencies(4000), linear.frequencies(900))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset")
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("gpu", GPUS)
def test_the_kernel_compiled_for_a_gpu_keeps_all_in_registers(
    gpu: str, kind: int, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton", reason="no Triton in this environment")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvhold.kernels.triton_rope import _turn_rows

    elements = "*i32" if kind == 2 else "*i16"
    signature = {"keys": elements, "out": elements, "cos": "*fp32", "sin": "*fp32"}
    numbers = ("num_rows", "heads", "num_pairs", "first", "apart")
    strides = ("token_stride", "head_stride", "stride")
    signature |= dict.fromkeys((*numbers, *strides, *(f"out_{name}" for name in strides)), "i32")
    constants = {"pair_elements": 1, "kind": kind, "rows": 16, "width": 64}
    signature |= dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(fn=_turn_rows, signature=signature, constexprs=constants),
        target=GPUTarget(*GPUS[gpu]),
    )
    text = compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]
    assert "ld.local" not in text and "st.local" not in text
    if gpu != "gfx942":
        assert memory_of_threads(compiled.asm["cubin"], tmp_path) == {"STACK:0", "LOCAL:0"}
