"""A vLLM engine in this process, stepped by hand.

Only for a child started with `environment_for`: imports read some variables.
"""

import itertools
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DRAIN_S = 120.0


_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}


def environment_for(num_threads: int) -> dict[str, str]:
    return {
        **_QUIET,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads),
    }


def own_environment() -> dict[str, str]:
    return dict(_QUIET)


def bound_environment(num_threads: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        **environment_for(num_threads),
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
        "LD_PRELOAD": _openmp_of_torch(),
    }


def _openmp_of_torch() -> str:
    spec = find_spec("torch")
    folders = (
        [Path(folder) for folder in spec.submodule_search_locations or ()]
        if spec is not None
        else []
    )
    places = [
        place for folder in folders for place in (folder.parent / "torch.libs", folder / "lib")
    ]
    return str(
        next((library for place in places for library in sorted(place.glob("libgomp*.so*"))), "")
    )


class SteppedEngine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        given = dict(arguments)
        if (transfer := given.pop("kv_transfer_config", None)) is not None:
            given["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.engine: Any = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=True, **given))
        self.core: Any = self.engine.engine_core.engine_core
        self.config: Any = self.core.vllm_config
        self._numbers = itertools.count()
        self._inner_names: dict[str, str] = {}

    def add(
        self,
        prompt: dict[str, Any],
        *,
        max_tokens: int,
        lora: Any = None,
        priority: int = 0,
        extra: dict[str, Any] | None = None,
        logprobs: int | None = None,
    ) -> str:
        """Greedily, past any end-of-text token. Return the outputs' name."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
            logprobs=logprobs,
        )
        name = f"asked-{next(self._numbers)}"
        self._inner_names[name] = self.engine.add_request(
            name, prompt, params, lora_request=lora, priority=priority
        )
        return name

    def request(self, name: str) -> Any:
        return self.core.scheduler.requests.get(self._inner_names[name])

    def inner_name(self, name: str) -> str:
        return self._inner_names[name]

    def abort(self, name: str) -> None:
        self.engine.abort_request([name])

    def is_busy(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> list[Any]:
        """If nothing was computed, wait a millisecond."""
        began = time.perf_counter()
        outputs: list[Any] = self.engine.step()
        if not outputs and time.perf_counter() - began < 0.002:
            time.sleep(0.001)
        return outputs

    def drain(self) -> None:
        """Release finished requests; connectors save here."""
        deadline = time.monotonic() + _DRAIN_S
        while self.core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"vLLM still holds finished requests after {_DRAIN_S:g} s: its "
                    "connector has not let go of their blocks"
                )
            self.step()

    def reset_prefix_cache(self) -> bool:
        return bool(self.engine.reset_prefix_cache())

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        self.engine = self.core = self.config = None
