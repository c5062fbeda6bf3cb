"""Run `kvhold verify` with each release of vLLM that kvhold serves, or with those that are named.

    python tools/compat.py [--folder .compat] [--classes NAMES] [--json FILE] [RELEASE ...]

Each release has a virtual environment in the folder, made as `make setup` makes one: four minutes,
2 GB. The exit status is 1 unless `kvhold verify` succeeds with each.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.30.0", "0.31.0", "0.32.0")
CLASSES = "llama,gemma3,qwen3-moe"  # full attention, sliding windows, experts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--folder", type=Path, default=ROOT / ".compat")
    parser.add_argument("--classes", default=CLASSES, metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args()

    rows, failed = list[dict[str, Any]](), list[str]()
    for release in options.releases:
        verified = verify(release, options.folder.absolute() / release, options.classes)
        if verified is None:
            failed.append(release)
        rows += [{"release": release, **row} for row in verified or []]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for release in options.releases:
        print(f"vLLM {release}: {'FAILED' if release in failed else 'pass'}")
    return 1 if failed else 0


def verify(release: str, folder: Path, classes: str) -> list[dict[str, Any]] | None:
    """The rows of `kvhold verify`, or None if it failed."""
    print(f"\n=== vLLM {release} ===", flush=True)
    environment = os.environ | {"KVHOLD_SETUP_VLLM": release, "KVHOLD_SETUP_SGLANG": "0"}
    setup: list[str | Path] = [sys.executable, ROOT / "tools/setup_env.py", "--venv", folder]
    if subprocess.run(setup, env=environment, check=False).returncode:
        return None
    file = folder / "verify.json"
    command: list[str | Path] = [
        folder / "bin/kvhold",
        "verify",
        "--classes",
        classes,
        "--json",
        file,
    ]
    if subprocess.run(command, check=False).returncode:
        return None
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


if __name__ == "__main__":
    sys.exit(main())
