"""An LLM engine in a child process. One thread; for concurrent calls `openai_server`."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvhold_lab.engines.messages import (
    CheckMemory,
    EngineOptions,
    Generate,
    Generated,
    GeneratedMany,
    GenerateMany,
    MemoryChecked,
    Ready,
)
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.process import Child, LoggedProcess
from kvhold_lab.engines.protocol import (
    ChildOperation,
    EngineRefused,
    PrefixCacheReset,
    Reply,
    ResetPrefixCache,
    StopEngine,
    Stopped,
    ask,
)
from kvhold_lab.engines.stepped import bound_environment, environment_for


def is_vllm_available() -> bool:
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


def options_for(model: ModelInfo, *, max_model_len: int, **others: Any) -> EngineOptions:
    """KV memory for one running and one cached sequence."""
    kv_cache_bytes = others.pop("kv_cache_bytes", 2 * max_model_len * model.kv_bytes_per_token)
    return EngineOptions(
        model_path=str(model.path),
        max_model_len=max_model_len,
        kv_cache_bytes=kv_cache_bytes,
        **others,
    )


def kvhold_connector(
    socket: Path, ram_bytes: int, *, idle_exit_s: float = 600.0, **others: Any
) -> dict[str, Any]:
    """idle_exit_s: how long the node waits alone"""
    node = {"socket": str(socket), "idle_exit_s": idle_exit_s}
    return {
        "kv_connector": "KVHoldConnector",
        "kv_connector_module_path": "kvhold.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"ram_bytes": ram_bytes, "node": node, **others},
    }


def binding(num_threads: int) -> dict[str, Any]:
    """With fewer threads than cores, vLLM would bind engines to the same cores."""
    return {"num_threads": num_threads, "own_binding": num_threads == len(os.sched_getaffinity(0))}


class Engine(Child):
    def __init__(
        self,
        options: EngineOptions,
        *,
        log_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> None:
        """under: words before the command, such as `ip netns exec NAME`"""
        of_vllm = bound_environment if options.own_binding else environment_for
        given = of_vllm(options.num_threads) if options.driver == "vllm" else {}
        super().__init__(
            "the engine", log_path=log_path, environment={**given, **(environment or {})}
        )
        self.options = options
        self._under = under
        self.ready: Ready | None = None

    def generate(
        self,
        prompt_token_ids: list[int],
        *,
        max_tokens: int,
        rules: Mapping[str, Any] | None = None,
        first_logprobs: bool = False,
        timeout_s: float = 600.0,
    ) -> Generated:
        request = Generate(
            prompt_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            rules=dict(rules or {}),
            first_logprobs=first_logprobs,
        )
        return self._request(request, Generated, timeout_s)

    def generate_many(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int,
        rules: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> GeneratedMany:
        return self._request(
            GenerateMany(prompts=prompts, max_tokens=max_tokens, rules=dict(rules or {})),
            GeneratedMany,
            timeout_s,
        )

    def reset_prefix_cache(self, timeout_s: float = 60.0) -> bool:
        return self._request(ResetPrefixCache(), PrefixCacheReset, timeout_s).done

    def check_memory(self, enabled: bool, timeout_s: float = 60.0) -> int:
        """For later requests; return the number of connections."""
        return self._request(CheckMemory(enabled=enabled), MemoryChecked, timeout_s).clients

    def _spawn(self) -> LoggedProcess:
        return LoggedProcess(
            self._name,
            [*self._under, sys.executable, "-m", "kvhold_lab.engines.engine"],
            log_path=self._log_path,
            environment=self._environment,
            pipes=True,
            preloads=self.options.driver == "vllm" and not self._under,
        )

    def _wait_until_ready(self, process: LoggedProcess, timeout_s: float) -> None:
        self.ready = self._request(self.options, Ready, timeout_s)

    def _ask_to_end(self, process: LoggedProcess, timeout_s: float) -> None:
        self._request(StopEngine(), Stopped, timeout_s)

    def _request(self, operation: ChildOperation, kind: type[Reply], timeout_s: float) -> Reply:
        process = self._running()
        try:
            return ask(process, operation, kind, timeout_s=timeout_s)
        except EngineRefused as error:
            doing = str(operation.__struct_config__.tag)
            raise process.failure(doing, f"refused: {error}") from error


if __name__ == "__main__":
    from kvhold_lab.engines.engine_child import main

    sys.exit(main())
