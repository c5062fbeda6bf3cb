"""What LMCache needs to be compared inside vLLM: proof that it reuses anything, and llvmlite
mended. LMCache itself is not needed.
"""

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from kvhold_lab.bench.compare.length import LENGTHS
from kvhold_lab.bench.compare.lmcache import LMCacheServer, environment, prove, tokens_per_chunk
from kvhold_lab.bench.compare.lmcache_in_vllm import PACKAGES
from kvhold_lab.engines.engine import Engine
from kvhold_lab.engines.messages import Generated
from kvhold_lab.engines.process import EngineFailed

LOG = """ERROR: Failed to initialize: Traceback (most recent call last):
    raise RuntimeError("No connector found.")
RuntimeError: No connector found.
RuntimeError: No connector found.
ValueError: something else
"""


class FakeEngine:
    def __init__(self, cached_tokens: int) -> None:
        self._cached_tokens = cached_tokens

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, prompt: list[int], *, max_tokens: int) -> Generated:
        return Generated(
            ttft_s=3.14, total_s=3.2, token_ids=[1], num_cached_tokens=self._cached_tokens
        )

    def log_tail(self) -> str:
        return "the end"


def test_an_engine_that_reuses_nothing_is_told_by_its_own_errors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    prove(cast(Engine, FakeEngine(128)), [1, 2], log)
    with pytest.raises(EngineFailed) as failure:
        prove(cast(Engine, FakeEngine(0)), [1, 2], log)
    said = str(failure.value).splitlines()
    assert said[:2] == ["RuntimeError: No connector found.", "ValueError: something else"]
    assert "3.1 s to its first token" in said[2]
    log.write_text("nothing of the kind")
    with pytest.raises(EngineFailed, match="the end"):
        prove(cast(Engine, FakeEngine(0)), [1, 2], log)


def test_packages_of_its_environment_are_found(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    found = environment(tmp_path / "bin" / "python", 1 << 29, num_tokens=1_100)
    assert found[PACKAGES] == str(packages)
    assert found["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.5"
    assert found["LMCACHE_TRACK_USAGE"] == "false"
    assert found["LMCACHE_CHUNK_SIZE"] == "256"


def test_a_quarter_of_a_prompt_has_a_chunk_of_lmcache_s() -> None:
    assert [tokens_per_chunk(tokens) for tokens in (1_100, 1_024, 600)] == [256, 256, 128]
    assert all(tokens_per_chunk(tokens) <= tokens // 4 for tokens in LENGTHS)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "lmcache"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such adapter')\n")
    program.chmod(0o700)
    server = LMCacheServer(
        tmp_path / "python", l1_bytes=1 << 20, tier="ram", folder=tmp_path, num_tokens=1_100
    )
    with pytest.raises(EngineFailed, match="no such adapter"), server:
        pass


def test_llvmlite_has_no_dict_that_is_a_function_and_works() -> None:
    pytest.importorskip("llvmlite")
    code = (
        "from kvhold_lab.bench.compare import lmcache_in_vllm as ours\n"
        "from llvmlite.binding import ffi\n"
        "assert hasattr(ffi.lib, '__dict__'), 'nothing to mend any more'\n"
        "ours._mend_llvmlite()\n"
        "assert not hasattr(ffi.lib, '__dict__')\n"
        "ffi.lib.LLVMPY_GetVersionInfo()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
