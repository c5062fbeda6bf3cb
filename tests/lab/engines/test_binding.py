"""Engines that have all cores bind their threads as vLLM does for a user."""

import os
from pathlib import Path

import pytest

from kvhold.memory.placement import spun_cores
from kvhold_lab.engines.engine import Engine, binding
from kvhold_lab.engines.messages import DriverName, EngineOptions
from kvhold_lab.engines.stepped import bound_environment

CORES = os.sched_getaffinity(0)


def test_each_thread_gets_a_core_of_its_own() -> None:
    environment = bound_environment(len(CORES))
    assert spun_cores(environment) >= CORES
    assert environment["OMP_NUM_THREADS"] == str(len(CORES))
    assert not environment["LD_PRELOAD"] or Path(environment["LD_PRELOAD"]).is_file()


def test_engines_that_share_the_cores_are_not_bound() -> None:
    assert binding(len(CORES))["own_binding"]
    assert not binding(len(CORES) + 1)["own_binding"]


@pytest.mark.parametrize(
    ("own_binding", "driver"), [(True, "vllm"), (False, "vllm"), (True, "transformers")]
)
def test_only_vllm_is_bound_and_what_a_caller_says_counts_more(
    own_binding: bool, driver: DriverName
) -> None:
    options = EngineOptions(
        model_path="m", max_model_len=1, kv_cache_bytes=1, own_binding=own_binding, driver=driver
    )
    environment = Engine(options, environment={"OMP_NUM_THREADS": "7"})._environment
    assert ("GOMP_CPU_AFFINITY" in environment) == (own_binding and driver == "vllm")
    assert environment["OMP_NUM_THREADS"] == "7"
