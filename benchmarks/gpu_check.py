"""`kvhold bench gpu`, for a machine that has torch and a GPU but neither kvhold nor a network.

    python benchmarks/gpu_check.py --bring 3.12 [PACKAGE ...]   # with a network
    python benchmarks/gpu_check.py [--part NAME ...] [--json gpu.json]

The first command fills `.gpu/site` with packages for the GPU machine's version of Python. Run both
in the root of the repository.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".gpu" / "site"
PACKAGES = ("click", "msgspec", "xxhash")


def bring(version: str, *more: str) -> int:
    """Fill `.gpu/site` for a machine with that version of Python."""
    options = [
        "--target",
        str(SITE),
        "--python-version",
        version,
        "--platform",
        "manylinux_2_28_x86_64",
        "--platform",
        "manylinux2014_x86_64",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--upgrade",
        "--no-deps",
        "--only-binary=:all:",
        *options,
        *PACKAGES,
        *more,
    ]
    return subprocess.run(command, check=False).returncode


def main() -> None:
    sources = [str(ROOT / "src"), str(ROOT / "lab" / "src")]
    sys.path[:0] = sources
    sys.path.append(str(SITE))  # the machine's own packages come first
    # for child processes, such as the node
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*sources, *given, str(SITE)])
    from kvhold_lab.bench.gpu.command import command

    command()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bring"]:
        sys.exit(bring(*sys.argv[2:]))
    main()
