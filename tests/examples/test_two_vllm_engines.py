"""The second engine loads what the first has computed, and gives the same answer."""

import re

import pytest

from tests.examples.running import run_example

pytestmark = pytest.mark.vllm


def test_the_second_engine_loads_the_prompt_and_answers_the_same() -> None:
    # otherwise each engine has two processes more, and each imports vLLM
    in_one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    output = run_example("two_vllm_engines.py", timeout_s=500, environment=in_one_process)
    loaded = re.findall(r"(\w+) engine: (\d+) of 800 prompt tokens loaded", output)
    assert loaded == [("first", "0"), ("second", str(800 // 128 * 128))]
    assert output.splitlines()[-1] == "the same answer: True"
