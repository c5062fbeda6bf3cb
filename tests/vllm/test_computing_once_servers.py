"""Two servers that get the same cold prompt at once: it is computed once, and both answer alike."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvhold.core.config import ClientConfig
from kvhold.node import NodeClient
from kvhold_lab.engines.engine import options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.openai_server import OpenAIServer
from kvhold_lab.engines.prompts import make_prompt
from tests.vllm.test_two_servers import CONNECTOR, runtime_folder

__all__ = ["runtime_folder"]  # a fixture

pytestmark = pytest.mark.vllm

WARM_TOKENS = (300, 900, 1500, 600)
NUM_TOKENS = 4000
MOST_PROMPTS = 8


@pytest.fixture
def servers(runtime_folder: Path) -> Iterator[tuple[OpenAIServer, OpenAIServer]]:
    model = make_model("tiny")
    settings = {"rules": {"wait_for_computing": True}}
    options = options_for(
        model,
        max_model_len=4352,
        kv_transfer_config=CONNECTOR | {"kv_connector_extra_config": settings},
        num_threads=1,
    )
    environment = {"XDG_RUNTIME_DIR": str(runtime_folder)}
    one, two = (OpenAIServer(options, environment=environment) for _ in range(2))
    try:
        with ThreadPoolExecutor(2) as starters:
            for started in [starters.submit(server.start) for server in (one, two)]:
                started.result()
        yield one, two
    finally:
        one.stop()
        two.stop()


def test_a_prompt_that_two_servers_get_at_once_is_computed_once(
    servers: tuple[OpenAIServer, OpenAIServer], runtime_folder: Path
) -> None:
    model = make_model("tiny")

    def answer(server: OpenAIServer, prompt: Any) -> tuple[Any, float]:
        began_s = time.perf_counter()
        return server.complete(prompt, max_tokens=12), time.perf_counter() - began_s

    alone_s: list[float] = []
    for number, server in enumerate(servers):  # each learns how long computing takes
        for seed, num_tokens in enumerate((*WARM_TOKENS, NUM_TOKENS)):
            prompt = make_prompt(model.path, num_tokens, seed=100 + 10 * number + seed)
            alone_s.append(answer(server, prompt)[1])
    num_cached: list[list[int]] = []
    # on a busy machine waiting may take longer than computing: then the second one computes, too
    while [0, NUM_TOKENS // 128 * 128] not in num_cached and len(num_cached) < MOST_PROMPTS:
        prompt = make_prompt(model.path, NUM_TOKENS, seed=len(num_cached))
        with ThreadPoolExecutor(2) as askers:
            asked = [askers.submit(answer, server, prompt) for server in servers]
            answers, took_s = zip(*(one.result() for one in asked), strict=True)
        print(f"alone {alone_s[len(WARM_TOKENS)]:.3f} s, {alone_s[-1]:.3f} s; together {took_s}")
        assert answers[0].token_ids == answers[1].token_ids
        num_cached.append(sorted(one.num_cached_tokens for one in answers))
    assert num_cached[-1] == [0, NUM_TOKENS // 128 * 128], num_cached
    with NodeClient(runtime_folder / "kvhold" / "node.sock", ClientConfig(), name="test") as client:
        counters = client.status()["counters"]
    assert counters["kvhold_waited_for_computing{result=stored}"] == 1
