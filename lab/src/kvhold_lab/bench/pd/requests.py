"""Prompts whose answer has a near tie are left out."""

import http.client
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from kvhold_lab.bench.pd.faults import PdAnswer
from kvhold_lab.engines.models import ModelInfo
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.process import EngineFailed
from kvhold_lab.engines.prompts import make_prompt

MOST_TOKENS = 1_500
OUTPUT_TOKENS = 8
FOR_DECODER = {"do_remote_decode": True, "do_remote_prefill": False}

_LEAST_TOKENS = 300
_PATH = "/v1/completions"
_SURE = 1e-3  # smallest sure difference of logarithms; batches cause 1e-5
_CANDIDATES = 4
_PATIENCE = 2.0  # in deadlines, before a client leaves
_MOST_OF_AN_ERROR = 300


@dataclass(frozen=True)
class PdRequest:
    """expected: tokens of one engine alone"""

    number: int
    prompt: list[int]
    expected: list[int]

    def body(self, salt: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = _body(self.prompt) | {
            "max_tokens": len(self.expected),
            "return_token_ids": True,
            "stream": self.number % 2 == 0,
            "cache_salt": salt,
        }
        return body if params is None else body | {"kv_transfer_params": dict(params)}


@dataclass(frozen=True)
class TimedAnswer:
    tokens: list[int]
    ttft_s: float
    gaps_s: list[float]


def ask_alone(server: OpenAIServer, model: ModelInfo, count: int, *, seed: int) -> list[PdRequest]:
    """With the answers of an idle server. Raises EngineFailed."""
    chance, made = random.Random(seed), list[PdRequest]()
    for candidate in range(_CANDIDATES * count):
        if len(made) == count:
            break
        length = chance.randint(_LEAST_TOKENS, MOST_TOKENS)
        prompt = make_prompt(model.path, length, seed=seed + candidate)
        tokens, num_sure = answer_alone(server, prompt)
        if num_sure == len(tokens):
            made.append(PdRequest(len(made), prompt, tokens))
    if len(made) < count:
        raise EngineFailed(
            f"of {_CANDIDATES * count} prompts, only {len(made)} have answers without near ties"
        )
    return made


def count_sure(top_logprobs: Sequence[Mapping[str, float] | None]) -> int:
    """Count the tokens before the first near tie."""
    for at, position in enumerate(top_logprobs):
        values = sorted((position or {}).values(), reverse=True)
        if len(values) < 2 or values[0] - values[1] < _SURE:
            return at
    return len(top_logprobs)


def send(
    url: str,
    request: PdRequest,
    salt: str,
    *,
    deadline_s: float,
    params: Mapping[str, Any] | None = None,
    request_id: str = "",
    leave_after: int = 0,
) -> PdAnswer:
    """A failure is the answer's error. leave_after: tokens of a stream; 0: never"""
    began, tokens, error = time.monotonic(), list[int](), ""
    body, patience_s = request.body(salt, params), _PATIENCE * deadline_s
    if leave_after:
        body["stream"] = True
    try:
        with closing(post(url, body, timeout_s=patience_s, request_id=request_id)) as connection:
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                text = response.read(_MOST_OF_AN_ERROR).decode(errors="replace")
                error = f"http {response.status}: {text}"
            elif body["stream"]:
                error = "cut short"
                for event in _events(response, until=began + patience_s):
                    error = _take(event, tokens, error)
                    if leave_after and len(tokens) >= leave_after:
                        error = ""
                        break
            else:
                tokens += json.loads(response.read())["choices"][0]["token_ids"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as fault:
        error = f"{type(fault).__name__}: {fault}"
    return PdAnswer(request.number, tokens, time.monotonic() - began, error)


def send_prefill(
    url: str,
    request: PdRequest,
    salt: str,
    params: Mapping[str, Any],
    *,
    timeout_s: float,
    request_id: str = "",
) -> dict[str, Any]:
    """Return the answer's `kv_transfer_params`. Raises EngineFailed."""
    return post_prefill(
        url, request.prompt, salt, params, timeout_s=timeout_s, request_id=request_id
    )


def post_prefill(
    url: str,
    prompt: list[int],
    salt: str,
    params: Mapping[str, Any],
    *,
    timeout_s: float,
    request_id: str = "",
) -> dict[str, Any]:
    body = _body(prompt) | {
        "max_tokens": 1,
        "return_token_ids": True,
        "stream": False,
        "cache_salt": salt,
        "kv_transfer_params": dict(params),
    }
    try:
        with closing(post(url, body, timeout_s=timeout_s, request_id=request_id)) as connection:
            response = connection.getresponse()
            text = response.read()
            if response.status != http.HTTPStatus.OK:
                raise EngineFailed(
                    f"the prefill engine answered {response.status}: {text[:_MOST_OF_AN_ERROR]!r}"
                )
            return json.loads(text).get("kv_transfer_params") or {}
    except (OSError, http.client.HTTPException, ValueError) as fault:
        raise EngineFailed(f"the prefill engine did not answer: {fault!r}") from fault


def time_answer(
    url: str,
    prompt: list[int],
    salt: str,
    *,
    max_tokens: int,
    timeout_s: float,
    params: Mapping[str, Any] | None = None,
) -> TimedAnswer:
    """Raises EngineFailed."""
    body = _body(prompt) | {
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "stream": True,
        "cache_salt": salt,
    }
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    began, arrivals, tokens = time.perf_counter(), list[float](), list[int]()
    error = "cut short"
    try:
        with closing(post(url, body, timeout_s=timeout_s)) as connection:
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                error = f"http {response.status}"
            for event in _events(response, until=time.monotonic() + timeout_s):
                before = len(tokens)
                error = _take(event, tokens, error)
                if len(tokens) > before:
                    arrivals.append(time.perf_counter())
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as fault:
        error = repr(fault)
    if error or not arrivals:
        raise EngineFailed(f"a timed request to {url} failed: {error}")
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    return TimedAnswer(tokens, arrivals[0] - began, gaps)


def post(
    url: str, body: Mapping[str, Any], *, timeout_s: float, request_id: str = ""
) -> http.client.HTTPConnection:
    """The caller reads the answer, or closes. Raises OSError."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    try:
        connection.request("POST", _PATH, json.dumps(body), headers)
    except BaseException:
        connection.close()
        raise
    return connection


def _body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }


def answer_alone(
    server: OpenAIServer, prompt: list[int], *, max_tokens: int = OUTPUT_TOKENS
) -> tuple[list[int], int]:
    """Return the answer and its `count_sure`. Raises EngineFailed."""
    body = _body(prompt) | {
        "max_tokens": max_tokens,
        "return_token_ids": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    url = server.base_url.removesuffix("/v1")
    try:
        with closing(post(url, body, timeout_s=600.0)) as connection:
            choice = json.loads(connection.getresponse().read())["choices"][0]
            return choice["token_ids"], count_sure(choice["logprobs"]["top_logprobs"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as fault:
        raise EngineFailed(f"the engine alone did not answer: {fault!r}") from fault


def _events(response: http.client.HTTPResponse, *, until: float) -> Iterator[bytes]:
    """Raises TimeoutError after `until`."""
    for line in iter(response.readline, b""):
        if time.monotonic() > until:
            raise TimeoutError("the answer does not end")
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def _take(event: bytes, tokens: list[int], error: str) -> str:
    if event == b"[DONE]":
        return "" if error == "cut short" else error
    content = json.loads(event)
    if "error" in content:
        return f"an event: {content['error']}"
    for choice in content["choices"]:
        tokens += choice.get("token_ids") or ()
    return error
