"""Speculation by a draft model or an EAGLE head: its KV is stored and loaded beside the model's,
and it is part of the name.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import Answered, Ask, Question, Start

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DRAFTED, ANSWER = 3, 40
LEAST_PASSES = 1 + (ANSWER - 1 + DRAFTED) // (DRAFTED + 1)  # where every draft is right
EAGLE_ATTENTION = 10.0
PROMPTS = [[(7 * number + 3 * at) % 400 + 10 for at in range(150)] for number in range(3)]


@pytest.fixture(scope="module")
def model() -> Path:
    return make_checkpoint("llama").path


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model itself, which is always right, and two that are right less and less often: with
    noise in the weights.
    """
    found = {"itself": model}
    for name, noise in (("near", 0.05), ("far", 3.0)):
        found[name] = tmp_path_factory.mktemp("drafts") / name
        shutil.copytree(model, found[name])
        generator = torch.Generator().manual_seed(5)
        for file in found[name].glob("*.safetensors"):
            weights = load_file(file)
            for key, weight in weights.items():
                if weight.is_floating_point():
                    noisy = weight.float() + noise * weight.float().std() * torch.randn(
                        weight.shape, generator=generator
                    )
                    weights[key] = noisy.to(weight.dtype)
            save_file(weights, file, metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Engines(timeout_s=500, threads=1) as engines:
        yield engines


@pytest.fixture(scope="module")
def plain_spoken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token hangs mostly on the last one."""
    folder = tmp_path_factory.mktemp("target") / "model"
    _rewrite(
        model,
        folder,
        lambda weights: {name: weight * _share(name, 0.1) for name, weight in weights.items()},
    )
    return folder


@pytest.fixture(scope="module")
def eagle(plain_spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head for it: its first layer over the embedding of the last token.

    What its attention adds makes it wrong now and then.
    """
    folder = tmp_path_factory.mktemp("eagle") / "head"

    def head(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {
            name.removeprefix("model."): weight
            for name, weight in weights.items()
            if name.startswith("model.layers.0.")
        }
        del found["layers.0.input_layernorm.weight"]
        found["layers.0.self_attn.o_proj.weight"] = (
            found["layers.0.self_attn.o_proj.weight"] * EAGLE_ATTENTION
        )
        embeddings = weights["model.embed_tokens.weight"]
        one = torch.eye(embeddings.shape[1], dtype=embeddings.dtype)
        return found | {
            "fc.weight": torch.cat([one, 0 * one], dim=1),
            "embed_tokens.weight": embeddings,
        }

    _rewrite(plain_spoken, folder, head, num_hidden_layers=1)
    return folder


def _share(name: str, scale: float) -> float:
    return scale if "o_proj" in name or "down_proj" in name else 1.0


def _rewrite(
    model: Path,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    **settings: Any,
) -> None:
    """Another checkpoint in `folder`, with other weights and settings."""
    shutil.copytree(model, folder)
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    save_file(
        {name: weight.contiguous() for name, weight in change(weights).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | settings))


def start(
    engines: Engines,
    model: Path,
    draft: Path | None,
    socket: Path | None,
    method: str = "draft_model",
) -> None:
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
    }
    arguments |= {
        "max_model_len": 256,
        "block_size": 32,
        "num_gpu_blocks_override": 60,
        "kv_cache_memory_bytes": 1 << 27,
    }
    if draft is not None:
        arguments["speculative_config"] = {
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": DRAFTED,
        }
    if socket is not None:
        extra = {
            "ram_bytes": "64MiB",
            "tokens_per_chunk": 32,
            "rules": {"plan": False},
            "node": {"socket": str(socket), "idle_exit_s": 60},
        }
        extra["client"] = {"call_timeout_s": 30}
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVHoldConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    engines.start(Start(engine=arguments))


def ask(engines: Engines) -> list[Answered]:
    """Each prompt alone."""
    return [
        engines.ask(Ask(questions=[Question(tokens=prompt)], max_tokens=ANSWER))
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def alone(engines: Engines, model: Path) -> list[Answered]:
    """What the model answers by itself, a token a pass."""
    start(engines, model, None, None)
    answers = ask(engines)
    engines.stop()
    assert [one.num_passes for one in answers] == [ANSWER] * len(PROMPTS)
    return answers


def test_after_a_load_drafts_are_as_often_right_as_before(
    engines: Engines, model: Path, drafts: dict[str, Path], alone: list[Answered], tmp_path: Path
) -> None:
    """A drafter whose KV did not come back would be right as seldom as one that has
    read nothing.
    """
    passes: dict[str, list[int]] = {}
    for name, draft in drafts.items():
        start(engines, model, draft, tmp_path / "node.sock")
        cold = ask(engines)
        assert [one.cached[0] for one in cold] == [0] * len(PROMPTS), (
            "another draft model, another namespace"
        )
        engines.reset()
        loaded = ask(engines)
        engines.stop()
        start(engines, model, draft, tmp_path / "node.sock")
        afresh = ask(engines)
        engines.stop()
        for answers in (loaded, afresh):
            assert [one.cached[0] for one in answers] == [128] * len(PROMPTS)
            assert [one.num_passes for one in answers] == [one.num_passes for one in cold]
        for answers in (cold, loaded, afresh):
            assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
        passes[name] = [one.num_passes for one in cold]
    assert passes["itself"] == [LEAST_PASSES] * len(PROMPTS)
    assert sum(passes["itself"]) < sum(passes["near"]) < sum(passes["far"]), (
        "drafts are refused, too"
    )


def test_of_a_hit_an_eagle_heads_last_block_is_computed(
    engines: Engines, plain_spoken: Path, eagle: Path, tmp_path: Path
) -> None:
    """Its KV of a block's last token depends on the token after it."""
    start(engines, plain_spoken, None, None)
    alone = ask(engines)
    engines.stop()
    start(engines, plain_spoken, eagle, tmp_path / "node.sock", "eagle")
    cold = ask(engines)
    engines.stop()
    start(engines, plain_spoken, eagle, tmp_path / "node.sock", "eagle")
    afresh = ask(engines)
    engines.stop()
    assert [one.cached[0] for one in cold] == [0] * len(PROMPTS)
    assert [one.cached[0] for one in afresh] == [96] * len(PROMPTS), "a block less than there is"
    for answers in (cold, afresh):
        assert [one.token_ids for one in answers] == [one.token_ids for one in alone]
    assert [one.num_passes for one in afresh] == [one.num_passes for one in cold]
    assert LEAST_PASSES < min(one.num_passes for one in cold)
    assert sum(one.num_passes for one in cold) < ANSWER * len(PROMPTS), (
        "some of its drafts are right"
    )
