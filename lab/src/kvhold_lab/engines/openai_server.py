"""vLLM's OpenAI-compatible server in child processes. Thread-safe."""

import http.client
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvhold_lab.engines.messages import EngineOptions
from kvhold_lab.engines.process import Child, LoggedProcess
from kvhold_lab.engines.stepped import environment_for, own_environment
from kvhold_lab.engines.vllm_engine import BATCHED_TOKENS
from kvhold_lab.servers.base import free_port

_LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_MODEL_NAME = "demo"


@dataclass(frozen=True)
class Completion:
    """Times include HTTP, tokenising and streaming."""

    ttft_s: float
    total_s: float
    text: str
    token_ids: list[int]
    num_cached_tokens: int


class OpenAIServer(Child):
    def __init__(
        self,
        options: EngineOptions,
        *,
        log_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
        engines: int = 1,
        port: int = 0,
        host: str = _LOOPBACK,
        under: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        """port:  0: a free one
        under: words before the command, such as `ip netns exec NAME`
        """
        usual = own_environment() if options.own_binding else environment_for(options.num_threads)
        super().__init__(
            "vLLM's server", log_path=log_path, environment={**usual, **(environment or {})}
        )
        self.options = options
        self._engines = engines
        self._port = port
        self._host = host
        self._under = under
        self._flags = flags

    @property
    def base_url(self) -> str:
        return f"http://{self._host}:{self._port}/v1"

    def complete(
        self,
        prompt: str | list[int],
        *,
        max_tokens: int,
        engine: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> Completion:
        request = {
            "model": _MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        ttft_s: float | None = None
        text, token_ids, num_cached_tokens = "", list[int](), 0
        ranked = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        with self._response(
            "POST", "/v1/completions", timeout_s, request, ranked | dict(headers or {})
        ) as response:
            for event in _events(response):
                if "error" in event:
                    raise self._running().failure("completion", f"answered {event['error']}")
                for choice in event["choices"]:
                    text += choice["text"]
                    token_ids += choice["token_ids"] or []
                    if ttft_s is None and token_ids:
                        ttft_s = time.perf_counter() - began
                if (details := (event.get("usage") or {}).get("prompt_tokens_details")) is not None:
                    num_cached_tokens = details["cached_tokens"] or 0
        total_s = time.perf_counter() - began
        if ttft_s is None:
            raise self._running().failure("completion", "answered without a token")
        return Completion(
            ttft_s=ttft_s,
            total_s=total_s,
            text=text,
            token_ids=token_ids,
            num_cached_tokens=num_cached_tokens,
        )

    def metrics(self, timeout_s: float = 30.0) -> dict[str, float]:
        with self._response("GET", "/metrics", timeout_s) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def metric(self, name: str) -> float:
        return sum(
            value for sample, value in self.metrics().items() if sample.split("{", 1)[0] == name
        )

    def _spawn(self) -> LoggedProcess:
        self._port = self._port or free_port()
        argv = [
            *self._under,
            *_arguments(self.options, self._host, self._port, self._engines),
            *self._flags,
        ]
        return LoggedProcess(
            self._name,
            argv,
            log_path=self._log_path,
            environment=self._environment,
            preloads=not self._under,
        )

    def _wait_until_ready(self, process: LoggedProcess, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            if process.wait(_POLL_S):
                raise process.failure("start")
            if time.monotonic() > deadline:
                raise process.failure("start", "was not healthy in time and is killed")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            payload = None if body is None else msgspec.json.encode(body)
            connection.request(
                method,
                path,
                body=payload,
                headers={"Content-Type": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._running().failure(
                    path,
                    f"answered {response.status}: {response.read(1_000).decode(errors='replace')}",
                )
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._running().failure(path, f"broke the connection: {error!r}") from error
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in iter(response.readline, b""):
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _arguments(options: EngineOptions, host: str, port: int, engines: int) -> list[str]:
    arguments: dict[str, Any] = {
        "model": options.model_path,
        "served-model-name": _MODEL_NAME,
        "host": host,
        "port": port,
        "dtype": "float32",
        "max-model-len": options.max_model_len,
        "kv-cache-memory-bytes": options.kv_cache_bytes,
        "max-num-batched-tokens": options.max_num_batched_tokens or BATCHED_TOKENS,
    }
    if engines > 1:
        arguments["data-parallel-size"] = engines
    if options.block_size is not None:
        arguments["block-size"] = options.block_size
    if options.kv_transfer_config is not None:
        arguments["kv-transfer-config"] = json.dumps(options.kv_transfer_config)
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    flags.append(
        "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    )
    pairs = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags]
