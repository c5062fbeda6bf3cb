"""Each prompt runs cold, from kvhold, from the prefix cache (the limit), and from kvhold in a new
process.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient, end_node
from kvhold_lab.engines.engine import Engine, is_vllm_available, kvhold_connector, options_for
from kvhold_lab.engines.messages import DriverName, Generated
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.prompts import make_prompt

_OUTPUT_TOKENS = 16
_NODE_OUTLIVES_ENGINES_S = 120.0
_PATIENT = ClientConfig(connect_timeout_s=60, call_timeout_s=60)


@dataclass
class Timings:
    """TTFT in seconds."""

    cold: list[float] = field(default_factory=list)
    prefix_cache: list[float] = field(default_factory=list)
    hit_same: list[float] = field(default_factory=list)
    hit_new: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DemoResult:
    """Of one prompt in the new engine."""

    driver: DriverName
    model: ModelInfo
    prompt_tokens: int
    timings: Timings
    tokens_reused: int
    bytes_loaded: int
    identical: bool

    def as_json(self) -> dict[str, Any]:
        """Times are medians; null: no prefix cache."""
        timings = self.timings
        return {
            "model_params": self.model.num_parameters,
            "prompt_tokens": self.prompt_tokens,
            "cold_ttft_s": statistics.median(timings.cold),
            "hit_same_ttft_s": statistics.median(timings.hit_same),
            "hit_new_ttft_s": statistics.median(timings.hit_new),
            "prefix_cache_ttft_s": statistics.median(timings.prefix_cache)
            if timings.prefix_cache
            else None,
            "tokens_reused": self.tokens_reused,
            "identical": self.identical,
            "engine": self.driver,
            "bytes_loaded": self.bytes_loaded,
            "runs": len(timings.cold),
        }


def run(
    model: ModelInfo, *, num_tokens: int, repeats: int, say: Callable[[str], None]
) -> DemoResult:
    driver: DriverName = "vllm" if is_vllm_available() else "transformers"
    prompts = [make_prompt(model.path, num_tokens, seed=seed) for seed in range(repeats)]
    with tempfile.TemporaryDirectory(prefix="kvhold-demo-") as folder:
        socket = Path(folder) / "node.sock"
        room = 2 * repeats * num_tokens * model.kv_bytes_per_token + (64 << 20)
        options = options_for(
            model,
            max_model_len=num_tokens + _OUTPUT_TOKENS + 256,
            driver=driver,
            kv_transfer_config=kvhold_connector(socket, room, idle_exit_s=_NODE_OUTLIVES_ENGINES_S),
            own_binding=True,
        )
        try:
            timings = Timings()
            say(f"starting {driver} with kvhold ...")
            with Engine(options) as engine:
                outputs = [
                    _first_engine(engine, prompt, timings, driver, say, f"prompt {i} of {repeats}")
                    for i, prompt in enumerate(prompts, 1)
                ]
            say(f"starting a new {driver} process; the node still holds the KV ...")
            with Engine(options) as engine:
                before = _bytes_loaded(socket)
                again = [engine.generate(prompt, max_tokens=_OUTPUT_TOKENS) for prompt in prompts]
                bytes_loaded = (_bytes_loaded(socket) - before) // repeats
            timings.hit_new = [generated.ttft_s for generated in again]
        finally:
            end_node(socket)
    identical = all(
        len({tuple(g.token_ids) for g in [*runs, new]}) == 1
        for runs, new in zip(outputs, again, strict=True)
    )
    return DemoResult(
        driver,
        model,
        num_tokens,
        timings,
        min(g.num_cached_tokens for g in again),
        bytes_loaded,
        identical,
    )


def _first_engine(
    engine: Engine,
    prompt: list[int],
    timings: Timings,
    driver: DriverName,
    say: Callable[[str], None],
    what: str,
) -> list[Generated]:
    runs = [engine.generate(prompt, max_tokens=_OUTPUT_TOKENS)]
    timings.cold.append(runs[0].ttft_s)
    engine.reset_prefix_cache()
    runs.append(engine.generate(prompt, max_tokens=_OUTPUT_TOKENS))
    timings.hit_same.append(runs[-1].ttft_s)
    if driver == "vllm":
        runs.append(engine.generate(prompt, max_tokens=_OUTPUT_TOKENS))
        timings.prefix_cache.append(runs[-1].ttft_s)
    say(
        f"{what}: first token after {timings.cold[-1]:.2f} s cold, "
        f"{timings.hit_same[-1]:.2f} s on a hit"
    )
    return runs


def _bytes_loaded(socket: Path) -> int:
    with NodeClient(socket, _PATIENT, name="kvhold demo") as client:
        return int(client.status()["counters"].get("kvhold_leased_bytes", 0))
