"""`kvhold verify` on a real vLLM: every class of model that this build runs passes, and a connector
that lies is caught.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch in this environment")

import torch

from kvhold_lab.checkpoints import RECIPES, make_checkpoint
from kvhold_lab.verify.engine import Engines
from kvhold_lab.verify.messages import Ask, Question, Start
from kvhold_lab.verify.paths import DEFAULT

# All classes are one test's fixture, which takes long on busy cores.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3_600)]

# What this vLLM does with each class in float32 on CPUs; a change of it is news. Refused: kvhold
# says why it does not serve them here.
REFUSED = {
    "falcon-h1": "mamba_cache_mode is none",
    "deepseek-v2": "MLA on CPUs gives other answers",
}
UNSUPPORTED = {"jamba": "selective_scan_fwd"}
HAS_FP8_KV = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
if not HAS_FP8_KV:
    UNSUPPORTED["llama-fp8"] = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
UNSTEADY = {"lfm2"}  # answers by what else is in the batch
PASSING = sorted(RECIPES.keys() - REFUSED.keys() - UNSUPPORTED.keys() - UNSTEADY)
# what is computed together decides near ties, and busy cores decide what is: it runs by itself
IN_BFLOAT16 = "qwen3-next"
# then vLLM keeps its states at no block's end
REFUSED_PATHS = {("qwen3-next", "no-prefix-caching"): "mamba_cache_mode is none"}

# The fewest blocks that a path loads. How many exactly, busy cores decide: a request of a batch
# finds in the engine what one before it has just loaded, or asks before that and loads it again.
# qwen3-next, whose blocks are the largest, has 10 or 9.
LEAST_BLOCKS = 6


@dataclass(frozen=True)
class Verified:
    """A run of the command, or several. rows: by model and path."""

    exit_codes: list[int]
    output: str
    rows: dict[tuple[str, str], dict[str, Any]]

    @property
    def exit_code(self) -> int:
        (code,) = self.exit_codes
        return code


def verify(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Verified:
    return verify_beside(folder, [arguments], environment=environment)


def verify_beside(
    folder: Path, lots: Sequence[Sequence[str]], *, environment: Mapping[str, str] | None = None
) -> Verified:
    """The command with each of the arguments, all at the same time."""
    with ThreadPoolExecutor(len(lots)) as pool:
        ran = list(
            pool.map(
                lambda number: _run(folder / f"{number}.json", lots[number], environment or {}),
                range(len(lots)),
            )
        )
    rows = [
        row
        for number in range(len(lots))
        for row in json.loads((folder / f"{number}.json").read_text())
    ]
    output = "\n".join(one.stdout + one.stderr for one in ran)
    return Verified(
        [one.returncode for one in ran], output, {(row["model"], row["path"]): row for row in rows}
    )


def _run(
    rows: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "kvhold",
        "verify",
        *arguments,
        "--threads",
        "1",
        "--json",
        str(rows),
    ]
    return subprocess.run(
        argv, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """The classes that pass, in all paths that a user's model is verified in by default; half of
    them on each of two cores.
    """
    folder, paths = tmp_path_factory.mktemp("verify"), ["--paths", ",".join(DEFAULT)]
    steady = [name for name in PASSING if name != IN_BFLOAT16]
    beside = verify_beside(
        folder, [["--classes", ",".join(steady[half::2]), *paths] for half in (0, 1)]
    )
    alone = verify(folder, "--classes", IN_BFLOAT16, *paths)
    return Verified(
        beside.exit_codes + alone.exit_codes, beside.output + alone.output, beside.rows | alone.rows
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """The others, in the plain path."""
    # one that passes: nothing but refusals is no success
    names = [*REFUSED, *UNSUPPORTED, *UNSTEADY, "llama"]
    return verify(
        tmp_path_factory.mktemp("verify"), "--classes", ",".join(names), "--paths", "plain"
    )


def assert_passed(row: dict[str, Any], output: str) -> None:
    assert row["outcome"] == "pass", output
    assert row["kv_exact"] is True
    assert row["tokens_equal"] is True
    assert row["ties"] == 0 or row["model"] == IN_BFLOAT16, output
    assert row["requests"] >= 12
    assert row["blocks"] >= LEAST_BLOCKS


class TestClasses:
    @pytest.mark.parametrize("path", DEFAULT)
    @pytest.mark.parametrize("name", PASSING)
    def test_a_class_that_this_vllm_runs_passes(
        self, classes: Verified, name: str, path: str
    ) -> None:
        row = classes.rows[name, path]
        if (name, path) in REFUSED_PATHS:
            assert (row["outcome"], row["kv_exact"]) == ("refused", None), classes.output
            assert REFUSED_PATHS[name, path] in row["reason"]
        else:
            assert_passed(row, classes.output)

    def test_the_command_ends_well_and_shows_every_row(self, classes: Verified) -> None:
        assert classes.exit_codes == [0, 0, 0], classes.output
        assert classes.rows.keys() == {(name, path) for name in PASSING for path in DEFAULT}
        assert all(f"\n{name}" in classes.output for name in PASSING)

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


@pytest.mark.parametrize(
    ("damage", "dtype"),
    [("bit", "float32"), ("block", "float32"), ("bit", "bfloat16"), ("block", "bfloat16")],
)
def test_a_loaded_block_that_is_damaged_on_the_way_fails(
    tmp_path: Path, damage: str, dtype: str
) -> None:
    environment = {"PYTHONPATH": str(write_plugin(tmp_path)), "TEST_DAMAGE": damage}
    verified = verify(
        tmp_path,
        "--classes",
        "llama",
        "--paths",
        "plain",
        "--dtype",
        dtype,
        environment=environment,
    )
    row = verified.rows["llama", "plain"]
    assert verified.exit_code == 1, verified.output
    assert "kvhold verify: FAILED" in verified.output
    assert (row["outcome"], row["kv_exact"]) == ("FAIL", False), verified.output
    assert "1 of " in row["reason"]
    if damage == "block":
        assert row["tokens_equal"] is False, "without its KV an answer is another"


def test_a_connector_that_finds_nothing_fails(tmp_path: Path) -> None:
    verified = verify(
        tmp_path, "--classes", "llama", "--paths", "plain", "--config", '{"rules": {"load": false}}'
    )
    row = verified.rows["llama", "plain"]
    assert (verified.exit_code, row["outcome"], row["kv_exact"], row["tokens_equal"]) == (
        1,
        "FAIL",
        None,
        True,
    ), verified.output
    assert "no hit" in row["reason"]


def write_plugin(folder: Path) -> Path:
    """A plugin of vLLM's, as a folder for PYTHONPATH: the first block that is loaded is damaged
    after it was copied.
    """
    (folder / "damaging.py").write_text(
        """
import ctypes
import os


def register():
    from kvhold.integrations.vllm.worker import WorkerSide

    scatter, done = WorkerSide._scatter, []
    if scatter.__name__ == "damaging":
        return

    def damaging(self, load, shard, *arguments):
        damaged = scatter(self, load, shard, *arguments)
        view, there = self._views[shard][0], [block for block in load.block_ids[0] if block >= 0]
        if done or not there:
            return damaged
        done.append(True)
        address = int(view.table[0, 0]) + there[0] * view.block_stride
        if os.environ["TEST_DAMAGE"] == "bit":
            (ctypes.c_ubyte * 1).from_address(address)[0] ^= 1
        else:
            ctypes.memset(address, 0, view.group.block_bytes)
        return damaged

    WorkerSide._scatter = damaging
"""
    )
    information = folder / "damaging-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: damaging\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndamaging = damaging:register\n"
    )
    return folder


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
