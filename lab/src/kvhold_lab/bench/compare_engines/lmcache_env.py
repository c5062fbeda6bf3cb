"""LMCache's environment, made once: 2 GB and some minutes."""

import os
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

from kvhold.core.errors import KVHoldError

LMCACHE = "0.5.6"
TORCH = "2.13.0+cpu"
_STAMP = "kvhold-lmcache.stamp"
_SHOWN_BYTES = 2_000


class NoLMCache(KVHoldError):
    pass


def environment_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvhold" / f"lmcache-{LMCACHE}"


def find_lmcache(folder: Path | None, say: Callable[[str], None]) -> Path | str:
    folder = folder or environment_folder()
    say(f"LMCache {LMCACHE} in {folder} ...")
    try:
        return lmcache_python(folder)
    except NoLMCache as error:
        return str(error)


def lmcache_python(folder: Path) -> Path:
    python, stamp, wanted = (
        folder / "bin" / "python",
        folder / _STAMP,
        f"lmcache=={LMCACHE} torch=={TORCH}\n",
    )
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise NoLMCache(
            f"{folder} exists and is no virtual environment; name another folder with --lmcache-env"
        )
    try:
        if not python.exists():
            venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
        command = [*pip, "install", "--progress-bar", "off", *wanted.split()]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.CalledProcessError as error:
        raise NoLMCache(
            f"{' '.join(error.cmd)}\n{error.output.decode(errors='replace')[-_SHOWN_BYTES:]}"
        ) from error
    except OSError as error:
        raise NoLMCache(f"no virtual environment in {folder}: {error}") from error
    stamp.write_text(wanted)
    return python
