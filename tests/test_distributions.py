"""The two wheels: what is in them, and what a user has who installs one or both.

An environment here is a fresh one. Where it needs what is large and not ours (torch, vLLM, numba),
it reads the packages of the environment of these tests, but not kvhold's own.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvhold import __version__
from kvhold_lab.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]
LAB_COMMANDS = ("bench", "demo", "simulate", "verify")

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

if __name__ == "__main__":
    settings = {"node": {"socket": sys.argv[2], "idle_exit_s": 60}, "ram_bytes": "64MiB"}
    engine = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, max_model_len=512, block_size=32,
        enable_prefix_caching=False, kv_transfer_config=KVTransferConfig(
            kv_connector="KVHoldConnector", kv_role="kv_both", kv_connector_extra_config=settings,
        ),
    )
    prompt = TokensPrompt(prompt_token_ids=[1 + n % 200 for n in range(400)])
    greedy = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    answers = [list(engine.generate(prompt, greedy)[0].outputs[0].token_ids) for _ in range(2)]
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    _run(
        sys.executable,
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder, ROOT, ROOT / "lab"),
    )
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def alone(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with kvhold's wheel and what it requires."""
    python = _environment(tmp_path_factory.mktemp("alone"))
    _install(python, wheels["kvhold"])
    return python


@pytest.fixture(scope="module")
def both(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with both wheels."""
    python = _environment(tmp_path_factory.mktemp("both"), reads=_packages())
    _install(python, "--no-deps", *wheels.values())
    _bring_compiled_kernels(python)
    return python


class TestContents:
    def test_there_are_two_of_one_version(self, wheels: dict[str, Path]) -> None:
        assert {name: path.name.split("-")[1] for name, path in wheels.items()} == {
            "kvhold": __version__,
            "kvhold_lab": __version__,
        }

    @pytest.mark.parametrize(
        ("name", "sources"), [("kvhold", "src/kvhold"), ("kvhold_lab", "lab/src/kvhold_lab")]
    )
    def test_each_has_its_package_whole_and_nothing_else(
        self, wheels: dict[str, Path], name: str, sources: str
    ) -> None:
        ours = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", sources],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        packed = {
            file
            for file in zipfile.ZipFile(wheels[name]).namelist()
            if ".dist-info/" not in file and not file.endswith((".nbi", ".nbc"))
        }
        assert packed == {str(Path(file).relative_to(Path(sources).parent)) for file in ours}


@pytest.mark.slow
class TestAlone:
    def test_a_cache_in_a_process_needs_no_more(self, alone: Path) -> None:
        done = _run(
            alone,
            "-c",
            "import kvhold\n"
            "with kvhold.open_cache(ram_bytes='64MiB') as cache:\n"
            "    print(cache.status()['arena_bytes'])",
        )
        assert int(done) == 64 << 20

    @pytest.mark.parametrize(
        "arguments", [("--version",), ("--help",), ("tiers",), ("size", "meta-llama/Llama-3.1-8B")]
    )
    def test_its_commands_work(self, alone: Path, arguments: tuple[str, ...]) -> None:
        assert _run(alone.with_name("kvhold"), *arguments)

    @pytest.mark.parametrize("name", LAB_COMMANDS)
    def test_a_command_of_the_lab_says_how_to_get_it(self, alone: Path, name: str) -> None:
        done = subprocess.run(
            [alone.with_name("kvhold"), name], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"kvhold: kvhold {name} is in the package kvhold-lab, which is not installed here: "
            "pip install 'kvhold[lab]'\n"
        )


@pytest.mark.slow
class TestWithTheLab:
    @pytest.mark.parametrize("name", LAB_COMMANDS)
    def test_each_command_is_found(self, both: Path, name: str) -> None:
        assert f"Usage: kvhold {name}" in _run(both.with_name("kvhold"), name, "--help")

    def test_the_simulation_runs(self, both: Path, tmp_path: Path) -> None:
        file = tmp_path / "found.json"
        _run(
            both.with_name("kvhold"),
            *("bench", "soak", "simulation", "--seeds", 4, "--json", file),
        )
        found = json.loads(file.read_text())
        assert (found["seeds"], found["findings"]) == (4, 0)

    def test_a_benchmark_runs(self, both: Path) -> None:
        assert "lookup" in _run(both.with_name("kvhold"), "bench", "micro", "--only", "lookup")

    def test_a_trace_is_replayed(self, both: Path, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        trace.write_text(
            '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 2
        )
        shown = _run(
            both.with_name("kvhold"),
            *("simulate", trace, "--bytes-per-token", "1KiB", "--capacity", "64MiB"),
        )
        assert "lru" in shown


@pytest.mark.vllm
def test_vllm_is_served_by_the_wheel_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = _environment(tmp_path / "environment", reads=_packages())
    _install(python, "--no-deps", wheels["kvhold"])
    _bring_compiled_kernels(python)
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    socket = tmp_path / "node.sock"
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    shown = _run(python, script, make_checkpoint("llama").path, socket, environ=environ)
    kvhold = python.with_name("kvhold")
    status = json.loads(_run(kvhold, "status", "--socket", socket, "--json"))
    _run(kvhold, "stop", "--socket", socket)
    [told] = [line for line in shown.splitlines() if line.startswith("[[")]  # vLLM logs here, too
    computed, loaded = json.loads(told)
    assert len(computed) == 4
    assert loaded == computed
    assert status["counters"]["kvhold_leased_chunks"] >= 3, "the second prompt was loaded"


def _bring_compiled_kernels(python: Path) -> None:
    """Copy those of the checkout, whose sources are the same: compiling them takes a minute."""
    installed = _purelib(python)
    for sources in (ROOT / "src", ROOT / "lab" / "src"):
        for compiled in sources.glob("**/__pycache__/*.nb[ci]"):
            place = installed / compiled.relative_to(sources)
            if place.parent.parent.is_dir():
                place.parent.mkdir(exist_ok=True)
                shutil.copy2(compiled, place)
        for source in sources.glob("**/numba_*.py"):
            copy = installed / source.relative_to(sources)
            if copy.exists() and copy.read_bytes() == source.read_bytes():
                shutil.copystat(source, copy)  # Numba compares the source's time


def _environment(folder: Path, *, reads: Path | None = None) -> Path:
    """Make a virtual environment, and return its Python. reads: a folder of further packages."""
    _run(sys.executable, "-m", "venv", "--without-pip", folder)  # which takes seconds
    python = folder / "bin" / "python"
    if reads is not None:
        own = _purelib(python)
        # a folder named in a .pth file is searched after the environment's own, and its .pth files
        # (such as that of an editable install) are not read
        (own / "reads.pth").write_text(f"{reads}\n")
    return python


def _install(python: Path, *arguments: object) -> None:
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments)


def _purelib(python: Path) -> Path:
    return Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))


def _packages() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _run(*command: object, environ: Mapping[str, str] | None = None) -> str:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "KVHOLD"))
    }
    done = subprocess.run(
        list(map(str, command)),
        env=kept | dict(environ or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()
