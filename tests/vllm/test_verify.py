"""`kvhold verify` on a real vLLM: what it refuses, and further paths."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch in this environment")

import torch

from kvhold_lab.checkpoints import make_checkpoint
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import Ask, Question, Start
from tests.vllm.verifying import (
    HAS_FP8_KV,
    REFUSED,
    UNSTEADY,
    UNSUPPORTED,
    Verified,
    assert_passed,
    verify,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1_800)]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """The others, in the plain path."""
    # one that passes: nothing but refusals is no success
    names = [*REFUSED, *UNSUPPORTED, *UNSTEADY, "llama"]
    return verify(
        tmp_path_factory.mktemp("verify"), "--classes", ",".join(names), "--paths", "plain"
    )


class TestClassesThatDoNotPass:
    @pytest.mark.parametrize("name", sorted(REFUSED))
    def test_what_would_not_come_back_exactly_is_refused_with_the_reason(
        self, others: Verified, name: str
    ) -> None:
        row = others.rows[name, "plain"]
        assert (row["outcome"], row["kv_exact"], row["tokens_equal"]) == ("refused", None, None), (
            others.output
        )
        assert REFUSED[name] in row["reason"]

    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_what_this_vllm_does_not_run_is_named_with_its_own_error(
        self, others: Verified, name: str
    ) -> None:
        row = others.rows[name, "unsupported by vLLM"]
        assert (row["outcome"], row["kv_exact"], row["tokens_equal"], row["requests"]) == (
            "unsupported",
            None,
            None,
            0,
        )
        assert UNSUPPORTED[name] in row["reason"]

    @pytest.mark.parametrize("name", sorted(UNSTEADY))
    def test_where_this_vllm_does_not_answer_twice_alike_tokens_are_not_judged(
        self, others: Verified, name: str
    ) -> None:
        row = others.rows[name, "plain"]
        assert row["kv_exact"] is True, others.output
        assert (row["outcome"], row["tokens_equal"]) in (("unsupported", None), ("pass", True)), (
            others.output
        )

    def test_what_a_tensor_parallel_worker_refuses_is_named_too(self, tmp_path: Path) -> None:
        """Its reason is in the log, where vLLM's own processes write much more after it."""
        verified = verify(tmp_path, "--classes", "falcon-h1", "--paths", "tp2")
        row = verified.rows["falcon-h1", "tp2"]
        assert (row["outcome"], row["kv_exact"], row["tokens_equal"]) == ("refused", None, None), (
            verified.output
        )
        assert REFUSED["falcon-h1"] in row["reason"]

    def test_refusals_do_not_fail_it(self, others: Verified) -> None:
        assert others.exit_code == 0, others.output


def test_the_other_paths_pass_on_a_users_model(tmp_path: Path) -> None:
    """Those that are not asked for by default, and llama's recipe as a path of a user's."""
    model = str(make_checkpoint("llama").path)
    paths = ["layerwise", "ngram", "draft", "fp8-kv"]
    small = [
        "--config",
        '{"tokens_per_chunk": 64}',
        "--engine-args",
        '{"block_size": 32}',
        "--kv-memory",
        "64MiB",
        "--max-model-len",
        "2048",
    ]
    verified = verify(tmp_path, model, "--paths", ",".join([*paths, "async"]), *small)
    for path in paths[: None if HAS_FP8_KV else -1]:
        assert_passed(verified.rows[model, path], verified.output)
    if not HAS_FP8_KV:
        assert UNSUPPORTED["llama-fp8"] in verified.rows[model, "fp8-kv"]["reason"]
    assert verified.rows[model, "async"]["outcome"] == "off"
    assert verified.exit_code == 0, verified.output


def test_this_vllm_s_mla_does_not_go_on_from_its_own_kv_as_it_computes_a_prompt() -> None:
    """Why it is refused: any hit, of vLLM's own too, has the end of a prompt computed by what
    computes outputs. Llama does it well.
    """
    rng = random.Random(3)
    differ = {}
    for name in ("deepseek-v2", "llama"):
        with Engines(timeout_s=600, threads=1) as engines:
            vocabulary = engines.start(Start(engine=_one_by_one(name))).vocabulary
            prompts = [
                [rng.choice(vocabulary) for _ in range(length)] for length in (20, 65, 129, 200)
            ]
            differ[name] = sum(_continues_otherwise(engines, prompt) for prompt in prompts)
    assert differ["deepseek-v2"] > 0, "vLLM has mended it: serve MLA here, and verify it"
    assert differ["llama"] == 0


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_vllm_s_attention_for_amx_passes(tmp_path: Path) -> None:
    """In bfloat16, vLLM packs its KV for AMX."""
    path = "no-prefix-caching"
    verified = verify(tmp_path, "--classes", "llama", "--paths", path, "--dtype", "bfloat16")
    assert_passed(verified.rows["llama", path], verified.output)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_this_vllm_s_mla_for_amx_computes_a_prompt_in_pieces_otherwise_than_whole() -> None:
    """Why it is refused, too: what follows a hit is such a piece. Llama does it well."""
    backend = {"attention_config": {"backend": "AMX_MLA"}}
    differ = {}
    for name, further in {"deepseek-v2": backend, "llama": {}}.items():
        answers = []
        for pieces in ({}, {"max_num_batched_tokens": 64}):
            arguments = _one_by_one(name) | further | pieces
            arguments |= {"dtype": "bfloat16", "enable_prefix_caching": False}
            with Engines(timeout_s=600, threads=1) as engines:
                vocabulary = engines.start(Start(engine=arguments)).vocabulary
                rng = random.Random(3)
                prompts = [
                    [rng.choice(vocabulary) for _ in range(length)] for length in range(20, 400, 10)
                ]
                answers.append([_first_token(engines, prompt) for prompt in prompts])
        whole, in_pieces = answers
        differ[name] = sum(a != b for a, b in zip(whole, in_pieces, strict=True))
    assert differ["deepseek-v2"] > 0, "vLLM has mended it: serve MLA here, and verify it"
    assert differ["llama"] == 0


def _first_token(engines: Engines, prompt: list[int]) -> int:
    return engines.ask(Ask(questions=[Question(tokens=prompt)], max_tokens=1)).token_ids[0][0]


def _one_by_one(name: str) -> dict[str, Any]:
    """Arguments of an engine that computes one request at a time."""
    checkpoint = make_checkpoint(name)
    arguments = {
        "model": str(checkpoint.path),
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": 1,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return arguments | checkpoint.recipe.engine


def _continues_otherwise(engines: Engines, prompt: list[int]) -> bool:
    """Whether a prompt that ends with what the engine has answered goes on otherwise than the
    answer did.
    """
    answer = engines.ask(Ask(questions=[Question(tokens=prompt)], max_tokens=5)).token_ids[0]
    longer = [Question(tokens=prompt + answer[:end]) for end in range(1, len(answer))]
    return [
        tokens[0] for tokens in engines.ask(Ask(questions=longer, max_tokens=1)).token_ids
    ] != answer[1:]
