"""TTFT of computed and loaded prompts in vLLM, with kvhold and with offloading."""

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvhold.node import NodeClient, end_node
from kvhold_lab.bench.engines import PATIENT, flush_engines
from kvhold_lab.bench.gpu.rows import GpuRow, check
from kvhold_lab.bench.gpu.target import Target
from kvhold_lab.engines.engine import Engine, is_vllm_available, kvhold_connector
from kvhold_lab.engines.messages import EngineOptions
from kvhold_lab.engines.prompts import save_tokenizer, train_tokenizer

PART = "vllm"
_ROUNDS = 5
_HELD_PROMPTS = 3
_ROOM = 32
_VOCABULARY = 500
_ANSWER = 1
_PATIENCE_S = 30.0
_LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class _Sizes:
    config: dict[str, Any]
    lengths: tuple[int, ...]
    rounds: int

    @property
    def max_model_len(self) -> int:
        return max(self.lengths) + _ROOM

    def kv_bytes(self, prompts: float) -> int:
        size = 2 if self.config["torch_dtype"] == "bfloat16" else 4
        heads, layers = self.config["num_key_value_heads"], self.config["num_hidden_layers"]
        token_bytes = 2 * heads * self.config["head_dim"] * layers * size
        return int(prompts * self.max_model_len * token_bytes)


@dataclass
class _Times:
    """Seconds by length.

    found: cached tokens of the second time, the fewest
    """

    block: int
    first: dict[int, list[float]] = field(default_factory=dict)
    second: dict[int, list[float]] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=dict)


def rows(target: Target) -> Iterator[GpuRow]:
    if not is_vllm_available():
        yield GpuRow(PART, "not run: vLLM is not installed", 0, "")
        return
    sizes = (
        _Sizes(_TINY | _COMMON, (600,), 2)
        if target.small
        else _Sizes(_LLAMA_8B | _COMMON, (2_048, 8_192, 24_576), _ROUNDS)
    )
    with tempfile.TemporaryDirectory(prefix="kvhold-gpu-") as name:
        folder = Path(name)
        save_tokenizer(train_tokenizer(), folder, max_model_len=sizes.max_model_len)
        (folder / "config.json").write_text(json.dumps(sizes.config))
        own = _measure(sizes, folder, None)
        kvhold = _with_kvhold(target, sizes, folder)
        for length in sizes.lengths:
            found, whole = kvhold.found[length], (length - 1) // kvhold.block * kvhold.block
            yield check(
                PART, f"{length} tokens: kvhold loads all whole blocks", found >= whole, found
            )
        yield from _of_system(sizes, "kvhold", kvhold, own)
        if not target.small:
            offloading = _measure(sizes, folder, _offloading(sizes))
            for length, found in offloading.found.items():
                yield GpuRow(PART, f"{length} tokens: OffloadingConnector loads", found, "tokens")
            yield from _of_system(sizes, "OffloadingConnector", offloading, own)


def _of_system(sizes: _Sizes, name: str, times: _Times, own: _Times) -> Iterator[GpuRow]:
    for length in sizes.lengths:
        cold, cached = median(own.first[length]), median(own.second[length])
        for title, taken, limit in (
            ("first token while storing; vLLM alone", times.first, cold),
            ("first token of a hit; vLLM computes", times.second, cold),
            ("first token of a hit; vLLM's own cache", times.second, cached),
        ):
            seconds = median(taken[length])
            yield GpuRow(
                PART,
                f"{name}, {length}: {title}",
                round(1e3 * seconds, 2),
                "ms",
                round(1e3 * limit, 2),
                round(seconds / limit, 3),
            )


def _with_kvhold(target: Target, sizes: _Sizes, folder: Path) -> _Times:
    with tempfile.TemporaryDirectory(prefix="kvhold-gpu-node-") as name:
        socket = Path(name) / "node.sock"
        connector = kvhold_connector(
            socket,
            sizes.kv_bytes(_HELD_PROMPTS) + (64 << 20),
            rules={"plan": False},
            allow_unproven=target.kind == "cuda",
        )
        try:
            return _measure(sizes, folder, connector, socket)
        finally:
            end_node(socket)


def _offloading(sizes: _Sizes) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": sizes.kv_bytes(_HELD_PROMPTS)},
    }


def _measure(
    sizes: _Sizes, folder: Path, connector: dict[str, Any] | None, socket: Path | None = None
) -> _Times:
    """socket: of the node, which must have stored the first prompt before the second"""
    options = EngineOptions(
        model_path=str(folder),
        max_model_len=sizes.max_model_len,
        kv_cache_bytes=sizes.kv_bytes(_HELD_PROMPTS),
        kv_transfer_config=connector,
        max_num_batched_tokens=8_192,
        dtype=sizes.config["torch_dtype"],
        load_format="dummy",
    )
    random_tokens = random.Random(1)
    with Engine(options) as engine:
        assert engine.ready is not None
        times = _Times(engine.ready.tokens_per_block)
        for length in sizes.lengths:
            for number in range(1 + sizes.rounds):
                prompt = [random_tokens.randrange(10, _VOCABULARY) for _ in range(length)]
                first = engine.generate(prompt, max_tokens=_ANSWER)
                if socket is not None:
                    with NodeClient(socket, PATIENT, name="kvhold bench") as client:
                        flush_engines(client, patience_s=_PATIENCE_S)
                if connector is not None:
                    engine.reset_prefix_cache()
                second = engine.generate(prompt, max_tokens=_ANSWER)
                if not number:
                    continue
                times.first.setdefault(length, []).append(first.ttft_s)
                times.second.setdefault(length, []).append(second.ttft_s)
                found = second.num_cached_tokens
                times.found[length] = min(found, times.found.get(length, found))
    return times
