"""A real vLLM engine in this process, stepped by hand.

    engine = SteppedEngine({"model": ..., "enforce_eager": True})
    name = engine.add({"prompt_token_ids": [...]}, max_tokens=8)
    while engine.is_busy():
        outputs = engine.step()
    engine.drain()

Only for a child process whose environment has `environment_for` in it: vLLM and torch read some of
it while they are imported. One thread. What a command asks of an engine, and what it makes of the
outputs, is its own.
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
    """Variables for a vLLM process on CPUs: offline, quiet, all of `num_threads` used.

    They must be set before torch is loaded.
    """
    return {
        **_QUIET,
        # one process: starts in seconds, and can be stepped by hand
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM keeps one core back
        "OMP_NUM_THREADS": str(num_threads),
    }


def own_environment() -> dict[str, str]:
    """Variables for a vLLM process that is a user's: offline and quiet, and all else is vLLM's own
    choice, its thread binding, too.
    """
    return dict(_QUIET)


def bound_environment(num_threads: int) -> dict[str, str]:
    """Variables for the start of a process with an engine that is stepped by hand, whose threads
    are bound as a user's are.

    They are those that vLLM sets for its worker processes. OpenMP reads them while it is loaded, so
    they must be there from the start.
    """
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        **environment_for(num_threads),
        "GOMP_CPU_AFFINITY": " ".join(map(str, cores)),
        "LD_PRELOAD": _openmp_of_torch(),
    }


def _openmp_of_torch() -> str:
    """The OpenMP library that torch brings, which vLLM preloads, too; empty where there is none."""
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
    """One started engine.

    engine: vLLM's; core: its core, with the scheduler; config: all that vLLM has made of the
        arguments
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """arguments: vLLM's engine arguments; `kv_transfer_config` is a mapping, or None for no
        connector.
        """
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        given = dict(arguments)
        if (transfer := given.pop("kv_transfer_config", None)) is not None:
            given["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.engine: Any = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=True, **given))
        self.core: Any = (
            self.engine.engine_core.engine_core
        )  # in-process: the client holds the core itself
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
        """Hand over a request for greedy decoding that no end-of-text token ends; returns the name
        that its outputs have.

        extra: of the sampling parameters' `extra_args`; logprobs: how many of the best tokens come
            with theirs
        """
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
        """The scheduler's own object of this request; None once it has ended and let go of its
        blocks.
        """
        return self.core.scheduler.requests.get(self._inner_names[name])

    def inner_name(self, name: str) -> str:
        """What the scheduler and its connector call this request. No two engines have the same."""
        return self._inner_names[name]

    def abort(self, name: str) -> None:
        """End a request, wherever it is."""
        self.engine.abort_request([name])

    def is_busy(self) -> bool:
        """Whether a request has no whole answer yet."""
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> list[Any]:
        """One step.

        Where there was nothing to compute, as while KV is being loaded, wait a millisecond as
        vLLM's own loop does.
        """
        began = time.perf_counter()
        outputs: list[Any] = self.engine.step()
        if (
            not outputs and time.perf_counter() - began < 0.002
        ):  # a step that computes takes longer, even of a tiny model
            time.sleep(0.001)  # vLLM has nothing that could be waited for
        return outputs

    def drain(self) -> None:
        """Step on until the scheduler has let go of what finished, as vLLM's own loop does:
        connectors save and free here.
        """
        deadline = time.monotonic() + _DRAIN_S
        while self.core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"vLLM still holds finished requests after {_DRAIN_S:g} s: its "
                    "connector has not let go of their blocks"
                )
            self.step()

    def reset_prefix_cache(self) -> bool:
        """Forget the engine's own KV; false if it would not."""
        return bool(self.engine.reset_prefix_cache())

    def close(self) -> None:
        """Shut it down, connector included."""
        self.engine.engine_core.shutdown()
        self.engine = self.core = self.config = None
