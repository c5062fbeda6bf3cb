"""vLLM on two hosts that share nothing but a network: what one has computed, the other loads."""

from pathlib import Path
from typing import Any

import pytest

from kvhold_lab.engines.engine import Engine, kvhold_connector, options_for
from kvhold_lab.engines.models import make_model
from kvhold_lab.engines.prompts import make_prompt
from tests.namespaces import two_hosts
from tests.node.hosts import Hosts
from tests.node.nodes import PATIENT_S

pytestmark = pytest.mark.vllm

NUM_TOKENS = 1500
RAM_BYTES = 128 << 20


def test_a_prompt_of_one_host_is_a_hit_on_the_other_with_the_tokens_of_vllm_alone(
    tmp_path: Path,
) -> None:
    model = make_model("tiny")
    prompt = make_prompt(model.path, NUM_TOKENS)

    def options(**others: Any) -> Any:
        return options_for(model, max_model_len=2048, num_threads=1, **others)

    with Engine(options()) as alone:
        expected = alone.generate(prompt, max_tokens=12)
    cached = []
    with (
        two_hosts() as pair,
        Hosts(tmp_path, pair, "--ram-bytes", str(RAM_BYTES)) as hosts,
    ):
        for host, node in zip(pair, hosts.nodes, strict=True):
            connector = kvhold_connector(
                node.path, RAM_BYTES, client={"call_timeout_s": 30, "arrival_timeout_s": PATIENT_S}
            )
            with Engine(options(kv_transfer_config=connector), under=host.enter) as engine:
                answer = engine.generate(prompt, max_tokens=12)
            assert answer.token_ids == expected.token_ids
            cached.append(answer.num_cached_tokens)
    assert cached == [0, NUM_TOKENS // 128 * 128]
