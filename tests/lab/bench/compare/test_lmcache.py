"""What LMCache needs to be compared inside vLLM: its server, its packages, and llvmlite mended.
LMCache itself is not needed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from kvhold_lab.bench.compare.length import LENGTHS
from kvhold_lab.bench.compare.lmcache import LMCacheServer, environment, tokens_per_chunk
from kvhold_lab.bench.compare.lmcache_in_vllm import PACKAGES
from kvhold_lab.engines.process import EngineFailed


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
